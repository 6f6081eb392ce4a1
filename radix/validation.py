"""The validation chain: whether what a match found is usable as it stands.

    layer             question                                      fails with
    1 integrity       is the block the one that was written, whole? GENERATION OUT_OF_POOL LAYERS
                                                                    CHECKSUM
    2 kernel ABI      can the backend in use read these bytes?      MODEL ATTENTION LAYOUT
                                                                    WEIGHTS OPERATOR
    3 intersection    do all groups agree at this position?         ABSENT DEPENDENCY BOUNDARY
    4 alignment       may the kernels touch these addresses?        ALIGNMENT

Pure: it reads the match and the environment, and returns verdicts; nothing raises, nothing is
dropped here. A page is reported once, by the first layer it fails. Every hit goes through the
chain; where all nodes are whole under the current stamps, one gather per group compares the
generations and nothing else is looked at, since everything else was decided when the segments
were made or when the environment was.

This module does not repair, and does not decide what to do with a failure (`planner` does).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from statewise.radix import rows
from statewise.radix.match import Match, Snapshot
from statewise.radix.need import needed_ranges, trailing_pages
from statewise.radix.node import StateBlock
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.radix.segment import BLOCK, DEPENDENCY, GENERATION, SEQ, STAMP, Int32
from statewise.radix.stamp import Stamp, StampTable

Bool = NDArray[np.bool_]
UInt64 = NDArray[np.uint64]
Checksum = Callable[[int, Int32], UInt64]  # (group, blocks) -> [num_blocks, num_layers]

SAMPLE_MIX = np.uint64(0x9E3779B97F4A7C15)


class ChainLayer(enum.IntEnum):
    """Which layer of the chain spoke."""

    INTEGRITY = 1
    KERNEL_ABI = 2
    INTERSECTION = 3
    ALIGNMENT = 4


class Condition(enum.Enum):
    """What did not hold; the value is the word for logs and metrics."""

    GENERATION = "generation"
    OUT_OF_POOL = "out_of_pool"
    LAYERS = "layers"
    CHECKSUM = "checksum"
    MODEL = "model_fingerprint"
    ATTENTION = "attention_version"
    LAYOUT = "layout"
    WEIGHTS = "weights_epoch"
    OPERATOR = "operator"
    ABSENT = "absent"
    DEPENDENCY = "dependency"
    BOUNDARY = "window_boundary"
    ALIGNMENT = "alignment"


LAYER_OF: dict[Condition, ChainLayer] = {
    Condition.GENERATION: ChainLayer.INTEGRITY,
    Condition.OUT_OF_POOL: ChainLayer.INTEGRITY,
    Condition.LAYERS: ChainLayer.INTEGRITY,
    Condition.CHECKSUM: ChainLayer.INTEGRITY,
    Condition.MODEL: ChainLayer.KERNEL_ABI,
    Condition.ATTENTION: ChainLayer.KERNEL_ABI,
    Condition.LAYOUT: ChainLayer.KERNEL_ABI,
    Condition.WEIGHTS: ChainLayer.KERNEL_ABI,
    Condition.OPERATOR: ChainLayer.KERNEL_ABI,
    Condition.ABSENT: ChainLayer.INTERSECTION,
    Condition.DEPENDENCY: ChainLayer.INTERSECTION,
    Condition.BOUNDARY: ChainLayer.INTERSECTION,
    Condition.ALIGNMENT: ChainLayer.ALIGNMENT,
}

# Parts of a stamp in the order they are compared, and what a difference means.
STAMP_PARTS = (
    ("model_fingerprint", Condition.MODEL),
    ("version", Condition.ATTENTION),
    ("layout_id", Condition.LAYOUT),
    ("weights_epoch", Condition.WEIGHTS),
    ("boundary", Condition.BOUNDARY),
)

# Operators a backend must offer to read a form, by kind; `operators_of` adds the dequantiser.
OPERATORS: dict[GroupKind, frozenset[str]] = {
    GroupKind.FULL: frozenset({"gather"}),
    GroupKind.COMPRESSED: frozenset({"gather", "decompress"}),
    GroupKind.INDEX: frozenset({"gather", "route"}),
    GroupKind.WINDOW: frozenset({"gather", "window"}),
    GroupKind.CHUNKED: frozenset({"gather", "chunk"}),
    GroupKind.TAIL: frozenset({"compress"}),
    GroupKind.RECURRENT: frozenset({"recur"}),
}
ALL_OPERATORS = frozenset().union(*OPERATORS.values())


def dequantiser(kind: str) -> str:
    """Name the operator that reads lossy copies of a kind."""
    return f"dequantise_{kind}"


def operators_of(spec: StateGroupSpec) -> frozenset[str]:
    """Operators that a group's state needs, that of its copies in slower tiers included."""
    return OPERATORS[spec.kind] | ({dequantiser(spec.lossy)} if spec.lossy else set())


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that failed, in one group.

    `pages` are page indices of the match; empty where `position` >= 0 names the block that
    belongs to exactly that token position (a snapshot, or a partly filled page). `layers` has a
    bit per layer of the group that failed; 0 means all of them.
    """

    group: int
    condition: Condition
    pages: tuple[int, ...] = ()
    position: int = -1
    layers: int = 0
    detail: str = ""

    @property
    def layer(self) -> ChainLayer:
        """Which layer of the chain failed."""
        return LAYER_OF[self.condition]

    @property
    def is_fault(self) -> bool:
        """Whether state was found that must not be used (absence is no fault)."""
        return self.condition is not Condition.ABSENT

    def __str__(self) -> str:
        where = f"position {self.position}" if self.position >= 0 else _ranges(self.pages)
        name = self.layer.name.lower()
        return f"{name}: group {self.group}, {where}: {self.condition.value} {self.detail}".strip()


@dataclass(frozen=True, slots=True)
class GroupEnv:
    """What is true now about one group's pool and the backend that reads it.

    `generations` is the pool's own array, indexed by block (None: not checked). Addresses and
    strides are in bytes, one address per layer's tensor.
    """

    generations: Int32 | None = None
    layout_id: str | None = None  # the backend's declared layout; None: as the schema says
    operators: frozenset[str] = ALL_OPERATORS
    base_addresses: tuple[int, ...] = ()
    block_stride: int = 0
    alignment: int = 1


Static = tuple[Condition, str]


@dataclass(frozen=True)
class ValidationEnv:
    """Everything `validate` compares with. Made once, and again when the backend or weights change.

    `audit_rate` is the share of pages with a recorded checksum that is verified at each use, by
    `checksum`, which reads the device.
    """

    schema: CacheSchema
    stamps: tuple[int, ...]
    table: StampTable
    groups: tuple[GroupEnv, ...]
    audit_rate: float = 0.0
    checksum: Checksum | None = None
    static: tuple[Static | None, ...] = field(init=False, repr=False, compare=False)
    aligned: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    generations: tuple[Int32 | None, ...] = field(init=False, repr=False, compare=False)
    is_plain: bool = field(init=False, repr=False, compare=False)  # no group needs more than a look

    def __post_init__(self) -> None:
        """Decide what is the same for every block of a group."""
        if not len(self.groups) == len(self.stamps) == self.schema.num_groups:
            raise ValueError("one stamp and one environment per group")
        static = tuple(self._static_of(g) for g in range(self.schema.num_groups))
        object.__setattr__(self, "static", static)
        aligned = tuple(_always_aligned(e) for e in self.groups)
        object.__setattr__(self, "aligned", aligned)
        specs = self.schema.groups
        paged = tuple(g for g, spec in enumerate(specs) if not spec.kind.is_snapshot)
        object.__setattr__(self, "generations", tuple(e.generations for e in self.groups))
        plain = self.audit_rate <= 0.0 and all(aligned) and static.count(None) == len(static)
        plain = plain and len(paged) == len(specs)
        object.__setattr__(self, "is_plain", plain)

    def _static_of(self, group: int) -> Static | None:
        """Layer 2, as far as it does not depend on the block."""
        env, spec = self.groups[group], self.schema.groups[group]
        expected = self.table[self.stamps[group]]
        if env.layout_id is not None and env.layout_id != expected.layout_id:
            detail = f"the backend declares {env.layout_id!r}, not {expected.layout_id!r}"
            return Condition.LAYOUT, detail
        missing = operators_of(spec) - env.operators
        if missing:
            return Condition.OPERATOR, f"the backend lacks {', '.join(sorted(missing))}"
        return None


def _always_aligned(env: GroupEnv) -> bool:
    """Whether base and stride align every block."""
    unit = env.alignment
    return unit <= 1 or not (env.block_stride % unit or any(a % unit for a in env.base_addresses))


def _ranges(pages: Sequence[int]) -> str:
    """Pages as text: '3-5, 9'."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][1] == page - 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    shown = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs[:8])
    return f"pages {shown}" + (", ..." if len(runs) > 8 else "")


