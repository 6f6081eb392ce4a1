"""Lossy copies: slower tiers keep state at fewer bits, where a whole server has been told to.

    int8   whole numbers from -127 to 127 and a scale for each vector
    fp8    e4m3 numbers and a scale for each vector

What comes back is close to what left, and so is everything computed from it. Where the state of one
server may be approximate, all of it is called so: every group's layout id says which kind of
copies may lie behind it. The layout id is part of the stamp, and the stamp of the page key:

    an exact server, or one of another kind    never finds such state, in any tier
    such a server                              never finds exact state of others, and shares its
                                               own only with its like
    a backend without the dequantiser          fails layer 2 of the validation chain (`operators`)

Quantised are groups that hold a vector for each token or entry and read them as a weighted sum.
The others come back bit for bit: recurrent state and tails, where an error would be carried into
every later token and a snapshot costs little; index keys, which choose what is read at all.

This module computes no numbers; runtime/tiers/quantise does.
"""

from __future__ import annotations

from dataclasses import replace

from statewise.radix.schema import CacheSchema, GroupKind

KINDS = ("int8", "fp8")
QUANTISED = (GroupKind.FULL, GroupKind.COMPRESSED, GroupKind.WINDOW, GroupKind.CHUNKED)
MARK = "~"


def lossy_layout(layout_id: str, kind: str) -> str:
    """Layout of state that may rest on lossy copies of a kind; ValueError for no such kind."""
    if kind not in KINDS:
        raise ValueError(f"no lossy copies of kind {kind!r}; there are {', '.join(KINDS)}")
    return f"{layout_id}{MARK}{kind}"


def lossy_schema(schema: CacheSchema, kind: str) -> CacheSchema:
    """The same groups, with the layouts of state that may rest on lossy copies."""
    assert not is_lossy(schema), "a schema is marked once"
    groups = tuple(
        replace(
            group,
            layout_id=lossy_layout(group.layout_id, kind),
            lossy=kind if group.kind in QUANTISED else "",
        )
        for group in schema.groups
    )
    return replace(schema, groups=groups)


def is_lossy(schema: CacheSchema) -> bool:
    """Whether state under this schema may be approximate."""
    return any(MARK in group.layout_id for group in schema.groups)
