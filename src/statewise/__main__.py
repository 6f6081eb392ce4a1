"""`python -m statewise` and the console script `statewise`. See frontend/cli.py."""

from __future__ import annotations

import sys

from statewise.frontend.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