# ------------------------------------------------------------------------- the chain


def validate(
    match: Match, env: ValidationEnv, position: int | None = None, sample: int = 0
) -> tuple[Verdict, ...]:
    """Run the chain over what a resume at `position` tokens relies on (None: all that was found).

    With a position, a page that is needed and not on the device is ABSENT; without one, absence
    is reported against the end of the logical hit. `sample` varies which pages an audit looks at.
    Empty: everything passed.
    """
    if position is not None and _holds(match, env, position):
        return ()
    verdicts: list[Verdict] = []
    end = match.logical_tokens if position is None else position
    for group, spec in enumerate(match.schema.groups):
        if not spec.kind.is_snapshot:
            for lo, hi in needed_ranges(spec, end, match.schema.page_size):
                _check_range(match, env, group, (lo, hi), sample, verdicts)
            if position is None and spec.kind.is_window:
                first = trailing_pages(spec, end, match.schema.page_size)[0]
                _check_present(match, env, group, first, sample, verdicts)
        _check_positions(match, env, group, position, sample, verdicts)
    return tuple(verdicts)


def _holds(match: Match, env: ValidationEnv, position: int) -> bool:
    """Whether a resume at the end of a hit that is whole passes, each block's generation compared.

    False says nothing: the chain finds out. Everything but the generations was decided when the
    match was found whole, or when the environment was made.
    """
    if position != match.whole_tokens or match.snapshots:
        return False
    if env.stamps != match.stamps or not env.is_plain:
        return False
    generations = env.generations
    return all(_generations_hold(generations[g], held) for g, held in match.lay_out(position))


