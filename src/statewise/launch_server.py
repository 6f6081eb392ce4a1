"""`python -m statewise.launch_server`: start a server (docs/api.md)."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def run() -> int:
    """Start a server from the command line; Ctrl-C ends it without a word at any time."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is begun: just end
    from statewise.runtime.server.launch import main

    signal.signal(signal.SIGINT, before)
    try:
        return main(prog="python -m statewise.launch_server")
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
