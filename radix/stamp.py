"""Write versions, interned: comparing two is comparing two integers.

A stamp names everything that decides what a block's bytes mean. If any part differs, the bytes
mean something else; there is no ordering among stamps and no conversion.

This module does not know which stamp is current: the tree is told (`RadixTree.expect`).
"""

from __future__ import annotations

from dataclasses import dataclass

from statewise.radix.schema import CacheSchema, StateGroupSpec


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who wrote a block, under which configuration."""

    model_fingerprint: str
    version: str  # attention configuration of the group
    layout_id: str  # kernel ABI
    weights_epoch: int = 0
    boundary: str = ""  # how a trailing group's window moves


def boundary_of(spec: StateGroupSpec) -> str:
    """Name how trailing state moves: window, tokens that stay, compression grid; "" for history."""
    if spec.kind.is_history:
        return ""
    return f"{spec.kind.value}/{spec.window}/{spec.sinks}/{spec.ratio}/{spec.overlap}"


class StampTable:
    """Stamp <-> small integer, in order of first use."""

    def __init__(self) -> None:
        self._ids: dict[Stamp, int] = {}
        self._stamps: list[Stamp] = []

    def intern(self, stamp: Stamp) -> int:
        """Return the integer of `stamp`, new or known."""
        known = self._ids.get(stamp)
        if known is None:
            known = self._ids[stamp] = len(self._stamps)
            self._stamps.append(stamp)
        return known

    def __getitem__(self, stamp_id: int) -> Stamp:
        if not 0 <= stamp_id < len(self._stamps):
            raise KeyError(stamp_id)
        return self._stamps[stamp_id]

    def __len__(self) -> int:
        return len(self._stamps)

    def of_schema(self, schema: CacheSchema, weights_epoch: int = 0) -> tuple[int, ...]:
        """Intern the stamp of every group of `schema`."""
        return tuple(
            self.intern(
                Stamp(
                    schema.model_fingerprint,
                    g.version,
                    g.layout_id,
                    weights_epoch,
                    boundary_of(g),
                )
            )
            for g in schema.groups
        )
