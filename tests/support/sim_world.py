"""What stands in for the world around the control plane: time, the worker, a journal.

    SimClock     time passes because something takes time, or jumps because a seed says so
    SimWorker    the digest model; its steps last, its memory can be hurt, it can die
    Journal      what happened, as data, and one digest of it all

Fault model of the worker. A step either completes or the worker dies before its first write, and
takes all device memory with it. Bits of device memory flip between steps. Freed memory is filled
with poison at the simulation's pleasure: nobody may read it.

This module decides nothing: `simulation` draws from the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from statewise.radix.schema import CacheSchema
from statewise.runtime.errors import InjectedError
from statewise.runtime.scheduler.batch import ScheduledBatch, StepResult
from support.digest import POISON, Int32
from support.digest_worker import DigestWorker


class SimClock:
    """Advances only when told; the wall may be set back, monotonic time may not."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wall_offset = 1e9

    def monotonic(self) -> float:
        """Simulated seconds."""
        return self.now

    def wall(self) -> float:
        """Simulated seconds since the epoch."""
        return self.now + self.wall_offset

    def pass_time(self, seconds: float) -> None:
        """Something took this long."""
        self.now += seconds


class WorkerDiedError(InjectedError):
    """The simulated worker process is gone."""


class SimWorker(DigestWorker):
    """The digest model behind the worker protocol, with time and faults."""

    def __init__(
        self,
        schema: CacheSchema,
        num_blocks: tuple[int, ...],
        vocab: int,
        owner_of: Callable[[str], int],
        clock: SimClock,
    ) -> None:
        super().__init__(schema, num_blocks, vocab, owner_of)
        self.clock = clock
        self.step_s = 0.01
        self.token_s = 1e-4
        self.dies_at_step = -1  # 0: at the next one
        self.before_step: Callable[[ScheduledBatch], None] = lambda batch: None

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run a step; raises `WorkerDiedError` where the seed says so."""
        self.before_step(batch)
        if self.dies_at_step == 0:
            raise WorkerDiedError("the simulated worker died")
        self.dies_at_step -= 1
        tokens = sum(len(row.tokens) for row in batch.rows)
        self.clock.pass_time(self.step_s + tokens * self.token_s)
        return super().execute(batch)

    def poison(self, group: int, blocks: Int32) -> None:
        """Fill memory that nobody owns."""
        self.blocks(group)[:, blocks] = POISON

    def flip(self, group: int, layer_index: int, block: int, slot: int, bit: int) -> None:
        """Flip one bit of device memory."""
        self.blocks(group)[layer_index, block, slot] ^= np.uint64(1 << bit)


class Journal:
    """Structured events in order; `digest` names the whole."""

    def __init__(self, keep: int = 400) -> None:
        self.num_events = 0
        self.tail: list[tuple[object, ...]] = []  # the last ones, for whoever reads a failure
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, *event: object) -> None:
        """Write down one event: a name, then values whose `repr` is their content."""
        self.num_events += 1
        self._hash.update(repr(event).encode())
        self.tail.append(event)
        if len(self.tail) > 2 * self._keep:
            del self.tail[: self._keep]

    def batch(self, batch: ScheduledBatch) -> None:
        """One step as it goes to the worker, page tables included."""
        rows = []
        for row in batch.rows:
            for table in row.page_tables:
                self._hash.update(table.tobytes())
            shape = (row.start, row.end, row.write_groups, row.num_layers)
            rows.append((row.request_id, row.kind.value, *shape))
        copies = [(c.group, c.src, c.dst) for c in (*batch.copies_before, *batch.copies_after)]
        self.add("step", batch.step_id, rows, copies)

    @property
    def digest(self) -> str:
        """Hexadecimal digest of every event."""
        return self._hash.hexdigest()
