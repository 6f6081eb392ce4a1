"""The blocks of one state group on one tier: who may use which, and since when.

    free --allocate--> owned --free--> free          (no step in flight)
                       owned --free--> limbo --retire--> free   (a step may still read it)

Each block has a *generation*, bumped when it is freed: whoever kept a block number with its
generation can tell that the block was given away meanwhile. All operations are vectorised over
block arrays; double frees and frees of unowned blocks are programmer errors (AssertionError).

Epochs: a step opens an epoch and closes it when its reads are complete. Blocks freed while any
epoch is open wait in limbo until every epoch that was open at that moment has closed.

Pins: a copy to a slower tier reads blocks that the tree may let go meanwhile. A block freed while
pinned waits in limbo until the last pin is taken away: what the copy reads is what it was told.

This module does not know what a block holds, and never blocks or evicts.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.errors import OutOfBlocksError

Int32 = NDArray[np.int32]

FREE, OWNED, LIMBO = 0, 1, 2
EMPTY: Int32 = np.empty(0, dtype=np.int32)


class BlockPool:
    """Free list, generations and limbo of `num_blocks` blocks of group `group`."""

    def __init__(self, group: str, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"group {group!r}: a pool needs at least one block")
        self.group = group
        self.num_blocks = num_blocks
        self.generations = np.zeros(num_blocks, dtype=np.int32)
        self._state = np.zeros(num_blocks, dtype=np.uint8)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._open_epochs: set[int] = set()
        self._limbo: deque[tuple[int, Int32]] = deque()  # (newest epoch open at free, blocks)
        self._num_limbo = 0
        self._pins = np.zeros(num_blocks, dtype=np.int32)
        self._num_parked = 0  # of limbo: waiting for pins

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return self._num_free

    @property
    def num_limbo(self) -> int:
        """Blocks freed while a step that may read them is in flight."""
        return self._num_limbo

    @property
    def num_parked(self) -> int:
        """Blocks of the limbo that wait for a copy to end."""
        return self._num_parked

    @property
    def num_owned(self) -> int:
        """Blocks held by the tree or by requests."""
        return self.num_blocks - self._num_free - self._num_limbo

    def allocate(self, count: int) -> Int32:
        """Take `count` free blocks; raises `OutOfBlocksError` and takes none if too few."""
        if count > self._num_free:
            raise OutOfBlocksError(self.group, count, self._num_free)
        if count == 0:
            return EMPTY
        top = self._num_free
        blocks = self._stack[top - count : top][::-1].copy()
        self._num_free = top - count
        self._state[blocks] = OWNED
        return blocks

    def free(self, blocks: Int32) -> None:
        """Give blocks back; they lose their generation at once."""
        if len(blocks) == 0:
            return
        assert (self._state[blocks] == OWNED).all(), f"{self.group}: freed a block not owned"
        self.generations[blocks] += 1
        pinned = self._pins[blocks] > 0
        if pinned.any():
            parked, blocks = blocks[pinned], blocks[~pinned]
            self._state[parked] = LIMBO
            self._num_parked += len(parked)
            self._num_limbo += len(parked)
        self._leave(blocks)

    def _leave(self, blocks: Int32) -> None:
        """Put blocks that no pin holds into limbo, or on the free list."""
        if len(blocks) == 0:
            return
        if self._open_epochs:
            self._state[blocks] = LIMBO
            self._limbo.append((max(self._open_epochs), blocks.copy()))
            self._num_limbo += len(blocks)
        else:
            self._push(blocks)
        assert self._num_free + self._num_limbo <= self.num_blocks

    def _push(self, blocks: Int32) -> None:
        top = self._num_free
        end = top + len(blocks)
        assert end <= self.num_blocks, f"{self.group}: a block was freed twice"
        self._state[blocks] = FREE
        self._stack[top:end] = blocks
        self._num_free = end

    def pin(self, blocks: Int32) -> None:
        """A copy is going to read these owned blocks (no block twice)."""
        assert (self._state[blocks] == OWNED).all(), f"{self.group}: pinned a block not owned"
        self._pins[blocks] += 1

    def unpin(self, blocks: Int32) -> None:
        """The copy does not read them any more; those freed meanwhile go on to the free list."""
        assert (self._pins[blocks] > 0).all(), f"{self.group}: a block was unpinned twice"
        self._pins[blocks] -= 1
        gone = blocks[(self._pins[blocks] == 0) & (self._state[blocks] == LIMBO)]
        self._num_parked -= len(gone)
        self._num_limbo -= len(gone)
        self._leave(gone)

    def open_epoch(self, epoch: int) -> None:
        """A step that may read owned blocks begins."""
        assert epoch not in self._open_epochs
        self._open_epochs.add(epoch)

    def close_epoch(self, epoch: int) -> None:
        """The step's reads are complete; limbo that waited for it only becomes free."""
        self._open_epochs.remove(epoch)
        oldest = min(self._open_epochs, default=None)
        while self._limbo and (oldest is None or self._limbo[0][0] < oldest):
            _, blocks = self._limbo.popleft()
            self._num_limbo -= len(blocks)
            self._push(blocks)

    def limbo_blocks(self) -> Int32:
        """All blocks in limbo (for the auditor)."""
        return np.concatenate([self.parked_blocks(), *(b for _, b in self._limbo)])

    def parked_blocks(self) -> Int32:
        """Blocks of the limbo that a copy may still read."""
        parked = np.flatnonzero((self._state == LIMBO) & (self._pins > 0))
        return parked.astype(np.int32)

    def free_blocks(self) -> Int32:
        """All free blocks (for the auditor); a view, do not keep."""
        return self._stack[: self._num_free]
