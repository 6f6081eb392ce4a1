"""The shape of the tree: roots, walking, splitting, growing, protecting, removing.

Protection. A lease locks the node that ends at its last page. `protect` of a node counts its own
locks and its protected children, so the path of a lease is protected without visiting what another
lease protects already. A node with `protect == 0` is in `recency`; since a path is unprotected
from below upwards, a node always enters `recency` after its children. Those of them without
children are in `leaves` as well, by the policy's score: eviction never looks for its victim.

    lock(C):   root 1 <- A 1 <- B 1 <- C 1          recency: (others)
    unlock(C): C, B, A enter recency in this order; C enters leaves, A and B when they are bare

This module does not know what trailing state is worth (`Trailing` does) or what a request does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from statewise.radix.key import TOKEN_BYTES, Namespace, TokenKey, common_tokens
from statewise.radix.match import Match, Snapshot
from statewise.radix.node import Checkpoint, Condemned, Node, WindowPins
from statewise.radix.order import ScoreOrder
from statewise.radix.results import FreedBuilder, SlowBlock
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import (
    BLOCK,
    DEPENDENCY,
    SEQ,
    SLOW_BLOCK,
    SLOW_TIER,
    Int32,
    Segment,
    Tier,
    empty_segment,
)
from statewise.radix.trailing import Trailing

MAX_NODE_TOKENS = 8192  # bounds what a split or an extension copies
EXTEND_PAGES = 256  # a leaf grows in place up to this many pages, or while it less than doubles

NO_PAGES = empty_segment()
Segments = tuple[Segment, ...]


class Topology:
    """Nodes and roots. `evictable[group]` is shared with `Trailing`: both keep it exact."""

    def __init__(self, schema: CacheSchema, trailing: Trailing, stamps: tuple[int, ...]) -> None:
        size = schema.page_size
        self.schema = schema
        self.trailing = trailing
        self.evictable = trailing.evictable
        self.stamps = stamps
        self.page_bytes = size * TOKEN_BYTES
        self.max_pages = max(1, MAX_NODE_TOKENS // size)
        self.roots: dict[bytes, Node] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.policy = trailing.policy
        self.recency: OrderedDict[Node, None] = OrderedDict()
        self.leaves: ScoreOrder[Node] = ScoreOrder()
        self.version = 0  # moves whenever something leaves the tree
        groups = schema.groups
        self.history = tuple(g for g, s in enumerate(groups) if s.kind.is_history)
        self.paged = tuple(g for g, s in enumerate(groups) if not s.kind.is_snapshot)
        self.sources = {
            g: schema.index_of(s.depends_on)
            for g, s in enumerate(groups)
            if s.depends_on is not None and not s.kind.is_snapshot
        }
        self.history_stamps = tuple(stamps[g] for g in self.history)

    # ---------------------------------------------------------------- reading

    def root(self, namespace: Namespace) -> Node:
        """Return the namespace's root, made if needed."""
        root = self.roots.get(namespace.key)
        if root is None:
            root = Node(None, namespace.key, 0, 0, tuple(NO_PAGES for _ in self.schema.groups))
            self.roots[namespace.key] = root
            self.namespaces[namespace.key] = namespace
        return root

    def walk(self, match: Match) -> Match:
        """Fill a new match. Changes nothing in the tree."""
        node = self.roots.get(match.namespace.key)
        if node is None:
            return match
        data = match.key.data
        page_bytes = self.page_bytes
        last = len(data) - page_bytes
        nodes, starts, all_segments = match.nodes, match.starts, match.segments
        expected = self.history_stamps
        offset = page = whole = 0
        if node.checkpoints:
            self._find_snapshots(match, node, 0, 0)
        while offset <= last:
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            run = child.key
            nodes.append(child)
            starts.append(page)
            all_segments.append(child.segments)
            if whole == page and child.clean == expected:
                whole = child.end
            if not data.startswith(run, offset):
                page += common_tokens(run, data, offset) // self.schema.page_size
                if child.checkpoints:
                    self._find_snapshots(match, child, starts[-1] + 1, page)
                break
            if child.checkpoints:
                self._find_snapshots(match, child, page + 1, child.end)
            page = child.end
            offset += len(run)
            node = child
        match.logical_pages = page
        match.history_whole_pages = min(whole, page)
        return match

    def _find_snapshots(self, match: Match, node: Node, first: int, last: int) -> None:
        """Add the node's snapshots at boundaries [first, last] whose tail the key continues."""
        found = [
            Snapshot(checkpoint)
            for checkpoint in node.checkpoints.values()
            if checkpoint.blocks
            and first <= checkpoint.page <= last
            and (
                not checkpoint.tail
                or match.key.data.startswith(checkpoint.tail, checkpoint.page * self.page_bytes)
            )
        ]
        if found:
            found.sort(key=lambda s: s.position)
            match.snapshots = (*match.snapshots, *found)

    def node_at(self, node: Node, page: int) -> Node:
        """Find the node on the way up from `node` that holds the page below boundary `page`."""
        while node.start >= page and node.parent is not None:
            node = node.parent
        return node

    def nodes(self) -> Iterator[tuple[Namespace, Node]]:
        """Every node, roots included, parents first."""
        for key, root in self.roots.items():
            stack = [root]
            while stack:
                node = stack.pop()
                yield self.namespaces[key], node
                stack.extend(reversed(node.children.values()))

    def holds(self, node: Node) -> bool:
        """Whether `node` is still part of the tree."""
        if node.parent is None:
            return self.roots.get(node.key) is node
        return node.protect > 0 or node in self.recency

    def path_of(self, node: Node) -> tuple[Namespace, TokenKey]:
        """Namespace and tokens from the root to the end of `node`."""
        runs: list[bytes] = []
        while node.parent is not None:
            runs.append(node.key)
            node = node.parent
        return self.namespaces[node.key], TokenKey.from_bytes(b"".join(reversed(runs)))

    # ---------------------------------------------------------------- growing

    def split(self, node: Node, page: int) -> Node:
        """Cut `node` at `page`; the upper part must be protected before eviction runs.

        A lower part that holds nothing (all its pages had been dropped) does not stay.
        """
        upper = node.split(page, self.page_bytes)
        self.trailing.after_split(upper, node)
        upper.clean = self._clean(upper.segments)
        node.clean = self._clean(node.segments)
        if not upper.protect:
            self.recency[upper] = None  # newer than its child, as the order demands
            upper.tick = self.trailing.next_tick()
        if self._is_empty(node):
            self._unlink(node)
        return upper

    def boundary_node(self, node: Node, page: int) -> Node:
        """Find the node above or at `node` that ends exactly at `page`, split if need be."""
        node = self.node_at(node, page)
        return self.split(node, page) if node.end > page else node

    def set_segments(self, node: Node, segments: Segments) -> None:
        """Replace a node's segments."""
        node.segments = segments
        node.clean = self._clean(segments)

    def _clean(self, segments: Segments) -> tuple[int, ...] | None:
        """Stamps of the history groups if every page of all of them is whole, else None."""
        stamps = []
        for group in self.history:
            segment = segments[group]
            if segment.num_present != segment.num_pages or segment.aside.invalid is not None:
                return None
            source = self.sources.get(group)
            if source is not None and not np.array_equal(
                segment.table[DEPENDENCY], segments[source].table[SEQ]
            ):
                return None
            stamps.append(segment.stamp)
        return tuple(stamps)

    def grow(self, node: Node, key: TokenKey, new: Segments, num: int) -> Node:
        """Add `num` pages below `node`, which the caller's lease anchors; return the new end.

        `new` holds the pages' segments. The leaf is extended in place while it is small and
        nobody else stands on it; otherwise children are added, each of bounded size.
        """
        page, done = node.end, 0
        size = node.num_pages
        room = min(self.max_pages, max(EXTEND_PAGES, 4 * num)) - size
        alone = not node.children and node.protect == 1 and node.parent is not None
        if alone and room >= num:
            self._extend(node, key, new, num)
            return node
        while done < num:
            take = min(num - done, self.max_pages)
            part = new if take == num else tuple(self._cut(s, done, done + take) for s in new)
            node = self._add_child(node, key, page, page + take, part)
            page, done = page + take, done + take
        return node

    @staticmethod
    def _cut(segment: Segment, start: int, stop: int) -> Segment:
        return segment.part(start, stop) if segment.num_pages else segment

    def _extend(self, node: Node, key: TokenKey, new: Segments, num: int) -> None:
        start = node.end
        node.end += num
        node.key += key.data[start * self.page_bytes : node.end * self.page_bytes]
        joined = [
            mine.joined(more) if more is not NO_PAGES else mine
            for mine, more in zip(node.segments, new, strict=True)
        ]
        self.set_segments(node, tuple(joined))
        if node.pins:
            self.trailing.pages_added(node)

    def _add_child(
        self, parent: Node, key: TokenKey, start: int, end: int, segments: Segments
    ) -> Node:
        run = key.data[start * self.page_bytes : end * self.page_bytes]
        child = Node(parent, run, start, end, segments)
        child.clean = self._clean(segments)
        parent.children[run[: self.page_bytes]] = child
        child.tick = self.trailing.next_tick()
        self.recency[child] = None
        for group in self.history:
            self.evictable[group] += segments[group].num_present
        if self.trailing.windows:
            child.pins = tuple([WindowPins(child, group) for group in self.trailing.windows])
            self.trailing.pages_added(child)
        return child

    # ---------------------------------------------------------------- protecting

    def lock(self, node: Node) -> None:
        """Add a lease at `node`."""
        node.locks += 1
        if not node.protect and node.hits and node.parent is not None:
            self.policy.note_gap(self.trailing.tick - node.tick)
        self.leaves.discard(node)
        at: Node | None = node
        while at is not None:
            at.protect += 1
            if at.protect > 1:
                return
            at.hits += 1
            if at.parent is not None:
                del self.recency[at]
                for group in self.history:
                    self.evictable[group] -= at.segments[group].num_present
            at = at.parent

    def unlock(self, node: Node, freed: FreedBuilder) -> None:
        """Take a lease away; nodes that nobody protects any more become the newest evictable."""
        node.locks -= 1
        at: Node | None = node
        while at is not None:
            at.protect -= 1
            if at.protect:
                return
            if at.condemned:
                for group, block in at.condemned:
                    freed.add_one(group, block)
                at.condemned.clear()
            parent = at.parent
            if parent is not None:
                at.tick = self.trailing.next_tick()
                self.recency[at] = None
                if not at.children:
                    self.leaves.put(at, self.policy.node_score(at))
                for group in self.history:
                    self.evictable[group] += at.segments[group].num_present
            self.prune(at)
            at = parent

    # ---------------------------------------------------------------- removing

    def condemn(self, node: Node, group: int, block: int) -> None:
        """Free `block` when the last lease at or below `node` is gone."""
        node.condemned.append(Condemned(group, block))

    def prune(self, node: Node) -> None:
        """Remove `node` and its ancestors as far as they hold nothing and lead nowhere."""
        at: Node | None = node
        while at is not None and self._is_empty(at):
            if at.parent is None:
                self._forget_root(at)
                return
            parent = at.parent
            self._unlink(at)
            at = parent

    @staticmethod
    def _is_empty(node: Node) -> bool:
        """Whether a node holds nothing and leads nowhere; a root holds no pages."""
        if node.children or node.protect or node.checkpoints:
            return False
        for segment in node.segments:
            if segment.num_present or segment.aside.slow is not None:
                return False
        return True

    def _forget_root(self, root: Node) -> None:
        del self.roots[root.key], self.namespaces[root.key]  # a root's key is its namespace

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is forgotten, not unlinked"
        del parent.children[node.key[: self.page_bytes]]
        del self.recency[node]
        self.leaves.discard(node)
        if not parent.children and parent in self.recency:
            self.leaves.put(parent, self.policy.node_score(parent))
        self.version += 1

    def take_tail(self, node: Node, page: int, freed: FreedBuilder) -> None:
        """Free the pages of an unprotected leaf from absolute `page` on, in every group."""
        assert not node.children, "only a leaf's tail can go"
        assert not node.protect, "leased pages stay"
        self.version += 1
        if node.checkpoints:
            whole = page <= node.start
            for checkpoint in [c for c in node.checkpoints.values() if whole or c.page > page]:
                self.trailing.remove_checkpoint(checkpoint, freed)
        k = max(page - node.start, 0)
        self.trailing.pages_removed(node, k)
        for group in self.paged:
            num = collect(group, node.segments[group], k, freed)
            if group in self.history:
                self.evictable[group] -= num
        if k:
            node.trim(page, self.page_bytes)
            node.clean = self._clean(node.segments)
        else:
            parent = node.parent
            self._unlink(node)
            if parent is not None:
                self.prune(parent)

    def take_leaf(self, node: Node, group: int, num_blocks: int, freed: FreedBuilder) -> None:
        """Free up to `num_blocks` of a paged group from the tail of an unprotected leaf."""
        segment = node.segments[group]
        if segment.num_present <= num_blocks:
            self.take_tail(node, node.start, freed)
            return
        if segment.num_present == segment.num_pages:
            k = segment.num_pages - num_blocks
        else:
            k = int(np.flatnonzero(segment.table[BLOCK] >= 0)[-num_blocks])
        self.take_tail(node, node.start + k, freed)


def collect(group: int, segment: Segment, k: int, freed: FreedBuilder) -> int:
    """Add every block of a segment from its page `k` on to `freed`; how many are on the device."""
    size = segment.num_pages
    num, first = segment.present_in(k, size)
    if num:
        blocks: Int32 = segment.table[BLOCK, k + first :]
        freed.add(group, blocks if num == len(blocks) else blocks[blocks >= 0])
    slow = segment.aside.slow
    if slow is not None:
        for page in (np.flatnonzero(slow[SLOW_BLOCK, k:] >= 0) + k).tolist():
            tier = Tier(int(slow[SLOW_TIER, page]))
            freed.slow.append(SlowBlock(group, tier, int(slow[SLOW_BLOCK, page])))
    return num


def checkpoints_of(node: Node) -> list[Checkpoint]:
    """Sort the node's checkpoints by position."""
    return sorted(node.checkpoints.values(), key=lambda c: c.position)
