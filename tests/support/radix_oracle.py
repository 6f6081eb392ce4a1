"""A plain model of the radix tree: dictionaries keyed by whole prefixes, needs checked literally.

Nothing here shares code with the tree beyond the schema. Blocks come from counting pools that
remember what was written into them, so that a stale, foreign or misplaced block is seen at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from statewise.radix import (
    CacheSchema,
    Freed,
    GroupKind,
    Lease,
    Match,
    Namespace,
    Published,
    RadixTree,
    StateGroupSpec,
    TokenKey,
    Written,
    eviction_policy,
)

CAPACITY = 1 << 12  # blocks of a pool
Place = tuple[bytes, bytes]  # namespace key, token bytes of the whole prefix


def group(name: str, kind: GroupKind, **more: object) -> StateGroupSpec:
    size = "snapshot_bytes" if kind.is_snapshot else "entry_bytes"
    return StateGroupSpec(name, kind, (0,), "layout", "v1", **{size: 8, **more})  # type: ignore[arg-type]


def schema(page_size: int, *groups: StateGroupSpec) -> CacheSchema:
    return CacheSchema(page_size, 1, groups, "model")


FULL = group("full", GroupKind.FULL)


def window(size: int, name: str = "window", sinks: int = 0) -> StateGroupSpec:
    return group(name, GroupKind.WINDOW, window=size, sinks=sinks)


RECURRENT = group("recurrent", GroupKind.RECURRENT)

SCHEMAS = {
    "full": schema(2, FULL),
    "full_page1": schema(1, FULL),
    "full_window": schema(2, FULL, window(5)),
    "full_window_page1": schema(1, FULL, window(3)),
    "two_windows": schema(2, FULL, window(3, "short"), window(7, "long", sinks=3)),
    "window_only": schema(2, window(4)),
    "chunked": schema(2, FULL, group("chunk", GroupKind.CHUNKED, window=6)),
    "chunked_odd": schema(4, FULL, group("chunk", GroupKind.CHUNKED, window=6)),
    "recurrent": schema(2, FULL, RECURRENT),
    "recurrent_only": schema(2, RECURRENT),
    "hybrid": schema(2, FULL, window(3), RECURRENT),
    "compressed": schema(
        4,
        group("compressed", GroupKind.COMPRESSED, ratio=2),
        group("index", GroupKind.INDEX, ratio=2, depends_on="compressed"),
        window(5),
        group("tail", GroupKind.TAIL, ratio=2, overlap=2),
        group("slow_tail", GroupKind.TAIL, ratio=4),
    ),
    "index_first": schema(
        2,
        group("index", GroupKind.INDEX, ratio=2, depends_on="full"),
        FULL,
    ),
}


def needed_tokens(spec: StateGroupSpec, position: int) -> set[int]:
    """Tokens whose state a paged group needs at `position`, from the definition."""
    if spec.kind.is_history:
        return set(range(position))
    if spec.kind is GroupKind.CHUNKED:
        return {t for t in range(position) if t // spec.window == position // spec.window}
    trailing = {t for t in range(position) if t > position - spec.window}
    return trailing | {t for t in range(position) if t < spec.sinks}


def wants_snapshot(spec: StateGroupSpec, position: int) -> bool:
    if position == 0:
        return False
    if spec.kind is GroupKind.RECURRENT:
        return True
    return bool(position % spec.ratio) or spec.overlap > 0


class Pool:
    """Blocks of one group: who has them and what is in them."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.next = 0
        self.content: dict[int, tuple[Place, int]] = {}  # allocated block -> (prefix, stamp)
        self.generation = np.zeros(CAPACITY, dtype=np.int32)

    def alloc(self, place: Place, stamp: int) -> int:
        if self.free:
            block = self.free.pop(0)
        else:
            block, self.next = self.next, self.next + 1
        assert self.next < CAPACITY, "the test's pool is too small"
        self.content[block] = (place, stamp)
        return block

    def release(self, block: int) -> None:
        assert block in self.content, f"block {block} freed twice"
        del self.content[block]
        self.generation[block] += 1
        self.free.append(block)


@dataclass
class Request:
    namespace: Namespace
    tokens: list[int]
    lease: Lease
    stamps: tuple[int, ...]
    tables: list[np.ndarray]
    position: int  # tokens computed

    @property
    def key(self) -> TokenKey:
        return TokenKey(self.tokens)

    def __repr__(self) -> str:
        return f"Request({len(self.tokens)} tokens, {self.lease})"

    def place(self, num_tokens: int) -> Place:
        return self.namespace.key, TokenKey(self.tokens[:num_tokens]).data


