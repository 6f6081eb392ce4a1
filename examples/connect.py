"""Where the examples run: a server that is up (--url), or an engine in this process.

python examples/quick_start.py                                # in process, SmolLM2-135M
python examples/quick_start.py --url http://127.0.0.1:30000   # after `make serve`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import statewise as sw


@contextmanager
def backend() -> Iterator[None]:
    """Set the default backend from the command line; ends what it started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="address of a running server")
    parser.add_argument("--model", default="smollm2-135m", help="model to load without --url")
    asked = parser.parse_args()
    if asked.url:
        sw.set_default_backend(sw.RuntimeEndpoint(asked.url))
        yield
        return
    with sw.Engine(model_path=asked.model) as engine:
        sw.set_default_backend(engine)
        yield
