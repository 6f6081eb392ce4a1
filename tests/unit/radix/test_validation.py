"""The validation chain: each condition alone makes exactly its verdict, and a clean hit none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statewise.radix import (
    CacheSchema,
    ChainLayer,
    Condition,
    GroupEnv,
    GroupKind,
    Match,
    Namespace,
    RadixTree,
    Stamp,
    StampTable,
    StateGroupSpec,
    TokenKey,
    ValidationEnv,
    Verdict,
    Written,
    validate,
)
from statewise.radix.validation import ALL_OPERATORS, LAYER_OF, OPERATORS

P, PAGES = 2, 6
TOKENS = list(range(P * PAGES))
SCHEMA = CacheSchema(
    P,
    2,
    (
        StateGroupSpec("full", GroupKind.FULL, (0, 1), "layout", "v1", entry_bytes=8),
        StateGroupSpec(
            "index", GroupKind.INDEX, (1,), "layout", "v1", entry_bytes=8, depends_on="full"
        ),
        StateGroupSpec("window", GroupKind.WINDOW, (0,), "layout", "v1", entry_bytes=8, window=4),
        StateGroupSpec("state", GroupKind.RECURRENT, (1,), "layout", "v1", snapshot_bytes=8),
    ),
    "model",
)
FULL, INDEX, WINDOW, STATE = range(4)
BLOCKS = 32
END = P * PAGES


class World:
    """A tree with one whole prefix, and what it is validated against."""

    def __init__(self, *, with_checksums: bool = False) -> None:
        self.table = StampTable()
        self.stamps = self.table.of_schema(SCHEMA)
        self.generations = tuple(np.full(BLOCKS, 3, dtype=np.int32) for _ in SCHEMA.groups)
        self.bytes = tuple(
            np.arange(BLOCKS * len(g.layers), dtype=np.uint64).reshape(BLOCKS, -1) + np.uint64(1)
            for g in SCHEMA.groups
        )
        sums = tuple(b.copy() for b in self.bytes) if with_checksums else None
        self.tree = RadixTree(SCHEMA, self.stamps)
        key = TokenKey(TOKENS)
        lease = self.tree.lease(self.tree.match(Namespace(), key), 0)
        tables = [np.arange(PAGES, dtype=np.int32) + g for g in range(4)]
        self.written = Written(self.stamps, 1, self.generations, sums)
        self.tree.publish(lease, key, PAGES, tables, self.written, END)
        self.tree.add_snapshot(lease, key, END, STATE, 9, self.written)
        self.tree.keep(lease, END)
        self.tree.release(lease)
        self.env = self.make_env()

    def make_env(self, **changes: object) -> ValidationEnv:
        groups = tuple(GroupEnv(generations) for generations in self.generations)
        return replace(ValidationEnv(SCHEMA, self.stamps, self.table, groups), **changes)  # type: ignore[arg-type]

    def change(self, group: int, **changes: object) -> ValidationEnv:
        groups = list(self.env.groups)
        groups[group] = replace(groups[group], **changes)  # type: ignore[arg-type]
        return replace(self.env, groups=tuple(groups))

    def match(self) -> Match:
        return self.tree.match(Namespace(), TokenKey(TOKENS))

    def check(self, env: ValidationEnv | None = None, position: int | None = END) -> set[Verdict]:
        return set(validate(self.match(), env or self.env, position))


def only(verdicts: set[Verdict]) -> Verdict:
    (verdict,) = verdicts
    return verdict


def test_every_condition_belongs_to_a_layer_and_every_kind_names_its_operators() -> None:
    assert set(LAYER_OF) == set(Condition)
    assert set(OPERATORS) == set(GroupKind)
    assert set(LAYER_OF.values()) == set(ChainLayer)


@pytest.mark.parametrize("position", [END, None])
def test_a_clean_hit_has_no_verdict(position: int | None) -> None:
    assert World().check(position=position) == set()


@pytest.mark.parametrize("position", [END, None])
@pytest.mark.parametrize(("group", "page"), [(FULL, 0), (FULL, 5), (INDEX, 2), (WINDOW, 5)])
def test_f15_a_block_given_away_is_found(group: int, page: int, position: int | None) -> None:
    world = World()
    world.generations[group][page + group] += 1
    verdict = only(world.check(position=position))
    assert (verdict.group, verdict.condition) == (group, Condition.GENERATION)
    assert verdict.pages == (page,)
    assert verdict.layer is ChainLayer.INTEGRITY
    assert verdict.is_fault


def test_a_window_page_that_the_position_does_not_need_is_left_alone() -> None:
    world = World()
    world.generations[WINDOW][0 + WINDOW] += 1
    assert world.check(position=END) == set()
    assert only(world.check(position=None)).pages == (0,)


def test_a_block_outside_the_pool_is_found_and_raises_nothing() -> None:
    world = World()
    verdict = only(world.check(world.change(FULL, generations=world.generations[FULL][:5])))
    assert (verdict.condition, verdict.pages) == (Condition.OUT_OF_POOL, (5,))


def test_f3_a_snapshot_given_away_is_found_at_its_position() -> None:
    world = World()
    world.generations[STATE][9] += 1
    verdict = only(world.check())
    assert (verdict.group, verdict.position, verdict.pages) == (STATE, END, ())
    assert verdict.condition is Condition.GENERATION


def test_a_snapshot_outside_the_pool_is_found() -> None:
    world = World()
    verdict = only(world.check(world.change(STATE, generations=world.generations[STATE][:9])))
    assert (verdict.condition, verdict.position) == (Condition.OUT_OF_POOL, END)


def test_f17_a_snapshot_at_another_position_is_no_snapshot_here() -> None:
    verdict = only(World().check(position=END - P))
    assert (verdict.group, verdict.condition) == (STATE, Condition.ABSENT)
    assert not verdict.is_fault


def test_marked_layers_are_named_by_their_bits() -> None:
    world = World()
    world.tree.mark_invalid(world.match(), FULL, {2: 0b10, 3: 0b10, 4: 0b01})
    verdicts = {v for v in world.check() if v.condition is Condition.LAYERS}
    assert {(v.pages, v.layers) for v in verdicts} == {((2, 3), 0b10), ((4,), 0b01)}


@pytest.mark.parametrize("layer", [0, 1])
def test_f21_a_flipped_bit_is_found_by_an_audit_and_by_nothing_else(layer: int) -> None:
    world = World(with_checksums=True)
    world.bytes[FULL][3, layer] ^= np.uint64(1)
    found = world.make_env(audit_rate=1.0, checksum=lambda g, blocks: world.bytes[g][blocks])
    verdict = only(world.check(found))
    assert (verdict.condition, verdict.pages, verdict.layers) == (
        Condition.CHECKSUM,
        (3,),
        1 << layer,
    )
    assert world.check() == set()


def test_f21_an_audit_of_a_part_gets_to_every_block_in_time() -> None:
    world = World(with_checksums=True)
    world.bytes[FULL][3] ^= np.uint64(1)
    env = world.make_env(audit_rate=0.25, checksum=lambda g, blocks: world.bytes[g][blocks])
    hits = [bool(validate(world.match(), env, END, sample)) for sample in range(200)]
    assert 20 < sum(hits) < 90


@pytest.mark.parametrize(
    ("part", "value", "condition", "layer"),
    [
        ("model_fingerprint", "other", Condition.MODEL, ChainLayer.KERNEL_ABI),
        ("version", "v2", Condition.ATTENTION, ChainLayer.KERNEL_ABI),
        ("layout_id", "other", Condition.LAYOUT, ChainLayer.KERNEL_ABI),
        ("weights_epoch", 1, Condition.WEIGHTS, ChainLayer.KERNEL_ABI),
        ("boundary", "other", Condition.BOUNDARY, ChainLayer.INTERSECTION),
    ],
)
@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
def test_f23_f35_one_changed_part_of_a_stamp_is_named(
    part: str, value: object, condition: Condition, layer: ChainLayer, group: int
) -> None:
    world = World()
    stamps = list(world.stamps)
    changed: Stamp = replace(world.table[stamps[group]], **{part: value})  # type: ignore[arg-type]
    stamps[group] = world.table.intern(changed)
    world.tree.expect(stamps)
    verdicts = world.check(world.make_env(stamps=tuple(stamps)))
    faults = {v for v in verdicts if v.is_fault}
    verdict = only({v for v in faults if v.group == group})
    assert (verdict.condition, verdict.layer) == (condition, layer)


def test_a_backend_of_another_layout_fails_every_block() -> None:
    world = World()
    verdict = only(world.check(world.change(FULL, layout_id="other")))
    assert (verdict.condition, verdict.pages) == (Condition.LAYOUT, tuple(range(PAGES)))


@pytest.mark.parametrize("group", [FULL, INDEX, WINDOW, STATE])
def test_a_backend_without_the_operator_of_a_form_fails_it(group: int) -> None:
    world = World()
    for operator in OPERATORS[SCHEMA.groups[group].kind]:
        verdict = only(world.check(world.change(group, operators=ALL_OPERATORS - {operator})))
        assert (verdict.group, verdict.condition) == (group, Condition.OPERATOR)
        assert operator in verdict.detail


def test_f24_a_replaced_source_invalidates_the_index_over_it_and_not_itself() -> None:
    world = World()
    world.tree.drop(world.match(), FULL, [4])
    lease = world.tree.lease(world.match(), END, repairing=(FULL, INDEX))
    tables = [np.full(PAGES, -1, dtype=np.int32) for _ in range(4)]
    tables[FULL][4] = 20
    again = replace(world.written, seq=2)
    world.tree.restore(lease, 4, 5, tables, again)
    world.tree.release(lease)
    verdict = only(world.check())
    assert (verdict.group, verdict.condition, verdict.pages) == (
        INDEX,
        Condition.DEPENDENCY,
        (4,),
    )


def test_an_absent_page_is_named_and_is_no_fault() -> None:
    world = World()
    world.tree.drop(world.match(), FULL, [1])
    absent = [v for v in world.check() if v.group == FULL]
    assert [(v.condition, v.pages, v.is_fault) for v in absent] == [(Condition.ABSENT, (1,), False)]


@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
@pytest.mark.parametrize(
    ("base", "stride", "is_good"),
    [((0,), 64, True), ((16,), 64, False), ((0,), 65, False), ((0, 4), 64, False)],
)
def test_misaligned_blocks_are_found(
    group: int, base: tuple[int, ...], stride: int, is_good: bool
) -> None:
    world = World()
    env = world.change(group, base_addresses=base, block_stride=stride, alignment=64)
    conditions = {v.condition for v in world.check(env)}
    assert conditions == (set() if is_good else {Condition.ALIGNMENT})


def test_only_the_misaligned_blocks_of_an_odd_stride_are_named() -> None:
    world = World()
    env = world.change(FULL, base_addresses=(0,), block_stride=32, alignment=64)
    assert only(world.check(env)).pages == (1, 3, 5)


def test_a_page_is_reported_once_by_the_first_layer_it_fails() -> None:
    world = World()
    world.generations[FULL][:] += 1
    env = replace(
        world.change(FULL, operators=frozenset(), base_addresses=(1,), alignment=64),
    )
    verdict = only(world.check(env))
    assert verdict.condition is Condition.GENERATION


def test_verdicts_say_where_and_why() -> None:
    world = World()
    world.generations[FULL][[1, 2, 4]] += 1
    assert str(only(world.check())) == (
        "integrity: group 0, pages 1-2, 4: generation the block was given away since"
    )
