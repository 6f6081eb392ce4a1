"""The validation chain on this engine's pools, and what is done about its verdicts.

    verdicts   what failed along a match; changes nothing
    discard    what failed is never found again: pages dropped, single layers marked
    expect     new weights or another layout: old state is unusable from now on
    place      where the blocks lie and what the backend in use needs of them

An audited check also compares bytes with the checksums taken at publication, on a share of pages.

This module does not plan, and does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from statewise.radix import Duplicates, Lease, Match, RadixTree, StampTable, TokenKey, Written
from statewise.radix.schema import CacheSchema
from statewise.radix.validation import (
    ChainLayer,
    Condition,
    GroupEnv,
    ValidationEnv,
    Verdict,
    validate,
)
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.counters import CacheCounters
from statewise.runtime.cache.recall import Recalls
from statewise.runtime.events import EventLog

# Layers of the chain whose failures the tree does not know of by itself.
DAMAGE = (ChainLayer.INTEGRITY, ChainLayer.ALIGNMENT)


class Validity:
    """What counts as valid now; shares tree and pools with the prefix cache."""

    def __init__(
        self,
        schema: CacheSchema,
        tree: RadixTree,
        blocks: Blocks,
        told: tuple[CacheCounters, EventLog],
        audit_rate: float,
    ) -> None:
        """`told` are those who hear of failures."""
        self._schema = schema
        self._tree = tree
        self._blocks = blocks
        self._counters, self._events = told
        self._table = StampTable()
        self._num_audits = 0
        self.recalls = Recalls(blocks.pools)
        self.audit_rate = audit_rate if blocks.sums.digest is not None else 0.0
        self.stamps: tuple[int, ...] = ()
        self._groups = tuple(GroupEnv(generations=pool.generations) for pool in blocks.pools)
        self.expect(schema, 0)

    def expect(self, schema: CacheSchema, weights_epoch: int) -> None:
        """From now on only state of this fingerprint, layout and epoch is valid. No scan."""
        self.stamps = self._table.of_schema(schema, weights_epoch)
        self._tree.expect(self.stamps)
        self._compare_with_now()

    def _compare_with_now(self) -> None:
        what = (self._schema, self.stamps, self._table, self._groups)
        self._env = ValidationEnv(*what)
        self._audit_env = ValidationEnv(*what, self.audit_rate, self._blocks.sums.digest)

    def place(self, device: Sequence[GroupEnv]) -> None:
        """Check hits against these layouts and addresses from now on.

        Raises ValueError where the backend could not read a single block of a group.
        """
        pools = self._blocks.pools
        groups = [
            replace(env, generations=pool.generations)
            for env, pool in zip(device, pools, strict=True)
        ]
        self._groups = tuple(groups)
        self._compare_with_now()
        for spec, static, aligned in zip(
            self._schema.groups, self._env.static, self._env.aligned, strict=True
        ):
            if static is not None:
                raise ValueError(f"group {spec.name!r}: {static[1]}")
            if not aligned:
                raise ValueError(f"group {spec.name!r}: its blocks are not aligned for the backend")

    def verdicts(
        self, match: Match, position: int | None, *, audit: bool = False
    ) -> tuple[tuple[Verdict, ...], bool]:
        """(verdicts, whether a resume at `position` passed every layer; None: all that was found).

        Where it did not, the verdicts speak of everything that was found, not of `position` alone.
        """
        env = self._audit_env if audit else self._env
        self._num_audits += audit
        found = validate(match, env, position, self._num_audits)
        if found and position is not None:
            found = validate(match, env, None, self._num_audits)
            return found, False
        return found, not found

    def discard(self, match: Match, verdicts: Iterable[Verdict], source: str) -> None:
        """Take what failed out of reach: whole pages leave the tree, single layers are marked.

        State of another stamp, or over another version of its source, is out of reach already:
        it stays until something replaces it, and `admitted` counts it.
        """
        new = [v for v in _new(verdicts) if v.layer in DAMAGE]
        for verdict in new:
            self.recalls.add(verdict.group, _blocks_of(match, verdict))
            if verdict.layers and verdict.pages:
                self._tree.mark_invalid(
                    match, verdict.group, dict.fromkeys(verdict.pages, verdict.layers)
                )
                continue
            if verdict.position >= 0:
                freed = self._tree.drop_at(match, verdict.group, verdict.position)
            else:
                freed = self._tree.drop(match, verdict.group, verdict.pages)
            self._blocks.take_back(freed, "fault")
        if new and source == "use":
            self._counters.inconsistent()
        self._tell(new, source)

    def admitted(self, verdicts: Sequence[Verdict]) -> None:
        """Count a hit that is used, and the stale state it met: once, however long it waited."""
        self._counters.validated(verdicts)
        new = _new(verdicts)
        stale = [v for v in new if v.layer not in DAMAGE]
        if stale and len(stale) == len(new):  # damage was counted when it was dropped
            self._counters.inconsistent()
        self._tell(stale, "use")

    def _tell(self, verdicts: Sequence[Verdict], source: str) -> None:
        self._counters.found(verdicts, source)
        for verdict in verdicts:
            self._events.failed(self._schema.groups[verdict.group].name, verdict, source)

    def replace_damaged(
        self, lease: Lease, key: TokenKey, found: Duplicates, written: Written
    ) -> bool:
        """Put a request's own blocks in place of the tree's, where these are found damaged.

        Pages that others computed are relied on from here on, and nothing is used without a pass.
        False where the tree's are good: they stay. Compares bytes only where checksums are kept.
        """
        g = found.group
        if not self._blocks.sums.differ(g, found.tree_blocks).any():
            return False
        match = self._tree.match(lease.namespace, key)
        verdict = Verdict(g, Condition.CHECKSUM, tuple(found.pages.tolist()))
        self.discard(match, [verdict], "publication")
        first, stop = int(found.pages[0]), int(found.pages[-1]) + 1
        tables = [np.full(stop, -1, dtype=np.int32) for _ in self._schema.groups]
        tables[g][found.pages] = found.own_blocks
        outcome = self._tree.restore(lease, first, stop, tables, written)
        assert not outcome.duplicates, "they have just been dropped"
        self._blocks.take_back(outcome.freed, "replaced")
        return True


def _new(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Faults that nothing in the tree is marked with yet."""
    return [v for v in verdicts if v.is_fault and v.condition is not Condition.LAYERS]


def _blocks_of(match: Match, verdict: Verdict) -> list[int]:
    """Device blocks that a verdict speaks of, as the match found them."""
    if verdict.position >= 0:
        snapshot = match.snapshot_at(verdict.position)
        held = None if snapshot is None else snapshot.block_of(verdict.group)
        return [] if held is None else [held.block]
    blocks = match.blocks(verdict.group)[list(verdict.pages)]
    return [block for block in blocks.tolist() if block >= 0]
