"""`python -m statewise.launch_server`: start a server (docs/api.md)."""

from __future__ import annotations

import sys

from statewise.runtime.server.launch import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m statewise.launch_server"))
