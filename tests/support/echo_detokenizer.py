"""The echo server's detokenizer process."""

from __future__ import annotations

from collections.abc import Callable

from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.server.child import Child, child_main
from statewise.runtime.server.detokenizer_process import DetokenizerLoop
from support.byte_vocab import ByteVocabulary


def start(child: Child) -> Callable[[], None]:
    child.announce({})
    return DetokenizerLoop(child, DetokenizerCore(ByteVocabulary())).run


if __name__ == "__main__":
    child_main(start)
