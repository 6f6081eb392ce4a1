"""Recovery, literally: matches of any residency, and a symbolic run of a plan's steps.

`build_match` makes a match with given pages per group on given tiers. `Run` executes steps token
by token and layer by layer, and keeps for every (group, layer, token) only whether the state there
is exact. A token's hidden state is exact after a layer if everything that the *real* layer would
read was read, and was exact. Nothing here shares a formula with the planner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from statewise.radix import (
    CacheSchema,
    CostModel,
    GroupKind,
    Match,
    Namespace,
    Recompute,
    RecoveryPlan,
    Replay,
    Snapshot,
    StateGroupSpec,
    Tier,
    TokenKey,
)
from statewise.radix.node import Checkpoint, Node, StateBlock
from statewise.radix.segment import (
    BLOCK,
    DEPENDENCY,
    GENERATION,
    NUM_ROWS,
    SEQ,
    STAMP,
    PageAside,
    Segment,
    of_table,
)

ABSENT = -1


@dataclass(frozen=True)
class Pages:
    """Residency of one paged group: tier per page (ABSENT for none), broken layers of some."""

    tiers: tuple[int, ...]
    invalid: tuple[tuple[int, int], ...] = ()  # (page, mask of broken layers)
    stale_index: tuple[int, ...] = ()  # pages built over another version of their source


@dataclass(frozen=True)
class World:
    """What is cached for a prompt: pages per paged group, boundaries per snapshot group."""

    schema: CacheSchema
    num_pages: int
    pages: dict[int, Pages] = field(default_factory=dict)
    snapshots: dict[int, frozenset[int]] = field(default_factory=dict)  # group -> pages


def build_match(world: World) -> Match:
    """A match as the tree would have found it, from one node."""
    schema, n = world.schema, world.num_pages
    key = TokenKey(np.arange(n * schema.page_size, dtype=np.int32))
    match = Match(schema, (0,) * schema.num_groups, 0, Namespace(), key)
    segments = tuple(_segment(world, g) for g in range(schema.num_groups))
    root = Node(None, b"", 0, 0, ())
    node = Node(root, key.data, 0, n, segments)
    match.logical_pages = n
    match.nodes, match.starts, match.segments = [node], [0], [segments]
    match.snapshots = snapshots_of(node, world.snapshots, schema.page_size)
    return match


def snapshots_of(
    node: Node, snapshots: dict[int, frozenset[int]], page_size: int
) -> tuple[Snapshot, ...]:
    """Snapshots at page boundaries, as a match finds them: group -> pages."""
    found = []
    for page in sorted(set().union(*snapshots.values())) if snapshots else []:
        checkpoint = Checkpoint(node, page, b"", page * page_size, "test")
        checkpoint.blocks = tuple(
            StateBlock(g, 100 + page, 0, 0, 0) for g, at in snapshots.items() if page in at
        )
        found.append(Snapshot(checkpoint))
    return tuple(found)


def _segment(world: World, group: int) -> Segment:
    n = world.num_pages
    table = np.zeros((NUM_ROWS, n), dtype=np.int32)
    table[DEPENDENCY] = -1
    table[BLOCK] = -1
    pages = world.pages.get(group)
    if pages is None:
        return of_table(table)
    tiers = np.array(pages.tiers, dtype=np.int32)
    table[BLOCK] = np.where(tiers == Tier.DEVICE, np.arange(n) + 1, -1)
    table[STAMP], table[SEQ], table[GENERATION] = 0, 7, 0
    if world.schema.groups[group].depends_on is not None:
        table[DEPENDENCY] = 7
        table[DEPENDENCY, list(pages.stale_index)] = 6
    slow = None
    if (tiers > 0).any():
        slow = np.full((3, n), -1, dtype=np.int32)
        slow[0] = np.where(tiers > 0, np.arange(n) + 1, -1)
        slow[1] = np.where(tiers > 0, tiers, -1)
    return of_table(table, PageAside(slow, dict(pages.invalid) or None))


# ------------------------------------------------------------------------- symbolic execution


def true_reads(spec: StateGroupSpec, token: int) -> set[int]:
    """Tokens whose state a layer of the group reads at `token`, itself included."""
    if spec.kind is GroupKind.WINDOW:
        return set(range(max(0, token - spec.window + 1), token + 1)) | set(
            range(min(spec.sinks, token + 1))
        )
    if spec.kind is GroupKind.CHUNKED:
        return set(range(token // spec.window * spec.window, token + 1))
    if spec.kind.is_history:
        return set(range((token + 1) // spec.ratio * spec.ratio))
    return set()


def overlap_at(schema: CacheSchema, spec: StateGroupSpec) -> int:
    """Tokens of the previous window that an entry of the group is made from."""
    tails = [
        t.overlap
        for t in schema.groups
        if t.kind is GroupKind.TAIL and t.ratio == spec.ratio and set(t.layers) & set(spec.layers)
    ]
    return max(tails, default=0)


class Run:
    """Executes replay steps over a world whose loads for `page` have happened.

    `cached` is what the tree offers, `own` what this run wrote; a page that was written is read
    from `own`. Strict runs also check what a real forward would trip over.
    """

    def __init__(
        self, world: World, reach: tuple[int, ...], page: int, strict: bool = False
    ) -> None:
        self.strict = strict
        self.world, self.schema, self.reach, self.page = world, world.schema, reach, page
        self.size = world.schema.page_size
        self.tokens = world.num_pages * self.size
        self.there = {g: self._there(g) for g in world.pages}
        self.cached = {
            (g, la): self._cached(g, i)
            for g, spec in enumerate(self.schema.groups)
            for i, la in enumerate(spec.layers)
            if not spec.kind.is_snapshot
        }
        self._outdate_indexes()
        self.own = {place: np.zeros(self.tokens, dtype=bool) for place in self.cached}
        self.owned = {place: np.zeros(self.tokens, dtype=bool) for place in self.cached}
        self.snapshots = {g: {p * self.size for p in at} for g, at in world.snapshots.items()}
        self.state: dict[tuple[int, int], bool] = {}  # recurrent state is exact
        self.raw = {
            (g, la): np.zeros(self.tokens, dtype=bool)
            for g, spec in enumerate(self.schema.groups)
            for la in spec.layers
            if spec.kind is GroupKind.TAIL
        }
        self.end = -1

    def _there(self, group: int) -> np.ndarray:
        """[pages] that have a block: on the device, or loaded because the position needs them."""
        tiers = np.array(self.world.pages[group].tiers)
        needed = needed_pages(self.schema, group, self.page)
        loaded = np.array([p in needed for p in range(len(tiers))])
        there = (tiers == 0) | (loaded & (tiers > 0) & (tiers <= self.reach[group]))
        there[list(self.world.pages[group].stale_index)] = False
        return there

    def _outdate_indexes(self) -> None:
        """What was built over a page that must be written again has to be built again."""
        for g, spec in enumerate(self.schema.groups):
            if spec.depends_on is not None:
                source = self.schema.index_of(spec.depends_on)
                for page in range(self.world.num_pages):
                    if not self.is_usable(source, page):
                        self.there[g][page] = False
                        span = slice(page * self.size, (page + 1) * self.size)
                        for layer in spec.layers:
                            self.cached[g, layer][span] = False

    def _cached(self, group: int, index: int) -> np.ndarray:
        """[tokens] state of one layer that is exact in the tree."""
        good = self.there[group].copy()
        for page, mask in self.world.pages[group].invalid:
            if mask >> index & 1:
                good[page] = False
        return np.repeat(good, self.size)

    def is_usable(self, group: int, page: int) -> bool:
        """Every layer of the page is good in the tree."""
        at = page * self.size
        return all(self.cached[group, la][at] for la in self.schema.groups[group].layers)

    # ---------------------------------------------------------------- executing

    def replay(self, step: Replay) -> None:
        self._start(step)
        before = {g: [self.is_usable(g, p) for p in self._pages(step)] for g in self.there}
        for token in range(step.start, step.end):
            hidden = True
            for layer in range(step.num_layers):
                hidden = self._layer(step, layer, token, hidden)
        self.end = step.end
        for (g, layer), exact in self.state.items():
            self.state[g, layer] = exact and layer < step.num_layers
        if self.strict:
            for g, usable in before.items():
                written = bool(step.write_groups >> g & 1)
                assert not (written and any(usable)), "a usable page was written"

    def _pages(self, step: Replay) -> range:
        return range(step.start // self.size, step.end // self.size)

    def _start(self, step: Replay) -> None:
        for g, spec in enumerate(self.schema.groups):
            for layer in spec.layers:
                if spec.kind is GroupKind.TAIL and step.start != self.end:
                    self.raw[g, layer][:] = False
                if spec.kind is not GroupKind.RECURRENT:
                    continue
                has = step.start == 0 or step.start in self.snapshots.get(g, set())
                if not self.strict:
                    restored = has
                else:
                    restored = g in step.restore
                    assert has or not restored, "restored a snapshot that is not there"
                goes_on = self.end == step.start and self.state.get((g, layer), False)
                self.state[g, layer] = restored or goes_on

    def _layer(self, step: Replay, layer: int, token: int, hidden: bool) -> bool:
        result = hidden
        groups = list(enumerate(self.schema.groups))
        groups.sort(key=lambda item: item[1].kind is not GroupKind.TAIL)  # entries are made of it
        for g, spec in groups:
            if layer in spec.layers:
                writes = bool(step.write_groups >> g & 1)
                self._write(g, spec, layer, token, hidden, writes)
        for g, spec in enumerate(self.schema.groups):
            shared = dict(spec.shared_layers)
            if layer in spec.layers or layer in shared:
                owner = shared.get(layer, layer)
                result = self._read(step, g, spec, owner, token) and result
        return result

    def _write(
        self, g: int, spec: StateGroupSpec, layer: int, token: int, hidden: bool, writes: bool
    ) -> None:
        place = (g, layer)
        if spec.kind is GroupKind.RECURRENT:
            self.state[place] = self.state[place] and hidden and writes
        elif spec.kind is GroupKind.TAIL:
            self.raw[place][token] = hidden and writes
        elif writes and spec.ratio == 1:
            self.owned[place][token], self.own[place][token] = True, hidden
        elif writes and (token + 1) % spec.ratio == 0:
            first = token + 1 - spec.ratio
            made = slice(first, token + 1)
            self.owned[place][made] = True
            self.own[place][made] = hidden and self._raw_exact(spec, layer, first, token)

    def _raw_exact(self, spec: StateGroupSpec, layer: int, first: int, token: int) -> bool:
        lo = max(0, first - overlap_at(self.schema, spec))
        tails = [
            t
            for t, other in enumerate(self.schema.groups)
            if other.kind is GroupKind.TAIL and other.ratio == spec.ratio and layer in other.layers
        ]
        return not tails or any(self.raw[t, layer][lo : token + 1].all() for t in tails)

    def _read(self, step: Replay, g: int, spec: StateGroupSpec, owner: int, token: int) -> bool:
        if spec.kind is GroupKind.TAIL:
            return True
        if spec.kind is GroupKind.RECURRENT:
            return self.state[g, owner]
        exact = True
        for other in true_reads(spec, token):
            if other < step.context_floor[g]:
                exact = False
            elif self.owned[g, owner][other]:
                exact = exact and bool(self.own[g, owner][other])
            else:
                page = other // self.size
                own_page = slice(page * self.size, (page + 1) * self.size)
                has_own = any(self.owned[g, la][own_page].any() for la in spec.layers)
                there = self.there[g][page] or has_own
                assert there or not self.strict, f"group {g}: page {page} is not there"
                exact = exact and bool(self.cached[g, owner][other])
        return exact

    # ---------------------------------------------------------------- the outcome

    def layer_exact(self, g: int, layer: int, page: int) -> bool:
        """State of one layer of a page, as the request or the tree has it in the end."""
        tokens = slice(page * self.size, (page + 1) * self.size)
        owned, own = self.owned[g, layer][tokens], self.own[g, layer][tokens]
        if owned.any():
            return bool((owned & own).all())
        return bool(self.cached[g, layer][tokens].all())

    def copy(self) -> Run:
        """An independent run in the same state."""
        twin = Run.__new__(Run)
        twin.__dict__.update(self.__dict__)
        for name in ("cached", "own", "owned", "raw"):
            twin.__dict__[name] = {k: v.copy() for k, v in self.__dict__[name].items()}
        twin.state = dict(self.state)
        return twin

    def can_resume(self) -> bool:
        """Whether every group's state at the position is exact."""
        return all(self.group_can_resume(g) for g in range(self.schema.num_groups))

    def group_can_resume(self, g: int) -> bool:
        spec, position = self.schema.groups[g], self.page * self.size
        if not spec.kind.is_snapshot:
            pages = needed_pages(self.schema, g, self.page)
            return all(self.layer_exact(g, la, p) for la in spec.layers for p in pages)
        need = spec.kind is GroupKind.RECURRENT or position % spec.ratio or spec.overlap
        if position == 0 or not need or position in self.snapshots.get(g, set()):
            return True
        if self.end != position:
            return False
        if spec.kind is GroupKind.RECURRENT:
            return all(self.state.get((g, la), False) for la in spec.layers)
        lo = max(0, position - position % spec.ratio - spec.overlap)
        return all(self.raw[g, la][lo:position].all() for la in spec.layers)


