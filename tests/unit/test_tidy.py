"""Each rule of tools/tidy.py reports the violation planted for it, and nothing on clean code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidy

REPOSITORY = Path(__file__).resolve().parents[2]

HEAD = '"""Says what it is."""\n\nfrom __future__ import annotations\n\n'
LONG_FUNCTION = HEAD + "def f() -> None:\n" + "    x = 1\n" * tidy.MAX_FUNCTION_LINES

# path, text, rule
VIOLATIONS = [
    ("radix/a.py", HEAD + "import torch\n", "radix-pure"),
    ("radix/a.py", HEAD + "import scipy.sparse\n", "radix-pure"),
    ("radix/a.py", HEAD + "import threading\n", "radix-pure"),
    ("radix/a.py", HEAD + "def f() -> None:\n    import os\n", "radix-pure"),
    ("radix/a.py", HEAD + "x = open('f')\n", "radix-pure"),
    ("radix/a.py", HEAD + "from statewise.runtime import errors\n", "layer"),
    ("kernels/a.py", HEAD + "import statewise.runtime.config\n", "layer"),
    ("kernels/a.py", HEAD + "def f() -> None:\n    from statewise import runtime\n", "layer"),
    ("runtime/a.py", HEAD + "import statewise.frontend\n", "layer"),
    ("frontend/a.py", HEAD + "import statewise.runtime.engine\n", "layer"),
    ("frontend/a.py", HEAD + "def f() -> None:\n    import torch\n", "torch"),
    ("runtime/scheduler/a.py", HEAD + "import torch\n", "torch"),
    ("runtime/memory/block_pool.py", HEAD + "def f() -> None:\n    import torch\n", "torch"),
    ("runtime/server/a.py", HEAD + "from torch import Tensor\n", "torch"),
    ("runtime/cache/a.py", HEAD + "import time\n", "clock"),
    ("runtime/engine/core.py", HEAD + "from random import choice\n", "clock"),
    ("radix/a.py", HEAD + "import numpy as np\nx = np.random.default_rng()\n", "clock"),
    ("radix/a.py", HEAD + "from numpy.random import default_rng\n", "clock"),
    ("runtime/a.py", HEAD + "from . import errors\n", "relative-import"),
    ("tests/unit/a.py", "from ..support import x\n", "relative-import"),
    ("runtime/a.py", HEAD + "import kernels\n", "bare-import"),
    ("tests/unit/a.py", "from radix.tree import RadixTree\n", "bare-import"),
    ("runtime/a.py", HEAD + "import pickle\n", "never"),
    ("runtime/a.py", HEAD + "def f() -> None:\n    import multiprocessing as mp\n", "never"),
    ("runtime/a.py", HEAD + "from transformers import AutoModel\n", "never"),
    ("kernels/a.py", HEAD + "import flashinfer\n", "lazy"),
    ("runtime/a.py", "x" * (tidy.MAX_COLUMNS + 1) + "\n", "columns"),
    ("kernels/csrc/a.cpp", "// " + "x" * tidy.MAX_COLUMNS + "\n", "columns"),
    ("tools/a.py", "x = 1\n" * (tidy.MAX_FILE_LINES + 1), "file-length"),
    ("runtime/a.py", LONG_FUNCTION, "function-length"),
    ("runtime/a.py", HEAD + "# TODO: later\n", "word"),
    ("runtime/a.py", HEAD + "raise NotImplementedError\n", "word"),
    ("docs/a.md", "Lies in /work/main.\n", "word"),
    ("runtime/a.py", HEAD + "class PoolManager:\n    x = 1\n", "word"),
    ("runtime/a.py", "from __future__ import annotations\n", "docstring"),
    ("runtime/a.py", '"""Says."""\n\n\ndef f() -> None:\n    pass\n', "future"),
    ("docs/a.md", "See [the tree](tree.md).\n", "link"),
    ("docs/a.md", "# One\n\nSee [two](#two).\n", "link"),
    ("docs/a.md", "![picture](gone.svg)\n", "link"),
    ("runtime/a.py", '"""See docs/gone.md."""\n', "link"),
]

CLEAN = [
    ("radix/a.py", HEAD + "import numpy as np\n\nfrom statewise.radix.schema import GroupKind\n"),
    ("runtime/clock.py", HEAD + "import time\n"),
    ("runtime/server/a.py", HEAD + "import time\n\nimport starlette\n"),
    ("runtime/worker/a.py", HEAD + "import torch\n"),
    ("kernels/a.py", HEAD + "def f() -> None:\n    import flashinfer\n"),
    ("frontend/a.py", HEAD + "def f() -> None:\n    import statewise.runtime.engine\n"),
    ("tests/unit/a.py", "import transformers\nfrom statewise.runtime import kernels\n"),
    ("runtime/cache/a.py", HEAD + "from typing import TYPE_CHECKING\n"
     "if TYPE_CHECKING:\n    import torch\n"),
    ("docs/a.md", "# A `b` (c)\n\n[here](#a-b-c) [out](https://example.org) [self](a.md)\n"
     "```\n[not a link](nowhere.md)\n```\n"),
]  # fmt: skip


def _plant(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("path", "text", "rule"), VIOLATIONS)
def test_planted_violation_is_reported(tmp_path: Path, path: str, text: str, rule: str) -> None:
    _plant(tmp_path, path, text)
    problems = tidy.check_all(tmp_path)
    assert rule in {p.rule for p in problems}
    assert {p.path for p in problems} == {path}


@pytest.mark.parametrize(("path", "text"), CLEAN)
def test_clean_code_is_silent(tmp_path: Path, path: str, text: str) -> None:
    _plant(tmp_path, path, text)
    assert tidy.check_all(tmp_path) == []


def test_torch_reached_through_a_chain_of_imports_is_reported(tmp_path: Path) -> None:
    _plant(tmp_path, "runtime/scheduler/a.py", HEAD + "import statewise.runtime.models.b\n")
    _plant(tmp_path, "runtime/models/b.py", HEAD + "from statewise.runtime.models import c\n")
    _plant(tmp_path, "runtime/models/c.py", HEAD + "import torch\n")
    [problem] = tidy.check_all(tmp_path)
    assert problem.rule == "torch"
    assert problem.message.endswith(
        "statewise.runtime.scheduler.a -> statewise.runtime.models.b"
        " -> statewise.runtime.models.c -> torch"
    )


def test_a_package_that_loads_torch_taints_its_modules(tmp_path: Path) -> None:
    _plant(tmp_path, "runtime/cache/a.py", HEAD + "import statewise.runtime.models.data\n")
    _plant(tmp_path, "runtime/models/__init__.py", HEAD + "import torch\n")
    _plant(tmp_path, "runtime/models/data.py", HEAD)
    assert [p.rule for p in tidy.check_all(tmp_path)] == ["torch"]


def test_every_rule_has_a_planted_violation() -> None:
    text = (REPOSITORY / "tools" / "tidy.py").read_text(encoding="utf-8")
    rules = set(re.findall(r'Problem\([^"]*"([a-z-]+)"', text))
    assert rules == {rule for _path, _text, rule in VIOLATIONS}


def test_exit_status_says_whether_there_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tidy.main(["tidy", str(tmp_path)]) == 0
    _plant(tmp_path, "runtime/a.py", HEAD + "import pickle\n")
    assert tidy.main(["tidy", str(tmp_path)]) == 1
    assert "runtime/a.py:5: never: pickle" in capsys.readouterr().out
