"""Two transfer engines as one: copies to and from a remote store never hold up the others.

A store across a network may take seconds to answer, or none at all. Its transfers run on threads of
their own, so that host memory and the disk stay as quick as they are.

Nor does it hold up whoever has to wait for everything: what such a store has not answered within
`HANG_S` is abandoned. An abandoned transfer is cancelled and not waited for again; it stays open,
and both of its ends leased, until its thread comes back.

This module runs nothing itself: see `transfer`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from statewise.radix.segment import Tier
from statewise.runtime.clock import Clock
from statewise.runtime.tiers.store import Counters
from statewise.runtime.tiers.transfer import Priority, Transfer, TransferEngine

HANG_S = 2.0  # an answer of a remote store that somebody has to wait for takes no longer


class Lanes:
    """A `TransferEngine` for local tiers and one for the remote tier, with the same methods."""

    def __init__(self, local: TransferEngine, remote: TransferEngine, clock: Clock) -> None:
        self._local, self._remote, self._clock = local, remote, clock
        self.options = local.options
        self.counters = Counters()
        local.counters = remote.counters = self.counters
        self._abandoned: set[Transfer] = set()

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
        """See `TransferEngine`. What is abandoned is not waited for."""
        ends_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        if not self._local.drain(timeout_s):
            return False
        if not self._abandoned:
            return self._remote.drain(self._left_s(ends_s))
        return all(self._remote.wait(t, self._left_s(ends_s)) for t in self._awaited())

    def _left_s(self, ends_s: float | None) -> float | None:
        return None if ends_s is None else max(ends_s - self._clock.monotonic(), 0.0)

    def _awaited(self) -> list[Transfer]:
        """Transfers of the remote store that are open, and not abandoned."""
        return [t for t in self._remote.open_transfers() if t not in self._abandoned]

    def settle(self) -> None:
        """Until nothing runs but what is abandoned.

        What the remote store has not answered within `HANG_S` is, from then on.
        """
        self._local.drain()
        ends_s = self._clock.monotonic() + HANG_S
        for transfer in self._awaited():
            if not self._remote.wait(transfer, self._left_s(ends_s)):
                self._remote.cancel(transfer)
                self._abandoned.add(transfer)

    @property
    def num_awaited(self) -> int:
        """Transfers accepted, not done and not abandoned."""
        self._abandoned = {transfer for transfer in self._abandoned if not transfer.is_done}
        return self.num_open - len(self._abandoned)

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

    def close(self, hang_s: float = HANG_S) -> None:
        """See `TransferEngine`. Waits `hang_s` for the remote store; its threads may run on."""
        for transfer in self._remote.open_transfers():
            self._remote.cancel(transfer)
        closing = threading.Thread(target=self._remote.close, daemon=True)
        closing.start()
        self._local.close()
        closing.join(hang_s)