def needed_pages(schema: CacheSchema, group: int, page: int) -> set[int]:
    """Pages that resuming at boundary `page` reads, from the definition."""
    spec, position = schema.groups[group], page * schema.page_size
    if spec.kind.is_history:
        return set(range(page))
    if spec.kind is GroupKind.WINDOW:
        tokens = {t for t in range(position) if t > position - spec.window or t < spec.sinks}
    elif spec.kind is GroupKind.CHUNKED:
        tokens = {t for t in range(position) if t // spec.window == position // spec.window}
    else:
        tokens = set()
    return {t // schema.page_size for t in tokens}


def run_plan(world: World, plan: RecoveryPlan) -> Run:
    """Execute a plan: its loads have happened, its replays run, its front is computed."""
    reach = [int(Tier.DEVICE)] * world.schema.num_groups
    for load in plan.loads:
        reach[load.group] = max(reach[load.group], int(load.tier))
    page = plan.position // world.schema.page_size
    run = Run(world, tuple(reach), page, strict=True)
    for load in plan.loads:
        tiers = world.pages[load.group].tiers[load.start_page : load.end_page]
        assert set(tiers) == {int(load.tier)}, "loads name the tier that has the page"
    for step in plan.replays:
        run.replay(step)
        for g, (lo, hi) in enumerate(step.write_back):
            for page in range(lo, hi):
                layers = world.schema.groups[g].layers
                exact = all(run.layer_exact(g, la, page) for la in layers)
                assert exact, f"group {g}: page {page} is handed to the tree, but is not exact"
                assert not run.is_usable(g, page), "only what was missing is handed back"
    if plan.concurrent:
        front = next(s for s in plan.steps if isinstance(s, Recompute))
        _compute(run, front.start, front.end)
    return run


def _compute(run: Run, start: int, end: int) -> None:
    """Ordinary prefill of tokens [start, end): history is there afterwards."""
    for (g, _), good in run.cached.items():
        if run.schema.groups[g].kind.is_history:
            good[start:end] = True


# ------------------------------------------------------------------------- exhaustive search


def cheaper_than(
    world: World, cost: CostModel, prompt_len: int, bound: float
) -> tuple[float, object] | None:
    """A literal way to resume that works and costs less than `bound`; None if there is none.

    Tried: every reach per group, every page to resume at, every depth of every page below, every
    front.
    """
    size, layers = world.schema.page_size, range(world.schema.num_layers + 1)
    for reach in reaches_of(world):
        for page in range(world.num_pages, -1, -1):
            start = Run(world, reach, page)
            fixed = load_seconds(world, cost, loaded_pages(world, reach, page, 0))
            fixed += cost.prefill_s(page * size, prompt_len)
            if fixed < bound:
                for depths in product(layers, repeat=page):
                    found = _try(start, depths, cost, fixed, bound)
                    if found is not None:
                        return found, (reach, page, depths)
            front = _front(world, start, cost, prompt_len, bound)
            if front is not None:
                return front
    return None


def reaches_of(world: World) -> list[tuple[int, ...]]:
    """Slowest tier read, per group: every choice."""
    choices = []
    for g in range(world.schema.num_groups):
        tiers = world.pages[g].tiers if g in world.pages else ()
        choices.append(sorted({0, *(t for t in tiers if t > 0)}))
    return list(product(*choices))


def loaded_pages(
    world: World, reach: tuple[int, ...], page: int, front: int
) -> set[tuple[int, int]]:
    """(group, page) pairs to load; history from page `front` on."""
    out = set()
    for g, spec in enumerate(world.schema.groups):
        for p in needed_pages(world.schema, g, page) if g in world.pages else ():
            tier = world.pages[g].tiers[p]
            stale = p in world.pages[g].stale_index
            if 0 < tier <= reach[g] and not stale and not (spec.kind.is_history and p < front):
                out.add((g, p))
    return out


def load_seconds(world: World, cost: CostModel, pages: set[tuple[int, int]]) -> float:
    """Seconds to load these (group, page) pairs in one batch."""
    sizes: dict[Tier, float] = {}
    for g, page in pages:
        tier = Tier(world.pages[g].tiers[page])
        size = world.schema.groups[g].block_bytes(world.schema.page_size)
        sizes[tier] = sizes.get(tier, 0.0) + size
    return cost.load_s(sizes)


def _try(
    start: Run, depths: tuple[int, ...], cost: CostModel, fixed: float, bound: float
) -> float | None:
    """Seconds of running every page to its depth, if that works and stays below the bound."""
    steps = literal_steps(start, depths)
    seconds = fixed + sum(cost.prefill_s(s.start, s.end, s.num_layers) for s in steps)
    if seconds >= bound:
        return None
    run = start.copy()
    for step in steps:
        run.replay(step)
    return seconds if run.can_resume() else None


def literal_steps(run: Run, depths: tuple[int, ...]) -> list[Replay]:
    """Steps over runs of pages with equal depth and equal sets of groups to write."""
    schema, size = run.schema, run.size
    steps: list[Replay] = []
    nothing = ((0, 0),) * schema.num_groups
    for page, depth in enumerate(depths):
        mask = sum(1 << g for g, s in enumerate(schema.groups) if s.kind.is_snapshot)
        for g, spec in enumerate(schema.groups):
            if g in run.there and not run.is_usable(g, page) and min(spec.layers) < depth:
                mask |= 1 << g
        last = steps[-1] if steps else None
        if not depth:
            continue
        at = page * size
        snapshot = any(at in s for s in run.snapshots.values())
        joins = last is not None and (last.end, last.num_layers, last.write_groups) == (
            at,
            depth,
            mask,
        )
        if last is not None and joins and not snapshot:
            at = steps.pop().start
        steps.append(Replay(at, (page + 1) * size, mask, depth, (0,) * schema.num_groups, nothing))
    return steps


def _front(
    world: World, start: Run, cost: CostModel, prompt_len: int, bound: float
) -> tuple[float, object] | None:
    """Computing from the deepest direct page up to x while the pages from x on are loaded."""
    size, page = start.size, start.page
    none = (0,) * world.schema.num_groups
    direct = max(p for p in range(world.num_pages + 1) if Run(world, none, p).can_resume())
    for x in range(direct + 1, page):
        computed = start.copy()
        _compute(computed, direct * size, x * size)
        load = load_seconds(world, cost, loaded_pages(world, start.reach, page, x))
        seconds = max(cost.prefill_s(direct * size, x * size), load)
        total = seconds + cost.prefill_s(page * size, prompt_len)
        if load and total < bound and computed.can_resume():
            return total, ("front", start.reach, page, x)
    return None
