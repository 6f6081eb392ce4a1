"""The digest model itself: the worker equals the literal oracle, and no wrong state goes unseen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from statewise.radix.schema import CacheSchema
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import BatchRow, RowKind, SampleSpec, ScheduledBatch
from support.digest import ODD, mix, mix_int, odd_int
from support.digest_cold import cold_output
from support.digest_worker import DigestWorker
from support.sim_schema import make_schema

VOCAB = 97
SHAPES = (
    "F",
    "FF",
    "W",
    "FWf",
    "WFw",
    "FSF",
    "SS",
    "K",
    "FKF",
    "R",
    "FRF",
    "C",
    "H",
    "WCHC",
    "RCKSVF",
)


def sample() -> SampleSpec:
    return SampleSpec(SamplingParams(), 0, 0, np.empty(0, np.int32), ())


class Lone:
    """One request on a worker of its own, computed in chunks."""

    def __init__(
        self, schema: CacheSchema, rng: random.Random, prompt: list[int], new: int
    ) -> None:
        self.schema, self.rng = schema, rng
        pages = -(-(len(prompt) + new) // schema.page_size)
        sizes = (pages + 3,) * schema.num_groups
        self.worker = DigestWorker(schema, sizes, VOCAB)
        self.tables = tuple(
            np.array(rng.sample(range(pages + 3), 1 if s.kind.is_snapshot else pages), np.int32)
            for s in schema.groups
        )
        self.tokens, self.prompt_len, self.new = list(prompt), len(prompt), new
        self.computed = 0

    def chunk(self, size: int) -> BatchRow:
        """The next `size` tokens as a row."""
        end = self.computed + size
        return BatchRow(
            "lone",
            RowKind.PREFILL,
            self.computed,
            np.array(self.tokens[self.computed : end], np.int32),
            self.tables,
            (0,) * self.schema.num_groups,
            (1 << self.schema.num_groups) - 1,
            self.schema.num_layers,
            sample=sample() if end == len(self.tokens) else None,
        )

    def advance(self, size: int) -> None:
        row = self.chunk(size)
        result = self.worker.execute(ScheduledBatch(0, (row,))).rows[0]
        self.computed = row.end
        if result.token_id >= 0:
            self.tokens.append(result.token_id)

    def run(self) -> list[int]:
        while len(self.tokens) < self.prompt_len + self.new:
            left = len(self.tokens) - self.computed
            self.advance(self.rng.randint(1, left))
        return self.tokens[self.prompt_len :]


def schema_of(shape: str, rng: random.Random) -> CacheSchema:
    return make_schema(
        shape,
        rng.choice([4, 8]),
        rng.choice([1, 3, 5, 8]),
        ratio=rng.choice([1, 2, 4]),
        long_ratio=rng.choice([2, 4]),
        sinks=rng.choice([1, 3, 6]),
    )


def test_arrays_and_integers_agree() -> None:
    words = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    array = np.array(words, dtype=np.uint64)
    assert mix(array, array, 7).tolist() == [mix_int(w, w, 7) for w in words]
    assert ODD[:50].tolist() == [odd_int(i) for i in range(50)]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_chunking_equals_the_literal_oracle(shape: str) -> None:
    rng = random.Random(shape)
    for _ in range(5):
        schema = schema_of(shape, rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        assert Lone(schema, rng, prompt, 10).run() == cold_output(schema, prompt, 10, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_flipped_bit_in_state_that_is_read_changes_the_output(shape: str) -> None:
    """Whatever a later token reads: every group, every layer."""
    rng = random.Random(shape)
    for group in range(make_schema(shape, 8, 5, ratio=2, long_ratio=4).num_groups):
        lone = Lone(make_schema(shape, 8, 5, ratio=2, long_ratio=4), rng, [3] * 27, 30)
        lone.advance(27)  # 27 is inside a window, a chunk and both compression windows
        expected = cold_output(lone.schema, [3] * 27, 30, VOCAB)
        spec = lone.schema.groups[group]
        page = 26 // 8 if spec.kind.is_window else 0
        block = int(lone.tables[group][page])
        layer = rng.randrange(len(spec.layers))
        lone.worker.blocks(group)[layer, block] ^= np.uint64(2)
        assert lone.run() != expected, spec.name


def test_state_of_another_position_is_not_taken_for_this_ones() -> None:
    rng = random.Random(1)
    for shape in ("R", "C", "H"):
        schema = make_schema(shape, 8, 5, ratio=2, long_ratio=8)
        prompt = [rng.randrange(VOCAB) for _ in range(24)]
        here, there = Lone(schema, rng, prompt, 20), Lone(schema, rng, prompt, 20)
        here.advance(18)
        there.advance(24)  # in the next compression window
        for group, spec in enumerate(schema.groups):
            if spec.kind.is_snapshot:
                source = there.worker.blocks(group)[:, there.tables[group][0]]
                here.worker.blocks(group)[:, here.tables[group][0]] = source
        assert here.run() != cold_output(schema, prompt, 20, VOCAB)
