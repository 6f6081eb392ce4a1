"""Forms: what a page of state is, and how it may change. The table is data.

    form       of group kind        holds
    full       FULL                 every token's entry
    compressed COMPRESSED           one entry per `ratio` tokens
    indexed    INDEX                keys over another group; valid with its version only
    windowed   WINDOW, CHUNKED      a page of a trailing window
    tail       TAIL                 raw projections at one position
    recurrent  RECURRENT            state at one position
    demoted    any of them          only in a slower tier, with its kind and device address
    quantised  FULL, COMPRESSED,    only in a slower tier, at fewer bits: what comes back is close
               WINDOW, CHUNKED      to what left (`lossy`); never loaded, only dequantised
    absent     any of them          nothing

A group's blocks have one device form, that of its kind; a block of another form handed to the
group raises `FormError`, and so does a change that the table does not name, or that loses bits of
a group whose state is exact. Changes are counted by group and cause, and told to an `EventSink` if
there is one.

This module changes nothing itself, and writes no log.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from statewise.radix.schema import CacheSchema, GroupKind


class Form(enum.Enum):
    """What a page (or a position's block) of one group is."""

    __hash__ = object.__hash__  # members are singletons; the inherited one runs in Python

    ABSENT = "absent"
    FULL = "full"
    COMPRESSED = "compressed"
    INDEXED = "indexed"
    WINDOWED = "windowed"
    TAIL = "tail"
    RECURRENT = "recurrent"
    DEMOTED = "demoted"
    QUANTISED = "quantised"


class Cause(enum.Enum):
    """Why a form changes."""

    __hash__ = object.__hash__

    PUBLISH = "publish"  # computed and handed over
    REPLACE = "replace"  # a valid block takes the place of one that was not
    MARK = "mark"  # some layers failed validation
    EVICT = "evict"  # room was needed
    DROP = "drop"  # failed validation
    FLUSH = "flush"  # everything was asked to go
    DEMOTE = "demote"  # only the copy in a slower tier stays
    MIRROR = "mirror"  # a slower tier got a copy
    LOAD = "load"  # came back from a slower tier
    QUANTISE = "quantise"  # a slower tier got a copy at fewer bits
    DEQUANTISE = "dequantise"  # came back from such a copy: approximate from here on


class FormError(ValueError):
    """State of one form was handed to a group of another, or a form changed as none may."""


FORM_OF: dict[GroupKind, Form] = {
    GroupKind.FULL: Form.FULL,
    GroupKind.COMPRESSED: Form.COMPRESSED,
    GroupKind.INDEX: Form.INDEXED,
    GroupKind.WINDOW: Form.WINDOWED,
    GroupKind.CHUNKED: Form.WINDOWED,
    GroupKind.TAIL: Form.TAIL,
    GroupKind.RECURRENT: Form.RECURRENT,
}

DEVICE = "device"  # stands for the form of the group's kind

# (before, cause) -> after
TRANSITIONS: dict[tuple[str, Cause], str] = {
    ("absent", Cause.PUBLISH): DEVICE,
    ("absent", Cause.LOAD): DEVICE,  # found in a tier that outlived the tree
    ("absent", Cause.DEQUANTISE): DEVICE,
    (DEVICE, Cause.REPLACE): DEVICE,
    (DEVICE, Cause.MARK): DEVICE,
    (DEVICE, Cause.MIRROR): DEVICE,
    (DEVICE, Cause.QUANTISE): DEVICE,
    (DEVICE, Cause.DEMOTE): "demoted",
    (DEVICE, Cause.EVICT): "absent",
    (DEVICE, Cause.DROP): "absent",
    (DEVICE, Cause.FLUSH): "absent",
    ("demoted", Cause.LOAD): DEVICE,
    ("demoted", Cause.PUBLISH): DEVICE,  # computed again before it was loaded
    ("demoted", Cause.EVICT): "absent",
    ("demoted", Cause.DROP): "absent",
    ("demoted", Cause.FLUSH): "absent",
    ("quantised", Cause.DEQUANTISE): DEVICE,
    ("quantised", Cause.PUBLISH): DEVICE,
    ("quantised", Cause.EVICT): "absent",
    ("quantised", Cause.DROP): "absent",
    ("quantised", Cause.FLUSH): "absent",
}

# What becomes of a copy's causes where slower tiers keep a group's pages at fewer bits.
AT_FEWER_BITS = {Cause.MIRROR: Cause.QUANTISE, Cause.LOAD: Cause.DEQUANTISE}
_STARTS = (Cause.PUBLISH, Cause.LOAD, Cause.DEQUANTISE)


def after(kind: GroupKind, before: Form, cause: Cause) -> Form:
    """Look up the form that a change leads to; FormError where the table has none."""
    device = FORM_OF[kind]
    place = DEVICE if before is device else before.value
    found = TRANSITIONS.get((place, cause))
    if found is None:
        raise FormError(f"{before.value} state of a {kind.value} group cannot {cause.value}")
    return device if found == DEVICE else Form(found)


def check_write(schema: CacheSchema, group: int, form: Form) -> None:
    """Raise FormError unless `form` is what blocks of `group` hold."""
    expected = FORM_OF[schema.groups[group].kind]
    if form is not expected:
        name = schema.groups[group].name
        raise FormError(f"group {name!r} holds {expected.value} state, not {form.value}")


def check_writes(schema: CacheSchema, forms: Sequence[Form]) -> None:
    """Raise FormError unless every group was written in its own form."""
    for group in range(schema.num_groups):
        check_write(schema, group, forms[group])


def table_text() -> str:
    """Write the transition table as Markdown."""
    causes = list(Cause)
    lines = [
        "| from | " + " | ".join(c.value for c in causes) + " |",
        "|" + "---|" * (len(causes) + 1),
    ]
    for place in ("absent", DEVICE, "demoted", "quantised"):
        row = [TRANSITIONS.get((place, cause), "-") for cause in causes]
        lines.append(f"| {place} | " + " | ".join(row) + " |")
    return "\n".join(lines)


class Transition(NamedTuple):
    """Some pages of one group changed form; a structured event."""

    group: str
    before: Form
    after: Form
    cause: Cause
    num_pages: int


class EventSink(Protocol):
    """Whoever wants to hear of transitions. Called synchronously: be quick, do not raise."""

    def on_transition(self, event: Transition) -> None:
        """Some pages changed form."""
        ...


class Ledger:
    """Counts transitions of one tree by (group, cause), and tells the sink."""

    __slots__ = ("_is_plain", "counts", "schema", "sink")

    def __init__(self, schema: CacheSchema, sink: EventSink | None = None) -> None:
        self.schema = schema
        self.sink = sink
        self.counts: Counter[tuple[int, Cause]] = Counter()
        # Nobody is told, and no cause is counted as another.
        self._is_plain = sink is None and not any(spec.lossy for spec in schema.groups)

    def note(self, group: int, cause: Cause, count: int, before: Form | None = None) -> None:
        """`count` pages of `group` changed; `before` defaults to the group's device form.

        A PUBLISH, LOAD or DEQUANTISE starts from `absent` by default. Copies of a group whose pages
        are quantised are counted as such; FormError where bits of an exact group would be lost.
        """
        if count <= 0:
            return
        if before is None and self._is_plain and (group, cause) in self.counts:
            self.counts[group, cause] += count  # allowed before, allowed again
            return
        spec = self.schema.groups[group]
        if spec.lossy:
            cause = AT_FEWER_BITS.get(cause, cause)
        elif cause in (Cause.QUANTISE, Cause.DEQUANTISE):
            raise FormError(f"group {spec.name!r} is exact: its state cannot {cause.value}")
        if before is None:
            before = Form.ABSENT if cause in _STARTS else FORM_OF[spec.kind]
        result = after(spec.kind, before, cause)
        self.counts[group, cause] += count
        if self.sink is not None:
            self.sink.on_transition(Transition(spec.name, before, result, cause, count))

    def total(self, group: int, cause: Cause) -> int:
        """Pages of `group` that changed for `cause` so far."""
        return self.counts[group, cause]

    def note_all(self, counts: Sequence[int], cause: Cause) -> None:
        """`counts[group]` pages changed for the same cause."""
        for group, count in enumerate(counts):
            if count:
                self.note(group, cause, count)
