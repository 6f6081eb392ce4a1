"""The cost model's first figures: bounded in time, on free blocks, true to what was measured."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from statewise.runtime.engine.calibrate import TIERS_BUDGET_S, calibrate, describe
from statewise.runtime.scheduler.batch import ScheduledBatch, StepResult
from support.digest_worker import DigestWorker
from support.engine import VOCAB, Driver, make_schema
from support.sim_world import SimClock

CHUNK = 512


class TimedWorker(DigestWorker):
    """Costs a fixed time, time per token and layer, and time per token that a layer reads.

    `noise`: factors that its runs take in turn, for other work beside it.
    """

    def __init__(
        self,
        token_s: float,
        *,
        blocks: int = 700,
        shape: str = "FWFWFWFW",
        noise: tuple[float, ...] = (1.0,),
    ) -> None:
        schema = make_schema(shape, 8, 16)
        self.num_blocks = (blocks,) * schema.num_groups
        super().__init__(schema, self.num_blocks, VOCAB, lambda rid: 0)
        self.clock = SimClock()
        self.token_s = token_s
        self.pair_s = 1e-9
        self.noise = noise
        self.windows = [
            next((g.window for g in schema.groups if layer in g.layers), 0)
            for layer in range(schema.num_layers)
        ]
        self.rows: list[tuple[int, int, int]] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        (row,) = batch.rows
        size = len(row.tokens)
        noise = self.noise[len(self.rows) % len(self.noise)]
        self.rows.append((row.start, size, row.num_layers))
        share = row.num_layers / self.schema.num_layers
        seconds = 1e-4 + size * self.token_s * share + self.pairs_s(row.start, size, row.num_layers)
        self.clock.pass_time(noise * seconds)
        return super().execute(batch)

    def pairs_s(self, start: int, size: int, num_layers: int = 8) -> float:
        """What reading costs, token by token."""
        tokens = range(start + 1, start + size + 1)
        read = sum(min(t, w) if w else t for w in self.windows[:num_layers] for t in tokens)
        return read * self.pair_s


def measured(worker: TimedWorker, budget_s: float = 1.0):  # type: ignore[no-untyped-def]
    return calibrate(worker, worker.schema, worker.num_blocks, CHUNK, worker.clock, budget_s)


def test_figures_are_those_of_the_worker() -> None:
    worker = TimedWorker(1e-5)
    model = measured(worker)
    assert model.batches == (1, 16, 64, 256, 512)
    for size in (16, 256, 512):
        expected = 1e-4 + size * 1e-5 + worker.pairs_s(0, size) + model.step_s
        assert model.prefill_s(0, size) == pytest.approx(expected, rel=0.02)
    half = model.prefill_s(0, 256, 4) - model.step_s
    assert half == pytest.approx(1e-4 + 256 * 0.5e-5, rel=0.15)


def test_a_long_prompt_pays_for_what_its_layers_read_and_no_more() -> None:
    worker = TimedWorker(1e-5)
    model = measured(worker)
    assert model.pair_s == pytest.approx(1e-9, rel=0.05)
    step_s = 1e-4 + 512e-5 + model.step_s
    expected = sum(step_s + worker.pairs_s(at, 512) for at in range(0, 8192, 512))
    assert model.prefill_s(0, 8192) == pytest.approx(expected, rel=0.05)


def test_other_work_now_and_then_does_not_count() -> None:
    quiet = measured(TimedWorker(1e-5))
    loud = measured(TimedWorker(1e-5, noise=(1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 2.0)), budget_s=2.0)
    assert loud.prefill_s(0, 8192) == pytest.approx(quiet.prefill_s(0, 8192), rel=0.1)
    assert loud.prefill_s(0, 64) == pytest.approx(quiet.prefill_s(0, 64), rel=0.1)


def test_the_first_touch_of_memory_does_not_count() -> None:
    class Untouched(TimedWorker):
        """A page that nobody has written takes ten times as long."""

        def execute(self, batch: ScheduledBatch) -> StepResult:
            row = batch.rows[0]
            place = (row.start, len(row.tokens), row.num_layers)
            if place not in self.rows:
                self.clock.pass_time(0.01)
            return super().execute(batch)

    slow, plain = measured(Untouched(1e-5)), measured(TimedWorker(1e-5))
    for start, end in ((0, 16), (0, 512), (4096, 4160), (0, 8192)):
        assert slow.prefill_s(start, end) == pytest.approx(plain.prefill_s(start, end), rel=0.01)


class Machine(TimedWorker):
    """A machine of its own: new memory is slow, other work comes and goes."""

    def __init__(self, seed: int, *, is_busy: bool) -> None:
        rng = np.random.default_rng(seed)
        round_s = rng.uniform(0.2, 1.0)  # of all trials, roughly
        noise = rng.lognormal(0.0, 0.03, 400)
        if is_busy:
            noise *= np.where(rng.random(400) < 0.1, rng.uniform(1.2, 2.5, 400), 1.0)
        super().__init__(round_s / 2000, noise=tuple(noise.tolist()) if is_busy else (1.0,))
        self.pair_s = self.token_s * rng.uniform(0.1, 1.0) / self.pairs_s(2048, 1) * self.pair_s
        self.touched = [0, 0]  # pages of state, tokens of scratch

    def execute(self, batch: ScheduledBatch) -> StepResult:
        (row,) = batch.rows
        for i, reached in enumerate((row.start + len(row.tokens), len(row.tokens))):
            new = max(reached - self.touched[i], 0)
            self.touched[i] += new
            self.clock.pass_time(new * self.token_s * (0.05, 0.5)[i])
        return super().execute(batch)

    def chunks_s(self, tokens: int) -> float:
        """What a prompt costs when nothing is new and nothing disturbs."""
        alone = 1e-4 + CHUNK * self.token_s
        return sum(alone + self.pairs_s(at, CHUNK) for at in range(0, tokens, CHUNK))


@pytest.mark.parametrize("seed", range(12))
def test_what_a_context_costs_is_found_where_new_memory_is_slow(seed: int) -> None:
    machine = Machine(seed, is_busy=False)
    model = measured(machine, TIERS_BUDGET_S)
    assert model.pair_s == pytest.approx(machine.pair_s, rel=0.03)
    for tokens in (512, 2048, 8192):
        steps_s = tokens / CHUNK * model.step_s
        assert model.prefill_s(0, tokens) - steps_s == pytest.approx(
            machine.chunks_s(tokens), rel=0.03
        )


def test_what_a_context_costs_is_found_beside_other_work() -> None:
    off = []
    for seed in range(24):
        machine = Machine(seed, is_busy=True)
        model = measured(machine, TIERS_BUDGET_S)
        off.append(abs(model.prefill_s(0, 4096) / machine.chunks_s(4096) - 1))
    assert statistics.median(off) < 0.04
    assert sorted(off)[-4] < 0.15


@pytest.mark.parametrize("seed", range(12))
def test_what_a_context_costs_is_measured_twice_within_the_time(seed: int) -> None:
    machine = Machine(seed, is_busy=False)
    measured(machine, TIERS_BUDGET_S)
    assert len([start for start, size, _ in machine.rows if start and size > 1]) >= 2
    assert machine.clock.monotonic() <= 1.05 * TIERS_BUDGET_S


@pytest.mark.parametrize("budget_s", [0.2, 0.25, 0.3, 0.35])
def test_a_single_run_behind_a_context_finds_it_touched(budget_s: float) -> None:
    machine = Machine(3, is_busy=False)
    machine.token_s, machine.pair_s = 4e-4, 4e-8
    model = measured(machine, budget_s)
    assert [size for start, size, _ in machine.rows if start] == [1, 64]
    assert model.pair_s == pytest.approx(machine.pair_s, rel=0.01)


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 1e-2, 1.0])
def test_a_slow_worker_is_not_measured_for_long(token_s: float) -> None:
    worker = TimedWorker(token_s)
    model = measured(worker)
    assert worker.clock.monotonic() <= max(1.0, 17 * token_s)
    assert model.prefill_s(0, 256) > 0
    assert model.depths[-1] == 1.0


def test_a_small_pool_bounds_the_trials() -> None:
    worker = TimedWorker(1e-5, blocks=10)
    model = measured(worker)
    assert max(start + size for start, size, _ in worker.rows) <= 80
    assert model.batches == (1, 16, 64)
    assert model.pair_s == 0.0


def test_snapshot_groups_do_not_bound_the_trials() -> None:
    worker = TimedWorker(1e-5, shape="FRR")
    worker.num_blocks = (400, 2)
    assert measured(worker).batches[-1] == CHUNK


def test_no_time_is_a_guess_from_one_small_batch() -> None:
    model = measured(TimedWorker(1e-5), budget_s=0.0)
    assert model.batches == (16,)


def test_figures_are_shown_as_plain_data() -> None:
    shown = describe(measured(TimedWorker(1e-5)))
    assert len(shown["tokens_per_s"]) == len(shown["depths"])
    assert len(shown["tokens_per_s"][0]) == len(shown["batches"])
    assert set(shown["tiers"]) == {"host", "disk", "remote"}


def test_serving_refines_what_the_first_figures_say() -> None:
    d = Driver(make_schema("FWF", 8, 12), (64, 64), chunked_prefill_size=64)
    truth = d.worker.step_s + 64 * d.worker.token_s
    model = d.core.cache.cost.model
    off = abs(model.prefill_s(0, 64) - truth)
    for i in range(40):
        d.serve(f"r{i}", [1 + (i * 7 + j) % 90 for j in range(64)], 1)
    assert d.core.cache.cost.num_observed >= 40
    assert abs(d.core.cache.cost.model.prefill_s(0, 64) - truth) < off / 3
    assert d.core.stats()["cost_model"]["num_observed"] == d.core.cache.cost.num_observed


def test_decoding_teaches_nothing_about_prefills() -> None:
    d = Driver(make_schema("FF", 8, 12), (64,))
    d.serve("one", [1, 2, 3, 4], 30)
    assert d.core.cache.cost.num_observed == 1


@pytest.mark.parametrize("longest", [40, 600, 4096])
def test_no_trial_is_longer_than_the_models_context(longest: int) -> None:
    """Pools may hold more tokens than one sequence may have."""
    worker = TimedWorker(1e-5)
    places = (worker, worker.schema, worker.num_blocks, CHUNK, worker.clock)
    calibrate(*places, longest=longest)
    assert 0 < max(start + size for start, size, _ in worker.rows) <= longest
