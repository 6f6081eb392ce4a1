"""Block copies that the next step must make.

Before its rows: restore, copy on write, keep deeper layers. After them: snapshots taken where a
row stopped.

This module does not copy: the worker does.
"""

from __future__ import annotations

from collections.abc import Iterable

from statewise.runtime.scheduler.batch import BlockCopy

Copies = tuple[BlockCopy, ...]


class CopyQueue:
    """Copies wanted since the last step, in order."""

    def __init__(self) -> None:
        self._before: list[BlockCopy] = []
        self._after: list[BlockCopy] = []

    def before(self, group: int, src: int, dst: int) -> None:
        """Copy before the next step's rows run."""
        self._before.append(BlockCopy(group, src, dst))

    def after(self, group: int, src: int, dst: int) -> None:
        """Copy after the next step's rows have run."""
        self._after.append(BlockCopy(group, src, dst))

    def take(self) -> tuple[Copies, Copies]:
        """(before, after) of the step that is about to run."""
        taken = tuple(self._before), tuple(self._after)
        self._before, self._after = [], []
        return taken

    def forget(self, group: int, blocks: Iterable[int]) -> None:
        """Drop copies into `blocks`, which their owner is giving back."""
        gone = set(blocks)
        if gone:
            self._before = [c for c in self._before if c.group != group or c.dst not in gone]
            self._after = [c for c in self._after if c.group != group or c.dst not in gone]
