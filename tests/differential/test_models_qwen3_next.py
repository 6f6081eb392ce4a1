"""Qwen3-Next equals transformers on tiny checkpoints, and resumes exactly at multiples of 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from statewise.kernels.select import select_backend
from statewise.runtime.models.tiny import TinySize
from support.hybrid_driver import HybridDriver, Span
from support.native_kernels import needs_native
from support.oracle import assert_close, oracle_logits, pieces, token_ids
from support.tiny import load_tiny, tiny_model

LENGTH = 150  # two chunks of 64 and a part
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one-key-head": {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
    "unequal-dims": {"linear_key_head_dim": 8, "linear_value_head_dim": 24},
    "short-conv": {"linear_conv_kernel_dim": 2},
    "some-dense": {"mlp_only_layers": [0, 3]},
    "all-recurrent": {"layer_types": ["linear_attention"] * 4},
    "all-full": {"layer_types": ["full_attention"] * 4},
    "unnormalised": {"norm_topk_prob": False},
    "whole-rope": {"partial_rotary_factor": 1.0},
}


def path_of(variant: str = "default") -> Path:
    return tiny_model("qwen3-next", TinySize(layers=4), **VARIANTS[variant])


def driver_of(variant: str = "default") -> HybridDriver:
    return HybridDriver(load_tiny(path_of(variant)), max_len=208)


def chunked(driver: HybridDriver, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    sequence = driver.new()
    return torch.cat([driver.run(sequence, piece) for piece in pieces(ids, sizes)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_chunks_equal_transformers(variant: str) -> None:
    ids = token_ids(LENGTH)
    expected = oracle_logits(path_of(variant), ids)
    assert_close(chunked(driver_of(variant), ids, (LENGTH,)), expected)
    assert_close(chunked(driver_of(variant), ids, (50, 1, 1, 13, 2, 64, 1)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (16,), (64,), (63, 2)])
def test_any_chunking_equals_transformers(sizes: tuple[int, ...]) -> None:
    ids = token_ids(LENGTH, seed=1)
    assert_close(chunked(driver_of(), ids, sizes), oracle_logits(path_of(), ids))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sizes", [(LENGTH,), (40, 1, 1, 30, 2)])
def test_native_kernels_equal_transformers(sizes: tuple[int, ...]) -> None:
    backend, ops = select_backend("cpu", torch.float32)
    ids = token_ids(LENGTH, seed=11)
    driver = HybridDriver(load_tiny(path_of(), ops=ops), backend=backend)
    assert_close(chunked(driver, ids, sizes), oracle_logits(path_of(), ids))


def test_rows_of_one_step_do_not_see_each_other() -> None:
    """Prefills of unaligned lengths beside decodes (F28)."""
    driver = driver_of()
    rows = [token_ids(90, seed=3), token_ids(61, seed=4), token_ids(75, seed=5)]
    cuts = [[0, 37, 38, 90], [0, 1, 2, 61], [0, 70, 71, 75]]
    sequences = [driver.new() for _ in rows]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for step in range(3):
        spans = [
            Span(sequence, row[cut[step] : cut[step + 1]])
            for sequence, row, cut in zip(sequences, rows, cuts, strict=True)
        ]
        for i, logits in enumerate(driver.step(*spans)):
            parts[i].append(logits)
    for row, part in zip(rows, parts, strict=True):
        assert_close(torch.cat(part), oracle_logits(path_of(), row))


@pytest.mark.slow
def test_resuming_from_a_snapshot_equals_a_cold_run() -> None:
    """At multiples of 64, at page boundaries, inside pages, with suffixes from one token (F29)."""
    driver, ids = driver_of(), token_ids(LENGTH, seed=6)
    expected = oracle_logits(path_of(), ids)
    source = driver.new()
    for p in (2, 3, 8, 64, 71, 128):
        driver.run(source, ids[source.length : p])
        for length in (1, 2, 5, 20):
            resumed = driver.fork(source)
            logits = driver.run(resumed, ids[p : p + length])
            assert_close(logits, expected[p : p + length])
            driver.release(resumed)


@pytest.mark.slow
def test_a_snapshot_holds_the_state_at_exactly_its_position() -> None:
    """However the tokens came, and whatever was in the block before (F3)."""
    driver, ids = driver_of(), token_ids(130, seed=7)
    g = driver.schema.index_of("recurrent")
    for p in (1, 2, 3, 64, 65, 128, 130):
        cold, warm = driver.new(), driver.new()
        driver.run(cold, ids[:p])
        for piece in pieces(ids[:p], (5, 1, 11, 2)):
            driver.run(warm, piece)
        for pool in driver.store.groups[g].layers:
            a, b = pool[cold.tables[g][0]], pool[warm.tables[g][0]]
            assert torch.isfinite(a).all()
            assert torch.allclose(a, b, rtol=0, atol=1e-4)
        driver.release(cold)
        driver.release(warm)


def test_the_wrong_snapshot_is_visible() -> None:
    driver, ids = driver_of(), token_ids(LENGTH, seed=8)
    expected = oracle_logits(path_of(), ids)
    sequence = driver.new()
    driver.run(sequence, ids[:63])
    early = driver.save(sequence)
    driver.run(sequence, ids[63:64])
    exact = driver.save(sequence)
    driver.restore(sequence, early, 64)
    assert float((driver.run(sequence, ids[64:]) - expected[64:]).abs().max()) > 0.01
    driver.restore(sequence, exact, 64)
    assert_close(driver.run(sequence, ids[64:]), expected[64:])


def test_a_row_that_does_not_write_its_state_leaves_it_as_it_was() -> None:
    driver, ids = driver_of(), token_ids(40, seed=9)
    sequence = driver.new()
    driver.run(sequence, ids[:20])
    g = driver.schema.index_of("recurrent")
    block = int(sequence.tables[g][0])
    before = [pool[block].clone() for pool in driver.store.groups[g].layers]
    mask = driver.mask("full")
    layers = driver.store.groups[g].layers
    first = driver.step(Span(sequence, ids[20:30], start=20, write_groups=mask))[0]
    assert all(torch.equal(pool[block], kept) for pool, kept in zip(layers, before, strict=True))
    again = driver.step(Span(sequence, ids[20:30], start=20))[0]
    assert torch.equal(first, again)
    assert not any(torch.equal(pool[block], old) for pool, old in zip(layers, before, strict=True))
