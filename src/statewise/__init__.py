"""statewise: a serving runtime that reuses cached state only when it can prove it is usable.

The public names are loaded on first use, so that ``import statewise`` costs milliseconds and the
frontend never imports torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