def _check_range(
    match: Match,
    env: ValidationEnv,
    group: int,
    span: tuple[int, int],
    sample: int,
    verdicts: list[Verdict],
) -> None:
    """Check pages [span), all of them needed."""
    if _is_quick(match, env, group, span):
        held = match.pairs(group, span[0], span[1])
        if _generations_hold(env.groups[group].generations, held):
            return
    _check_pages(match, env, group, span, sample, verdicts)


def _is_quick(match: Match, env: ValidationEnv, group: int, span: tuple[int, int]) -> bool:
    """Whether the generations are all that is left to look at."""
    return (
        env.static[group] is None
        and env.audit_rate <= 0.0
        and env.aligned[group]
        and env.stamps[group] == match.stamps[group]
        and span[1] <= match.logical_pages
        and rows.is_whole(match, group, span[0], span[1])
    )


def _generations_hold(now: Int32 | None, table: Int32) -> bool:
    if now is None:
        return True
    try:
        # As bytes: a comparison of arrays costs three times as much where there are few pages.
        found: bytes = now.take(table[BLOCK]).tobytes()
    except IndexError:
        return False
    written: bytes = table[GENERATION].tobytes()
    return found == written


def _check_pages(
    match: Match,
    env: ValidationEnv,
    group: int,
    span: tuple[int, int],
    sample: int,
    verdicts: list[Verdict],
) -> None:
    """All layers of the chain over pages [span), each page reported once."""
    lo, hi = span
    known = min(hi, match.logical_pages)
    pages = PageSet(match, env, group, max(0, min(lo, known)), known, sample)
    pages.run()
    verdicts.extend(pages.verdicts)
    absent = tuple(pages.absent.tolist()) + tuple(range(max(known, lo), hi))
    if absent:
        verdicts.append(Verdict(group, Condition.ABSENT, absent, detail="not on the device"))


def _check_present(
    match: Match, env: ValidationEnv, group: int, stop: int, sample: int, verdicts: list[Verdict]
) -> None:
    """Check whatever is resident below `stop`; what is absent there is nobody's need."""
    pages = PageSet(match, env, group, 0, min(stop, match.logical_pages), sample)
    pages.run()
    seen = {p for v in verdicts if v.group == group for p in v.pages}
    verdicts.extend(v for v in pages.verdicts if not seen.intersection(v.pages))


