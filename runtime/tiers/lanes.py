"""Two transfer engines as one: copies to and from a remote store never hold up the others.

A store across a network may take seconds to answer, or none at all. Its transfers run on threads of
their own, so that host memory and the disk stay as quick as they are.

This module runs nothing itself: see `transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.store import Counters
from statewise.runtime.tiers.transfer import Priority, Transfer, TransferEngine


class Lanes:
    """A `TransferEngine` for local tiers and one for the remote tier, with the same methods."""

    def __init__(self, local: TransferEngine, remote: TransferEngine, clock: Clock) -> None:
        self._local, self._remote, self._clock = local, remote, clock
        self.options = local.options
        self.counters = Counters()
        local.counters = remote.counters = self.counters

    @property
    def _engines(self) -> Sequence[TransferEngine]:
        return self._local, self._remote

    def _of(self, transfer: Transfer) -> TransferEngine:
        return self._remote if transfer.tier is Tier.REMOTE else self._local

    def submit(self, transfer: Transfer) -> bool:
        """See `TransferEngine`."""
        return self._of(transfer).submit(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """See `TransferEngine`."""
        self._of(transfer).cancel(transfer)

    def poll(self) -> list[Transfer]:
        """See `TransferEngine`."""
        return [transfer for engine in self._engines for transfer in engine.poll()]

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> bool:
        """See `TransferEngine`."""
        return self._of(transfer).wait(transfer, timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """See `TransferEngine`."""
        ends_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        for engine in self._engines:
            left = None if ends_s is None else max(ends_s - self._clock.monotonic(), 0.0)
            if not engine.drain(left):
                return False
        return True

    def run_one(self) -> bool:
        """See `TransferEngine`."""
        return any(engine.run_one() for engine in self._engines)

    def open_transfers(self) -> list[Transfer]:
        """See `TransferEngine`."""
        return [transfer for engine in self._engines for transfer in engine.open_transfers()]

    @property
    def num_open(self) -> int:
        """See `TransferEngine`."""
        return sum(engine.num_open for engine in self._engines)

    @property
    def decoding(self) -> bool:
        """See `TransferEngine`."""
        return self._local.decoding

    @decoding.setter
    def decoding(self, decoding: bool) -> None:
        for engine in self._engines:
            engine.decoding = decoding

    def queued_bytes(self, priority: Priority) -> int:
        """See `TransferEngine`."""
        return sum(engine.queued_bytes(priority) for engine in self._engines)

    def close(self) -> None:
        """See `TransferEngine`."""
        for engine in self._engines:
            engine.close()
