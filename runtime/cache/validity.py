"""The validation chain on this engine's pools, and what is done about its verdicts.

    verdicts   what failed along a match; changes nothing
    discard    what failed is never found again: pages dropped, single layers marked
    expect     new weights or another layout: old state is unusable from now on

An audited check also compares bytes with the checksums taken at publication, on a share of pages.

This module does not plan, and does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from statewise.radix import Match, RadixTree, StampTable
from statewise.radix.schema import CacheSchema
from statewise.radix.validation import (
    Condition,
    GroupEnv,
    ValidationEnv,
    Verdict,
    validate,
)
from statewise.runtime.cache.blocks import Blocks
from statewise.runtime.cache.counters import CacheCounters


class Validity:
    """What counts as valid now; shares tree and pools with the prefix cache."""

    def __init__(
        self,
        schema: CacheSchema,
        tree: RadixTree,
        blocks: Blocks,
        counters: CacheCounters,
        audit_rate: float,
    ) -> None:
        self._schema = schema
        self._tree = tree
        self._blocks = blocks
        self._counters = counters
        self._table = StampTable()
        self._num_audits = 0
        self.audit_rate = audit_rate if blocks.sums.digest is not None else 0.0
        self.stamps: tuple[int, ...] = ()
        self.expect(schema, 0)

    def expect(self, schema: CacheSchema, weights_epoch: int) -> None:
        """From now on only state of this fingerprint, layout and epoch is valid. No scan."""
        self.stamps = self._table.of_schema(schema, weights_epoch)
        self._tree.expect(self.stamps)
        groups = tuple(GroupEnv(generations=pool.generations) for pool in self._blocks.pools)
        what = (self._schema, self.stamps, self._table, groups)
        self._env = ValidationEnv(*what)
        self._audit_env = ValidationEnv(*what, self.audit_rate, self._blocks.sums.digest)

    def verdicts(
        self, match: Match, position: int, *, audit: bool = False
    ) -> tuple[tuple[Verdict, ...], bool]:
        """(verdicts, whether a resume at `position` passed every layer of the chain).

        Where it did not, the verdicts speak of everything that was found, not of `position` alone.
        """
        env = self._audit_env if audit else self._env
        self._num_audits += audit
        if not validate(match, env, position, self._num_audits):
            return (), True
        return validate(match, env, None, self._num_audits), False

    def discard(self, match: Match, verdicts: Iterable[Verdict], source: str) -> None:
        """Take what failed out of reach: whole pages leave the tree, single layers are marked."""
        new = [v for v in verdicts if v.is_fault and v.condition is not Condition.LAYERS]
        for verdict in new:
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
        if new:
            self._counters.found(new, source)