class PageSet:
    """Pages [lo, hi) of one group on their way through the chain; `alive` have not failed yet."""

    def __init__(
        self, match: Match, env: ValidationEnv, group: int, lo: int, hi: int, sample: int
    ) -> None:
        self.match, self.env, self.group, self.sample = match, env, group, sample
        self.lo = lo
        self.table = rows.table(match, group)[:, lo:hi]
        self.alive: Bool = self.table[BLOCK] >= 0
        self.absent: Int32 = (np.flatnonzero(~self.alive) + lo).astype(np.int32)
        self.verdicts: list[Verdict] = []

    def run(self) -> None:
        """Every layer, in the chain's order."""
        self._integrity()
        self._kernel_abi()
        self._dependency()
        self._alignment()

    def _fail(self, bad: Bool, condition: Condition, detail: str = "", layers: int = 0) -> None:
        """Report the pages in `bad` that have not failed before."""
        bad = bad & self.alive
        if not bad.any():
            return
        pages = tuple((np.flatnonzero(bad) + self.lo).tolist())
        self.alive = self.alive & ~bad
        self.verdicts.append(Verdict(self.group, condition, pages, detail=detail, layers=layers))

    def _integrity(self) -> None:
        now = self.env.groups[self.group].generations
        if now is not None:
            outside = self.table[BLOCK] >= len(now)
            self._fail(outside, Condition.OUT_OF_POOL, f"the pool has {len(now)} blocks")
            held = np.where(self.alive, self.table[BLOCK], 0)
            moved = now.take(held) != self.table[GENERATION]
            self._fail(moved, Condition.GENERATION, "the block was given away since")
        self._layers(self.match.invalid_layers(self.group), Condition.LAYERS, "marked invalid")
        self._audit()

    def _layers(self, masks: dict[int, int], condition: Condition, detail: str) -> None:
        """One verdict for each mask of layers."""
        for mask in sorted(set(masks.values())):
            bad = np.zeros(len(self.alive), dtype=np.bool_)
            inside = [p - self.lo for p, m in masks.items() if m == mask]
            bad[[i for i in inside if 0 <= i < len(bad)]] = True
            self._fail(bad, condition, f"{detail}: layers {mask:#x}", layers=mask)

    def _audit(self) -> None:
        """Compare checksums of a sample of the pages that have one."""
        checksum = self.env.checksum
        if checksum is None or self.env.audit_rate <= 0.0:
            return
        recorded = rows.checksums(self.match, self.group)
        if recorded is None:
            return
        recorded = recorded[self.lo : self.lo + len(self.alive)]
        chosen = self.alive & recorded.any(axis=1) & self._sampled()
        index = np.flatnonzero(chosen)
        if not len(index):
            return
        found = checksum(self.group, self.table[BLOCK, index])
        masks = bad_layers(recorded[index], found)
        self._layers(
            {int(i) + self.lo: m for i, m in zip(index, masks, strict=True) if m},
            Condition.CHECKSUM,
            "bytes changed",
        )

    def _sampled(self) -> Bool:
        """Pages that this audit looks at."""
        return sampled(self.table[BLOCK], self.env.audit_rate, self.sample)

    def _kernel_abi(self) -> None:
        static = self.env.static[self.group]
        if static is not None:
            self._fail(self.alive, static[0], static[1])
        expected = self.env.stamps[self.group]
        stamps = self.table[STAMP]
        for stamp in np.unique(stamps[self.alive & (stamps != expected)]).tolist():
            condition, detail = self._difference(stamp)
            self._fail(stamps == stamp, condition, detail)

    def _difference(self, stamp: int) -> Static:
        return stamp_difference(self.env.table[stamp], self.env.table[self.env.stamps[self.group]])

    def _dependency(self) -> None:
        depends_on = self.match.schema.groups[self.group].depends_on
        if depends_on is None:
            return
        source = rows.table(self.match, self.match.schema.index_of(depends_on))
        part = source[:, self.lo : self.lo + len(self.alive)]
        stale = self.table[DEPENDENCY] != part[SEQ]
        self._fail(stale, Condition.DEPENDENCY, f"built over another version of {depends_on!r}")

    def _alignment(self) -> None:
        if not self.env.aligned[self.group]:
            bad = misaligned(self.env.groups[self.group], self.table[BLOCK])
            self._fail(bad, Condition.ALIGNMENT, _alignment_need(self.env.groups[self.group]))