class Harness:
    """The tree, its pools, live requests, and the dictionaries that say what must be found."""

    def __init__(self, schema: CacheSchema, policy: str = "value") -> None:
        self.schema = schema
        self.tree = RadixTree(schema, policy=eviction_policy(policy))
        self.pools = [Pool() for _ in schema.groups]
        self.held: list[dict[Place, int]] = [{} for _ in schema.groups]
        self.condemned: list[set[int]] = [set() for _ in schema.groups]
        self.requests: list[Request] = []
        self.keys: dict[Place, tuple[Namespace, list[int]]] = {}
        self.seq = 0
        self.last_seq: list[dict[Place, int]] = [{} for _ in schema.groups]
        self.built_over: list[dict[int, int]] = [{} for _ in schema.groups]  # index block -> seq
        self.size = schema.page_size

    # ------------------------------------------------------------ oracle

    def is_valid(self, group: int, block: int) -> bool:
        place, stamp = self.pools[group].content[block]
        source = self.source(group)
        if source is not None and len(place[1]) // 4 % self.size == 0:
            fresh = self.built_over[group][block] == self.last_seq[source][place]
            return stamp == self.tree.stamps[group] and fresh
        return stamp == self.tree.stamps[group]

    def source(self, group: int) -> int | None:
        name = self.schema.groups[group].depends_on
        return None if name is None else self.schema.index_of(name)

    def resident(self, namespace: Namespace, tokens: list[int], group: int, page: int) -> bool:
        place = (namespace.key, TokenKey(tokens[: (page + 1) * self.size]).data)
        block = self.held[group].get(place)
        return block is not None and self.is_valid(group, block)

    def can_resume(
        self, namespace: Namespace, tokens: list[int], group: int, position: int
    ) -> bool:
        """Literal check of one group's need at any position."""
        spec = self.schema.groups[group]
        exact = (namespace.key, TokenKey(tokens[:position]).data)
        if spec.kind.is_snapshot:
            if not wants_snapshot(spec, position):
                return True
            block = self.held[group].get(exact)
            return block is not None and self.is_valid(group, block)
        whole = position // self.size
        for page in {t // self.size for t in needed_tokens(spec, position)}:
            if page < whole:
                if not self.resident(namespace, tokens, group, page):
                    return False
                continue
            if spec.kind.is_history and position % self.size < spec.ratio:
                continue  # not one entry of the partial page exists yet
            block = self.held[group].get(exact)
            if block is None or not self.is_valid(group, block):
                return False
        return True

    def best(self, namespace: Namespace, tokens: list[int], step: int) -> int:
        """Deepest position (a multiple of `step`) at which all groups can resume."""
        for position in range(len(tokens), -1, -1):
            if position % step == 0 and all(
                self.can_resume(namespace, tokens, g, position)
                for g in range(self.schema.num_groups)
            ):
                return position
        raise AssertionError("position 0 always works")

    # ------------------------------------------------------------ bookkeeping

    def take_back(self, freed: Freed) -> None:
        assert not freed.slow
        for group, blocks in enumerate(freed.blocks):
            for block in blocks.tolist():
                for request in self.requests:
                    assert block not in self.needed(request, group), "a leased block was freed"
                place = self.pools[group].content[block][0]
                if block in self.condemned[group]:
                    self.condemned[group].discard(block)
                else:
                    assert self.held[group].get(place) == block, "freed a block it never had"
                    del self.held[group][place]
                self.pools[group].release(block)

    def needed(self, request: Request, group: int) -> set[int]:
        """Tree blocks that the request may still read."""
        spec = self.schema.groups[group]
        table = request.tables[group]
        if spec.kind.is_snapshot:
            held = request.lease.checkpoint
            found = held.block_of(group) if held is not None else None
            return {found.block} if found is not None else set()
        pages = {t // self.size for t in needed_tokens(spec, request.position)}
        pages = {p for p in pages if p < request.lease.num_published_pages}
        return {int(table[p]) for p in pages if table[p] >= 0}

    def written(self, request: Request) -> Written:
        self.seq += 1
        generations = tuple(p.generation for p in self.pools)
        return Written(request.stamps, self.seq, generations)

    # ------------------------------------------------------------ operations

    def match(self, namespace: Namespace, tokens: list[int]) -> Match:
        return self.tree.match(namespace, TokenKey(tokens))

    def start(self, namespace: Namespace, tokens: list[int], back_off: int = 0) -> Request:
        """Lease the deepest usable position, or a shallower one, and copy the page tables."""
        match = self.match(namespace, tokens)
        position = match.reuse_position()
        if back_off:
            usable = [
                b * self.size
                for b in range(match.logical_pages + 1)
                if all(match.resumable(g)[b] for g in range(self.schema.num_groups))
            ]
            position = usable[max(0, len(usable) - 1 - back_off)]
        lease = self.tree.lease(match, position)
        assert lease.num_published_pages == position // self.size
        tables = []
        for g, spec in enumerate(self.schema.groups):
            table = np.full(len(tokens) // self.size + 1, -1, dtype=np.int32)
            if not spec.kind.is_snapshot:
                pages = {t // self.size for t in needed_tokens(spec, position)}
                for page in (p for p in pages if p < position // self.size):
                    table[page] = match.blocks(g)[page]
                    assert table[page] >= 0
            tables.append(table)
        request = Request(namespace, tokens, lease, self.tree.stamps, tables, position)
        self.requests.append(request)
        if position % self.size:
            self._own_page(request, position // self.size)
        return request

    def _own_page(self, request: Request, page: int) -> None:
        """Blocks for a page that the request fills itself (copied where it was shared)."""
        end = min((page + 1) * self.size, len(request.tokens))
        for g, spec in enumerate(self.schema.groups):
            if not spec.kind.is_snapshot and request.tables[g][page] < 0:
                block = self.pools[g].alloc(request.place(end), request.stamps[g])
                request.tables[g][page] = block

    def compute(self, request: Request, num_tokens: int) -> None:
        """Advance by some tokens and publish the finished pages."""
        end = min(request.position + num_tokens, len(request.tokens))
        for page in range(request.position // self.size, -(-end // self.size)):
            self._own_page(request, page)
        request.position = end
        self.publish(request, end // self.size)

    def publish(self, request: Request, num_pages: int) -> Published:
        first = request.lease.num_published_pages
        done = self.tree.publish(
            request.lease,
            request.key,
            num_pages,
            request.tables,
            self.written(request),
            request.position,
        )
        if done.num_pages < num_pages:
            assert request.stamps != self.tree.stamps, "only stale writes are refused"
            self.take_back(done.freed)
            return done
        self._settle(request, first, num_pages, done)
        if num_pages:
            self.keys[request.place(num_pages * self.size)] = (
                request.namespace,
                request.tokens[: num_pages * self.size],
            )
        return done

    def _settle(self, request: Request, first: int, last: int, done: Published) -> None:
        """Apply duplicates, then record what the tree took."""
        doubled = set()
        for twin in done.duplicates:
            rows = zip(twin.pages, twin.tree_blocks, twin.own_blocks, strict=True)
            for page, theirs, own in ((int(p), int(t), int(o)) for p, t, o in rows):
                place = request.place((page + 1) * self.size)
                assert self.held[twin.group].get(place) == theirs, "the tree's own block wins"
                assert self.is_valid(twin.group, theirs), "and it is valid"
                assert request.tables[twin.group][page] == own
                request.tables[twin.group][page] = theirs
                self.pools[twin.group].release(own)
                doubled.add((twin.group, page))
        for g in sorted(range(self.schema.num_groups), key=lambda g: self.source(g) is not None):
            if self.schema.groups[g].kind.is_snapshot:
                continue
            for page in range(first, last):
                block = int(request.tables[g][page])
                if block >= 0 and (g, page) not in doubled:
                    self._take_over(g, request.place((page + 1) * self.size), block)
        self.take_back(done.freed)

    def _take_over(self, g: int, place: Place, block: int) -> None:
        old = self.held[g].get(place)
        if old is not None and old != block:
            assert not self.is_valid(g, old), "a valid block is never replaced"
            self.condemned[g].add(old)
        self.pools[g].content[block] = (place, self.pools[g].content[block][1])
        self.held[g][place] = block
        self.last_seq[g][place] = self.seq
        source = self.source(g)
        if source is not None:
            self.built_over[g][block] = self.last_seq[source][place]

    def snapshot(self, request: Request) -> None:
        """Hand over the state at the request's exact position: snapshots and partial pages."""
        position = request.position
        if position // self.size > request.lease.num_published_pages:
            return
        for g, spec in enumerate(self.schema.groups):
            if spec.kind.is_snapshot or position % self.size:
                self.add_block(request, g, position)

    def add_block(self, request: Request, g: int, position: int) -> None:
        place = request.place(position)
        block = self.pools[g].alloc(place, request.stamps[g])
        back = self.tree.add_snapshot(
            request.lease, request.key, position, g, block, self.written(request)
        )
        if back != block:
            known = self.held[g].get(place)
            if known is not None:
                assert not self.is_valid(g, known)
                self.condemned[g].add(known)
                if back is not None:
                    assert back == known
                    self.condemned[g].discard(back)
                    self.pools[g].release(back)
            self.held[g][place] = block
        else:
            self.pools[g].release(block)
        self.keys[place] = (request.namespace, request.tokens[:position])

    def finish(self, request: Request) -> None:
        self.requests.remove(request)
        published = request.lease.num_published_pages
        self.take_back(self.tree.release(request.lease))
        for g in range(self.schema.num_groups):
            for block in request.tables[g][published:]:
                if block >= 0:
                    self.pools[g].release(int(block))

    def evict(self, group: int, num_blocks: int) -> Freed:
        before = self.tree.evictable(group)
        freed = self.tree.evict(group, num_blocks)
        assert freed.num(group) >= min(num_blocks, before), "evictable blocks can be evicted"
        self.take_back(freed)
        return freed

    def drop(self, namespace: Namespace, tokens: list[int], group: int, page: int) -> None:
        match = self.match(namespace, tokens)
        spec = self.schema.groups[group]
        place = page if not spec.kind.is_snapshot else page * self.size
        if spec.kind.is_snapshot:
            exact = (namespace.key, TokenKey(tokens[: page * self.size]).data)
        else:
            if page >= match.logical_pages:
                return
            exact = (namespace.key, TokenKey(tokens[: (page + 1) * self.size]).data)
        block = self.held[group].pop(exact, None)
        if block is not None:
            self.condemned[group].add(block)
        self.take_back(self.tree.drop(match, group, [place]))

    # ------------------------------------------------------------ laws

    def check(self) -> None:
        self.tree.audit([r.lease for r in self.requests])
        for g in range(self.schema.num_groups):
            owned = sorted(self.tree.blocks(g).tolist())
            assert owned == sorted([*self.held[g].values(), *self.condemned[g]])
            assert self.tree.evictable(g) == self.count_evictable(g)

    def count_evictable(self, group: int) -> int:
        """Held blocks that no live lease protects, from the definitions."""
        spec = self.schema.groups[group]
        count = 0
        for (namespace, data), block in self.held[group].items():
            tokens = len(data) // 4
            exact = bool(tokens % self.size) or spec.kind.is_snapshot
            count += not any(
                self._protects(r, group, namespace, data, tokens, exact, block)
                for r in self.requests
            )
        return count

    def _protects(
        self,
        request: Request,
        group: int,
        namespace: bytes,
        data: bytes,
        tokens: int,
        exact: bool,
        block: int,
    ) -> bool:
        lease = request.lease
        if exact:
            held = lease.checkpoint.block_of(group) if lease.checkpoint else None
            return held is not None and held.block == block
        published = lease.num_published_pages * self.size
        if request.namespace.key != namespace or tokens > published:
            return False
        if request.place(tokens)[1] != data:
            return False
        spec = self.schema.groups[group]
        if spec.kind.is_history:
            return True
        boundary = min(request.position // self.size * self.size, published)
        need = needed_tokens(spec, request.position) | needed_tokens(spec, boundary)
        first = min((t for t in need if t >= spec.sinks), default=published)
        page = tokens // self.size - 1
        sinks = {t // self.size for t in need if t < spec.sinks}
        trailing = range(first // self.size, published // self.size) if need else range(0)
        return page in sinks or page in trailing

    def check_match(self, namespace: Namespace, tokens: list[int]) -> None:
        """Everything a match says equals what the dictionaries say, at every boundary."""
        match = self.match(namespace, tokens)
        pages = len(tokens) // self.size
        deepest = 0
        for g, spec in enumerate(self.schema.groups):
            blocks, generations = match.blocks(g), match.generations(g)
            for page in range(pages if not spec.kind.is_snapshot else 0):
                place = (namespace.key, TokenKey(tokens[: (page + 1) * self.size]).data)
                block = self.held[g].get(place, -1)
                if block >= 0:
                    deepest = max(deepest, page + 1)
                if page < match.logical_pages:
                    assert blocks[page] == block
                    if block >= 0:
                        assert self.pools[g].content[block][0] == place, "foreign content"
                        assert self.pools[g].generation[block] == generations[page]
        assert deepest <= match.logical_pages <= pages
        self._check_resumable(match, namespace, tokens)

    def _check_resumable(self, match: Match, namespace: Namespace, tokens: list[int]) -> None:
        groups = range(self.schema.num_groups)
        for g in groups:
            expected = [
                self.can_resume(namespace, tokens, g, b * self.size)
                for b in range(match.logical_pages + 1)
            ]
            assert match.resumable(g).tolist() == expected, self.schema.groups[g].name
        now, later = self.match(namespace, tokens).intersection()  # a fresh match: fast path
        assert now == later == self.best(namespace, tokens, self.size) // self.size
        assert match.reuse_position() == self.best(namespace, tokens, 1)
        limiting = match.limiting_group(match.logical_pages)
        short = [g for g in groups if not match.resumable(g)[-1]]
        assert (limiting in short) if short else limiting is None

    def drain(self) -> None:
        """Quiescence: release all, flush, and every pool is back at its start."""
        for request in list(self.requests):
            self.finish(request)
        self.check()
        self.take_back(self.tree.flush())
        for g, pool in enumerate(self.pools):
            assert not pool.content, f"group {g} leaks {sorted(pool.content)}"
            assert self.tree.evictable(g) == 0
        assert not self.tree.topology.roots, "no root outlives its last state"
        self.tree.audit([])
