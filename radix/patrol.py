"""A walk over everything that has a checksum, a few blocks at a time, for ever.

    take(n)   the next n blocks, of pages or of single positions, with what was recorded of them
    found     in terms of a match and verdicts, as if a request had come upon the damage

A round lists the nodes once and then visits them one by one; what has left the tree meanwhile is
skipped, what has come in waits for the next round. The walk holds no lease: compare at once what
`take` returned, before anything else touches the tree.

This module does not read bytes and does not drop anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from statewise.radix.key import TokenKey
from statewise.radix.match import Match
from statewise.radix.node import Checkpoint, Node
from statewise.radix.segment import BLOCK, Int32
from statewise.radix.tree import RadixTree
from statewise.radix.validation import Condition, Verdict, bad_layers

UInt64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Portion:
    """Some blocks of one group that can be compared: of a node's pages, or of one checkpoint."""

    group: int
    blocks: Int32  # [n]
    recorded: UInt64  # [n, layers of the group]
    node: Node
    pages: tuple[int, ...]  # absolute; empty: the block of `checkpoint`
    checkpoint: Checkpoint | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def part(self, start: int, stop: int) -> Portion:
        """Blocks [start, stop)."""
        return replace(
            self,
            blocks=self.blocks[start:stop],
            recorded=self.recorded[start:stop],
            pages=self.pages[start:stop],
        )


class Patrol:
    """The walk's place in one tree."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._round: deque[Node] = deque()
        self._node: Node | None = None
        self._num_done = 0  # blocks of this node
        self.num_rounds = 0  # finished

    def take(self, max_blocks: int) -> list[Portion]:
        """Return portions of at most `max_blocks` blocks in all; fewer where a round ends.

        What a node holds is looked up anew at each call, so nothing returned is out of date.
        """
        if self._node is None and not self._round:
            self._round.extend(node for _, node in self._tree.topology.nodes())
        out: list[Portion] = []
        left = max_blocks
        while left > 0:
            if not self._stand():
                self.num_rounds += 1
                break
            taken = self._of_node(left)
            out += taken
            left -= sum(len(portion) for portion in taken)
        return out

    def _stand(self) -> bool:
        """Stand on a node that is still in the tree; False at the end of the round."""
        holds = self._tree.topology.holds
        while self._node is None or not holds(self._node):
            if not self._round:
                self._node = None
                return False
            self._node, self._num_done = self._round.popleft(), 0
        return True

    def _of_node(self, max_blocks: int) -> list[Portion]:
        """The node's next portions; moves on where there are no more."""
        assert self._node is not None
        skip, left = self._num_done, max_blocks
        out: list[Portion] = []
        for portion in _portions(self._tree, self._node):
            part = portion.part(skip, skip + left)
            skip = max(0, skip - len(portion))
            if len(part):
                out.append(part)
                left -= len(part)
            if not left:
                break
        else:
            self._node = None
        self._num_done += max_blocks - left
        return out

    def found(self, portion: Portion, now: UInt64) -> tuple[Match, list[Verdict]] | None:
        """What differs from `now` [n, layers], as verdicts about a match; None: nothing does."""
        masks = bad_layers(portion.recorded, now)
        if not any(masks):
            return None
        namespace, key = self._tree.topology.path_of(portion.node)
        checkpoint = portion.checkpoint
        if checkpoint is not None:
            page_bytes = self._tree.topology.page_bytes
            key = TokenKey.from_bytes(key.data[: checkpoint.page * page_bytes] + checkpoint.tail)
            verdicts = [_verdict(portion.group, masks[0], position=checkpoint.position)]
        else:
            by_mask: dict[int, list[int]] = {}
            for page, mask in zip(portion.pages, masks, strict=True):
                if mask:
                    by_mask.setdefault(mask, []).append(page)
            verdicts = [_verdict(portion.group, m, tuple(p)) for m, p in by_mask.items()]
        return self._tree.match(namespace, key), verdicts


def _portions(tree: RadixTree, node: Node) -> Iterator[Portion]:
    """Everything of a node that has a checksum and is not known to be bad."""
    for group in tree.topology.paged:
        segment = node.segments[group]
        sums = segment.aside.checksums
        if sums is None:
            continue
        good = (segment.table[BLOCK] >= 0) & sums.any(axis=1)
        good[list(segment.aside.invalid or ())] = False
        index = np.flatnonzero(good)
        if len(index):
            pages = tuple((index + node.start).tolist())
            yield Portion(group, segment.table[BLOCK, index], sums[index], node, pages)
    for checkpoint in node.checkpoints.values():
        for held in checkpoint.blocks:
            if held.checksums:
                block = np.array([held.block], dtype=np.int32)
                recorded = np.array([held.checksums], dtype=np.uint64)
                yield Portion(held.group, block, recorded, node, (), checkpoint)


def _verdict(group: int, layers: int, pages: tuple[int, ...] = (), position: int = -1) -> Verdict:
    detail = f"bytes changed: layers {layers:#x}"
    return Verdict(group, Condition.CHECKSUM, pages, position, layers, detail)