# ------------------------------------------------------------------------- parts


def sampled(blocks: Int32, rate: float, sample: int) -> Bool:
    """[n] whether an audit looks at a block: a hash of block and sample, so that all get a turn."""
    if rate >= 1.0:
        return np.ones(len(blocks), dtype=np.bool_)
    with np.errstate(over="ignore"):
        mixed = (blocks.astype(np.uint64) + np.uint64(sample)) * SAMPLE_MIX
        mixed = (mixed ^ (mixed >> np.uint64(29))) * SAMPLE_MIX
    chosen: Bool = (mixed >> np.uint64(32)) < np.uint64(int(rate * 2.0**32))
    return chosen


def stamp_difference(found: Stamp, expected: Stamp) -> Static:
    """Name the first part in which two stamps differ."""
    for part, condition in STAMP_PARTS:
        mine, theirs = getattr(found, part), getattr(expected, part)
        if mine != theirs:
            return condition, f"{mine!r}, not {theirs!r}"
    return Condition.MODEL, "another stamp of the same parts"


def misaligned(env: GroupEnv, blocks: Int32) -> Bool:
    """[n] blocks whose address in any layer's tensor misses the needed alignment."""
    bad = np.zeros(len(blocks), dtype=np.bool_)
    for address in env.base_addresses:
        bad |= (address + blocks.astype(np.int64) * env.block_stride) % env.alignment != 0
    return bad


def _alignment_need(env: GroupEnv) -> str:
    return f"needs {env.alignment} bytes, stride {env.block_stride}"


def bad_layers(recorded: UInt64, found: UInt64) -> list[int]:
    """[n] bit masks of the layers whose checksums differ; both [n, num_layers]."""
    differs = recorded != found
    weights = [1 << layer for layer in range(differs.shape[1])]
    return [sum(w for w, bad in zip(weights, row, strict=True) if bad) for row in differs.tolist()]


def _check_positions(
    match: Match,
    env: ValidationEnv,
    group: int,
    position: int | None,
    sample: int,
    verdicts: list[Verdict],
) -> None:
    """Check the blocks that belong to exactly one position."""
    if position is None:
        for snapshot in match.snapshots:
            verdicts.extend(_check_block(env, snapshot, group, sample))
        return
    here = match.snapshot_at(position)
    if here is not None:
        verdicts.extend(_check_block(env, here, group, sample))
    if not rows.has_exact(match, group, position):
        detail = "no block for exactly this position"
        verdicts.append(Verdict(group, Condition.ABSENT, position=position, detail=detail))


def _check_block(
    env: ValidationEnv, snapshot: Snapshot, group: int, sample: int
) -> Iterator[Verdict]:
    """Check one held block; only its first failure."""
    held = snapshot.block_of(group)
    if held is None:
        return
    failure = _block_failure(env, held, sample)
    if failure is not None:
        yield Verdict(group, failure[0], position=snapshot.position, detail=failure[1])


def _block_failure(env: ValidationEnv, held: StateBlock, sample: int) -> Static | None:
    group, of_group = held.group, env.groups[held.group]
    now = of_group.generations
    if now is not None:
        if not 0 <= held.block < len(now):
            return Condition.OUT_OF_POOL, f"the pool has {len(now)} blocks"
        if now[held.block] != held.generation:
            return Condition.GENERATION, "the block was given away since"
    if _is_damaged(env, held, sample):
        return Condition.CHECKSUM, "bytes changed"
    if env.static[group] is not None:
        return env.static[group]
    if held.stamp != env.stamps[group]:
        return stamp_difference(env.table[held.stamp], env.table[env.stamps[group]])
    if not env.aligned[group]:
        block = np.array([held.block], dtype=np.int32)
        if misaligned(of_group, block)[0]:
            return Condition.ALIGNMENT, _alignment_need(of_group)
    return None


def _is_damaged(env: ValidationEnv, held: StateBlock, sample: int) -> bool:
    """Whether an audit looks at the block and finds other bytes than were handed over."""
    if env.checksum is None or env.audit_rate <= 0.0 or not held.checksums:
        return False
    block = np.array([held.block], dtype=np.int32)
    if not sampled(block, env.audit_rate, sample)[0]:
        return False
    found: list[int] = env.checksum(held.group, block)[0].tolist()
    return found != list(held.checksums)
