"""The echo server's tokenizer process."""

from __future__ import annotations

from collections.abc import Callable

from statewise.runtime.server.child import Child, child_main
from statewise.runtime.server.tokenizer_process import TokenizerLoop
from support.echo import ByteTokenizer


def start(child: Child) -> Callable[[], None]:
    child.announce({"chat_template": "{{ messages }}{{ tools }}", "eos_token": "<eos>"})
    return TokenizerLoop(child, ByteTokenizer()).run


if __name__ == "__main__":
    child_main(start)
