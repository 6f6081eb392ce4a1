"""`python -m statewise` and the console script `statewise`. See frontend/cli.py."""

from __future__ import annotations

import sys

from statewise.frontend import cli

__all__ = ["main"]

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main() -> int:
    """Run the command line; Ctrl-C ends it without a traceback."""
    try:
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
