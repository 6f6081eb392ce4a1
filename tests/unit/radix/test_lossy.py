"""Lossy copies in the decisions: other stamps, an operator of their own, forms, namespaces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statewise.radix import (
    Cause,
    Condition,
    Form,
    FormError,
    GroupEnv,
    GroupKind,
    Namespace,
    RadixTree,
    StampTable,
    TokenKey,
    ValidationEnv,
    Written,
    validate,
)
from statewise.radix.forms import Ledger, after
from statewise.radix.lossy import KINDS, QUANTISED, is_lossy, lossy_layout, lossy_schema
from statewise.radix.validation import ALL_OPERATORS, ChainLayer, dequantiser
from support.radix_oracle import SCHEMAS

NAMES = sorted(SCHEMAS)


@pytest.mark.parametrize("name", NAMES)
def test_no_stamp_of_one_kind_is_one_of_another_or_exact(name: str) -> None:
    """Snapshots and indexes too: they may have been computed from what a lossy copy gave."""
    schema, table = SCHEMAS[name], StampTable()
    stamps = [table.of_schema(schema)] + [table.of_schema(lossy_schema(schema, k)) for k in KINDS]
    for of_group in zip(*stamps, strict=True):
        assert len(set(of_group)) == 1 + len(KINDS)
    assert not is_lossy(schema)
    assert all(is_lossy(lossy_schema(schema, kind)) for kind in KINDS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="int8, fp8"):
        lossy_layout("bf16", "int4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_dequantiser_layer_2_fails_every_quantised_group(name: str, kind: str) -> None:
    """A verdict that the planner works with; with the operator everything passes."""
    schema, table = lossy_schema(SCHEMAS[name], kind), StampTable()
    stamps = table.of_schema(schema)
    size = schema.page_size
    tree = RadixTree(schema, stamps)
    key = TokenKey(list(range(4 * size)))
    lease = tree.lease(tree.match(Namespace(), key), 0)
    blocks = np.arange(4, dtype=np.int32)
    tables = [
        np.full(4, -1, dtype=np.int32) if spec.kind.is_snapshot else blocks
        for spec in schema.groups
    ]
    tree.publish(lease, key, 4, tables, Written(stamps, 1), 4 * size)
    for group, spec in enumerate(schema.groups):
        if spec.kind.is_snapshot:
            tree.add_snapshot(lease, key, 4 * size, group, 0, Written(stamps, 1))
    tree.release(lease)

    def check(operators: frozenset[str]) -> dict[int, set[Condition]]:
        groups = (GroupEnv(operators=operators),) * schema.num_groups
        env = ValidationEnv(schema, stamps, table, groups)
        found: dict[int, set[Condition]] = {}
        for verdict in validate(tree.match(Namespace(), key), env, 4 * size):
            found.setdefault(verdict.group, set()).add(verdict.condition)
            if verdict.condition is Condition.OPERATOR:
                assert verdict.layer is ChainLayer.KERNEL_ABI
                assert dequantiser(kind) in verdict.detail
        return found

    quantised = {g for g, spec in enumerate(schema.groups) if spec.kind in QUANTISED}
    other = next(k for k in KINDS if k != kind)
    for operators in (ALL_OPERATORS, ALL_OPERATORS | {dequantiser(other)}):
        assert check(operators) == {g: {Condition.OPERATOR} for g in quantised}
    assert not check(ALL_OPERATORS | {dequantiser(kind)})


def test_a_quantised_page_is_never_loaded_as_if_it_were_whole() -> None:
    assert after(GroupKind.FULL, Form.QUANTISED, Cause.DEQUANTISE) is Form.FULL
    with pytest.raises(FormError, match="quantised"):
        after(GroupKind.FULL, Form.QUANTISED, Cause.LOAD)
    with pytest.raises(FormError, match="demoted"):
        after(GroupKind.FULL, Form.DEMOTED, Cause.DEQUANTISE)


def test_copies_are_counted_as_what_they_are_and_exact_groups_lose_no_bits() -> None:
    schema = SCHEMAS["full_window"]
    exact, lossy = Ledger(schema), Ledger(lossy_schema(schema, "int8"))
    for cause in (Cause.QUANTISE, Cause.DEQUANTISE):
        with pytest.raises(FormError, match="exact"):
            exact.note(0, cause, 1)
    for ledger in (exact, lossy):
        for cause in (Cause.MIRROR, Cause.LOAD, Cause.LOAD):
            ledger.note(1, cause, 2)
    assert exact.counts == {(1, Cause.MIRROR): 2, (1, Cause.LOAD): 4}
    assert lossy.counts == {(1, Cause.QUANTISE): 2, (1, Cause.DEQUANTISE): 4}


def test_state_of_the_exact_is_apart() -> None:
    names = [Namespace(), Namespace(exact=True), Namespace("a"), Namespace("a", exact=True)]
    assert len({name.key for name in names}) == len(names)
    assert replace(names[1], exact=False) == names[0]
