"""The echo server's scheduler process."""

from __future__ import annotations

from collections.abc import Callable

from statewise.runtime.server.child import Child, child_main
from statewise.runtime.server.scheduler_process import SchedulerLoop
from support.echo import CONTEXT_LEN, VOCAB_SIZE, EchoEngine


def start(child: Child) -> Callable[[], None]:
    child.announce(
        {"vocab_size": VOCAB_SIZE, "max_sequence_len": CONTEXT_LEN, "lines": ["echo: no model"]}
    )
    return SchedulerLoop(child, EchoEngine()).run


if __name__ == "__main__":
    child_main(start)
