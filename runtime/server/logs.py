"""Log lines of every process of a server: one format, standard error, the process named.

    12:34:56.789 tokenizer  INFO  message

This module does not decide what is worth logging.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s.%(msecs)03d {process:<11} %(levelname)-7s %(message)s"


def set_up(process: str, level: str) -> None:
    """Send this process's log to standard error at `level` (debug, info, warning, error)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(process=process), "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
