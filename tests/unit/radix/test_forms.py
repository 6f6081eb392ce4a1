"""Forms: the transition table over its full cross product, separation of groups, counting."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from statewise.radix import (
    Cause,
    Form,
    FormError,
    GroupKind,
    Namespace,
    RadixTree,
    TokenKey,
    Transition,
    Written,
)
from statewise.radix.forms import FORM_OF, TRANSITIONS, after, check_write, table_text
from support.radix_oracle import SCHEMAS

ALLOWED = {
    "absent": {Cause.PUBLISH: "device", Cause.LOAD: "device", Cause.DEQUANTISE: "device"},
    "device": {
        Cause.REPLACE: "device",
        Cause.MARK: "device",
        Cause.MIRROR: "device",
        Cause.QUANTISE: "device",
        Cause.DEMOTE: "demoted",
        Cause.EVICT: "absent",
        Cause.DROP: "absent",
        Cause.FLUSH: "absent",
    },
    "demoted": {
        Cause.LOAD: "device",
        Cause.PUBLISH: "device",
        Cause.EVICT: "absent",
        Cause.DROP: "absent",
        Cause.FLUSH: "absent",
    },
    "quantised": {
        Cause.DEQUANTISE: "device",
        Cause.PUBLISH: "device",
        Cause.EVICT: "absent",
        Cause.DROP: "absent",
        Cause.FLUSH: "absent",
    },
}


@pytest.mark.parametrize("kind", GroupKind)
def test_every_form_and_cause_changes_as_the_table_says_or_raises(kind: GroupKind) -> None:
    own = FORM_OF[kind]
    for before, cause in product(Form, Cause):
        place = "device" if before is own else before.value
        expected = ALLOWED.get(place, {}).get(cause)
        if expected is None:
            with pytest.raises(FormError, match=before.value):
                after(kind, before, cause)
            continue
        result = own if expected == "device" else Form(expected)
        assert after(kind, before, cause) is result


def test_every_row_and_cause_of_the_table_is_printed() -> None:
    text = table_text()
    assert len(text.splitlines()) == 6
    for (place, cause), result in TRANSITIONS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {place} |"))
        column = [c.strip() for c in text.splitlines()[0].split("|")].index(cause.value)
        assert [c.strip() for c in row.split("|")][column] == result


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_form_of_another_kind_is_refused_in_every_group(name: str) -> None:
    schema = SCHEMAS[name]
    for group, spec in enumerate(schema.groups):
        for form in Form:
            if form is FORM_OF[spec.kind]:
                check_write(schema, group, form)
            else:
                with pytest.raises(FormError, match=spec.name):
                    check_write(schema, group, form)


class Heard:
    def __init__(self) -> None:
        self.events: list[Transition] = []

    def on_transition(self, event: Transition) -> None:
        self.events.append(event)


def published(forms: tuple[Form, ...] | None) -> tuple[RadixTree, Heard]:
    heard = Heard()
    schema = SCHEMAS["full_window"]
    tree = RadixTree(schema, events=heard)
    key = TokenKey(list(range(8)))
    lease = tree.lease(tree.match(Namespace(), key), 0)
    tables = [np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)]
    tree.publish(lease, key, 4, tables, Written((0, 0), 1, forms=forms), 8)
    tree.release(lease)
    return tree, heard


def test_publishing_a_form_into_another_groups_block_raises_and_takes_nothing() -> None:
    with pytest.raises(FormError, match="window"):
        published((Form.FULL, Form.FULL))
    tree, _ = published((Form.FULL, Form.WINDOWED))
    assert len(tree.blocks(1)) == 4


def test_transitions_are_counted_and_told() -> None:
    tree, heard = published(None)
    tree.evict(1, 3)
    assert tree.ledger.total(1, Cause.PUBLISH) == 4
    assert tree.ledger.total(1, Cause.EVICT) == 3
    match = tree.match(Namespace(), TokenKey(list(range(8))))
    tree.drop(match, 0, [3])
    assert tree.ledger.total(0, Cause.DROP) == 1
    tree.flush()
    assert tree.ledger.total(0, Cause.FLUSH) == 3
    assert heard.events[0] == Transition("full", Form.ABSENT, Form.FULL, Cause.PUBLISH, 4)
    assert Transition("window", Form.WINDOWED, Form.ABSENT, Cause.EVICT, 3) in heard.events
