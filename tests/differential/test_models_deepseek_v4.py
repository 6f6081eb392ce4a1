"""DeepSeek-V4 equals transformers on tiny checkpoints, in any chunking, from any resumed state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from statewise.kernels.select import select_backend
from statewise.radix.need import needs_snapshot, trailing_pages
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.inspection import inspect_model
from statewise.runtime.models.tiny import TinySize
from support.hybrid_driver import HybridDriver, Sequence, Span
from support.native_kernels import needs_native
from support.oracle import assert_close, oracle, oracle_logits, pieces, token_ids
from support.tiny import load_tiny, tiny_model

S, C, H = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
SIZE = TinySize(layers=8)
LENGTH = 150  # nine windows of 16, 37 entries of 4 against a top-k of 6
PAGE = 16


def settings(types: list[str], csa: int, hca: int, **more: Any) -> dict[str, Any]:
    rates = {C: csa, H: hca}
    mlp = ["hash_moe" if i % 2 else "moe" for i in range(len(types))]
    return {"layer_types": types, "mlp_layer_types": mlp, "compress_rates": rates, **more}


# name -> (config, layers, page size)
VARIANTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "default": ({}, 8, 16),
    "windows-only": (settings([S] * 3, 4, 16), 3, 16),
    "routed-only": (settings([C] * 3, 4, 16), 3, 4),
    "dense-only": (settings([H] * 3, 4, 8), 3, 8),
    "pro-like": (settings([H, H, C, H, C], 4, 16), 5, 16),
    "ratios-2-6": (settings([C, H, S, C], 2, 6, sliding_window=5, index_topk=3), 4, 6),
    "ratios-8-4": (settings([C, H, C, H], 8, 4, sliding_window=9, index_topk=1), 4, 8),
    "wide-window": (settings([C, H], 4, 16, sliding_window=64), 2, 16),
    "top-k-of-all": (settings([C, C], 4, 16, index_topk=512), 2, 16),
    "plain-rope": ({"rope_parameters": {"rope_type": "default"}}, 8, 16),
    "two-streams": ({"hc_mult": 2, "hc_sinkhorn_iters": 3}, 8, 16),
    "low-limit": ({"swiglu_limit": 0.5, "routed_scaling_factor": 2.5}, 8, 16),
}
FAST_VARIANTS = ("default", "ratios-2-6")
CHUNKINGS = [(7,), (16,), (64,), (5, 1, 1, 17, 2, 33, 1, 1, 1, 40, 3, 1)]


def slow(cases: Iterable[object]) -> list[object]:
    """Parameters of tests that take more than two seconds."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def path_of(variant: str) -> Path:
    config, layers, _ = VARIANTS[variant]
    return tiny_model("deepseek-v4", TinySize(layers=layers), **config)


def driver_of(variant: str = "default", dtype: torch.dtype = torch.float32) -> HybridDriver:
    model = load_tiny(path_of(variant), dtype, page_size=VARIANTS[variant][2])
    return HybridDriver(model)


def chunked(driver: HybridDriver, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    sequence = driver.new()
    return torch.cat([driver.run(sequence, piece) for piece in pieces(ids, sizes)])


@pytest.mark.parametrize(
    "variant", [*FAST_VARIANTS, *slow(v for v in VARIANTS if v not in FAST_VARIANTS)]
)
def test_prefill_and_chunks_equal_transformers(variant: str) -> None:
    ids = token_ids(LENGTH)
    expected = oracle_logits(path_of(variant), ids)
    assert_close(chunked(driver_of(variant), ids, (LENGTH,)), expected)
    assert_close(chunked(driver_of(variant), ids, (50, 1, 1, 1, 1, 13, 2, 29, 1)), expected)


@pytest.mark.parametrize("sizes", [*slow([(1,), (3,)]), *CHUNKINGS])
def test_any_chunking_equals_transformers(sizes: tuple[int, ...]) -> None:
    length = LENGTH if min(sizes) > 2 else 90
    ids = token_ids(length, seed=1)
    assert_close(chunked(driver_of(), ids, sizes), oracle_logits(path_of("default"), ids))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(LENGTH,), (23,), (100, 2, 1, 1, 1, 1, 40)])
def test_float64_equals_transformers(sizes: tuple[int, ...]) -> None:
    ids = token_ids(LENGTH, seed=2)
    ours = chunked(driver_of(dtype=torch.float64), ids, sizes)
    assert_close(ours, oracle_logits(path_of("default"), ids, torch.float64), 1e-5)


@pytest.mark.slow
def test_the_published_ratios_and_config_equal_transformers() -> None:
    """4 / 128 / window 128, read from `compress_ratios` and the published rope entries."""
    path = tiny_model(
        "deepseek-v4",
        TinySize(layers=6, window=128),
        layer_types=[S, C, H, C, H, C],
        compress_rates={C: 4, H: 128},
        index_topk=32,
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
    )
    ids = token_ids(420)
    expected = oracle_logits(path, ids)
    published = published_config(path)
    assert inspect_model(published).page_size == 128
    driver = HybridDriver(load_tiny(published, page_size=128), max_len=512)
    assert_close(chunked(driver, ids, (300, 1, 1, 1, 50, 1)), expected)


def published_config(path: Path) -> Path:
    """The same checkpoint with the entries of the published config.json."""
    config = json.loads((path / "config.json").read_text())
    ratios = {S: 0, C: 4, H: 128}
    config["compress_ratios"] = [ratios[t] for t in config.pop("layer_types")] + [0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    rope = config.pop("rope_parameters")
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type"), "mscale": 1.0}
    config["qk_rope_head_dim"] = int(config["head_dim"] * config.pop("partial_rotary_factor"))
    del config["compress_rates"]
    return with_weights(path, "published", config, load_file(path / "model.safetensors"))


def with_weights(
    source: Path, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Path:
    target = source.with_name(f"{source.name}-{name}")
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    plain = {n: t.contiguous().clone() for n, t in tensors.items()}
    save_file(plain, target / "model.safetensors")
    return target


@pytest.mark.slow
def test_tensor_names_of_all_dialects_load() -> None:
    path, ids = path_of("default"), token_ids(60)
    expected = oracle_logits(path, ids)
    saved = path.with_name(f"{path.name}-saved")
    oracle(path).save_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    state = oracle(path).state_dict()
    modules = with_weights(path, "modules", config, state)
    for directory in (saved, modules):
        driver = HybridDriver(load_tiny(directory, page_size=PAGE))
        assert_close(chunked(driver, ids, (60,)), expected)


@pytest.mark.slow
def test_quantised_weights_are_dequantised() -> None:
    """e4m3 under 128 x 128 scales, experts as pairs of four bits: equal to their plain values."""
    size = TinySize(layers=2, hidden=128, intermediate=512)
    path = tiny_model("deepseek-v4", size, layer_types=[C, S], mlp_layer_types=["moe", "moe"])
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith((".wq_b.weight", ".wkv.weight"))]:
        rows, columns = tensors[name].shape
        blocks = (-(-rows // 128), -(-columns // 128))
        values = (tensors[name] * 8).to(torch.float8_e4m3fn)
        exponents = torch.randint(122, 126, blocks, generator=generator).to(torch.uint8)
        packed[name] = values
        packed[name.replace(".weight", ".scale")] = exponents.view(torch.float8_e8m0fnu)
        scale = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0)[:rows]
        plain[name] = values.float() * scale.repeat_interleave(128, 1)[:, :columns]
    values_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [n for n in tensors if ".experts." in n]:
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        exponents = torch.randint(121, 124, (rows, columns // 32), generator=generator)
        pairs = codes[:, 0::2] + 16 * codes[:, 1::2]
        packed[name] = pairs.to(torch.uint8).view(torch.int8)
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        packed[name.replace(".weight", ".scale")] = scales
        scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        plain[name] = values_of[codes] * scale
    ids = token_ids(40)
    ours = HybridDriver(load_tiny(with_weights(path, "packed", config, packed), page_size=PAGE))
    assert_close(
        chunked(ours, ids, (40,)), oracle_logits(with_weights(path, "plain", config, plain), ids)
    )


def test_a_page_that_splits_an_entry_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match=r"multiple of 16, not 24; use --page-size 16"):
        load_tiny(path_of("default"), page_size=24)


@pytest.mark.parametrize(
    ("variant", "page_size"), [("default", 16), ("windows-only", 16), ("ratios-2-6", 18)]
)
def test_the_page_size_a_model_asks_for_holds_whole_entries(variant: str, page_size: int) -> None:
    info = inspect_model(path_of(variant))
    groups = load_tiny(path_of(variant), page_size=info.page_size).schema.groups
    assert info.page_unit == math.lcm(*(group.ratio for group in groups))
    assert info.page_size == page_size


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sizes", [(LENGTH,), (40, 1, 1, 30, 2)])
def test_native_kernels_equal_transformers(sizes: tuple[int, ...]) -> None:
    backend, ops = select_backend("cpu", torch.float32)
    ids = token_ids(LENGTH, seed=11)
    driver = HybridDriver(load_tiny(path_of("default"), page_size=PAGE, ops=ops), backend=backend)
    assert_close(chunked(driver, ids, sizes), oracle_logits(path_of("default"), ids))


def test_rows_of_one_step_do_not_see_each_other() -> None:
    """Prefills of unaligned lengths and decodes share steps; each equals a run of its own (F28)."""
    path, driver = path_of("default"), driver_of()
    rows = [token_ids(90, seed=3), token_ids(61, seed=4), token_ids(75, seed=5)]
    cuts = [[0, 37, 38, 90], [0, 1, 16, 61], [0, 50, 63, 75]]
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
        assert_close(torch.cat(part), oracle_logits(path, row))


def needed_state(driver: HybridDriver, source: Sequence, saved: dict[int, int], p: int) -> Sequence:
    """A sequence that holds exactly what resuming at p needs; everything else is poisoned."""
    target = driver.new()
    for g, group in enumerate(driver.schema.groups):
        if group.kind.is_snapshot:
            if needs_snapshot(group, p):
                driver.store.copy_blocks(g, [saved[g]], [int(target.tables[g][0])])
            continue
        lo, hi = 0, -(-p // driver.schema.page_size)
        if group.kind.is_window:
            lo, hi = trailing_pages(group, p, driver.schema.page_size)
        if hi > lo:
            driver.store.copy_blocks(
                g, source.tables[g][lo:hi].tolist(), target.tables[g][lo:hi].tolist()
            )
    target.length = p
    return target


@pytest.mark.slow
def test_resuming_after_any_suffix_length_equals_a_cold_run() -> None:
    """From page boundaries and from inside pages, with suffixes of 1 to 20 tokens (F29)."""
    driver, ids = driver_of(), token_ids(110, seed=6)
    expected = oracle_logits(path_of("default"), ids)
    source = driver.new()
    for piece in (ids[:48], ids[48:64], ids[64:71]):
        driver.run(source, piece)
        p, saved = source.length, driver.save(source)
        for length in (1, 2, 3, 4, 5, 9, 16, 17, 20):
            resumed = needed_state(driver, source, saved, p)
            logits = driver.run(resumed, ids[p : p + length])
            assert_close(logits, expected[p : p + length])
            driver.release(resumed)


@pytest.mark.slow
def test_what_a_snapshot_holds_depends_on_the_prefix_alone() -> None:
    """Working blocks after p tokens are the same however they came; unused slots are zero."""
    driver, ids = driver_of(dtype=torch.float64), token_ids(90, seed=7)
    for p in (1, 3, 4, 15, 16, 50, 79):
        cold, warm = driver.new(), driver.new()
        driver.run(cold, ids[:p])
        for piece in pieces(ids[:p], (5, 1, 11, 2)):
            driver.run(warm, piece)
        for g, group in enumerate(driver.schema.groups):
            if not group.kind.is_snapshot:
                continue
            for pool in driver.store.groups[g].layers:
                a, b = pool[cold.tables[g][0]], pool[warm.tables[g][0]]
                assert torch.isfinite(a).all()
                assert torch.allclose(a, b, rtol=0, atol=1e-10)
                assert ((a == 0) == (b == 0)).all()
        driver.release(cold)
        driver.release(warm)


DROPS = ("swa", "csa", "idx", "hca", "csa_tail", "hca_tail")


@pytest.mark.slow
@pytest.mark.parametrize("group", DROPS)
def test_reusing_without_one_group_is_visible(group: str) -> None:
    """The test that proves the tests: zeros instead of one group's state change the logits."""
    driver, ids = driver_of(), token_ids(120, seed=8)
    source = driver.new()
    driver.run(source, ids[:70])  # 70: inside windows of both ratios
    expected = oracle_logits(path_of("default"), ids)[70:]
    broken = driver.fork(source)
    g = driver.schema.index_of(group)
    driver.store.fill_blocks(g, broken.tables[g].tolist(), 0.0)
    difference = (driver.run(broken, ids[70:]) - expected).abs().amax()
    assert float(difference) > 0.01
    assert_close(driver.run(driver.fork(source), ids[70:]), expected)


@pytest.mark.slow
def test_lost_windows_are_replayed_from_history() -> None:
    """Windows and tails dropped, history kept: replaying L (W - 1) tokens is exact, and writes
    neither entries nor anything else that is shared."""
    config = settings([S, C, H, C], 4, 16, sliding_window=9)
    path = tiny_model("deepseek-v4", TinySize(layers=4), **config)
    driver = HybridDriver(load_tiny(path, page_size=PAGE))
    ids = token_ids(170, seed=9)
    expected = oracle_logits(path, ids)
    for p in (96, 110, 150):
        source = driver.new()
        driver.run(source, ids[:p])
        reach = 4 * 8 if p % 16 == 0 else max(4 * 8, 3 * 8 + p % 16, 3 * 8 + p % 4 + 4)
        resumed = driver.fork(source, without=("swa", "csa_tail", "hca_tail"))
        before = [driver.store.groups[g].layers[0].clone() for g in (1, 2, 4)]
        start = p - reach
        starts = tuple(start if g.kind.is_window else 0 for g in driver.schema.groups)
        driver.poison(resumed, "csa_tail", "hca_tail")
        driver.step(
            Span(
                resumed,
                ids[start:p],
                start=start,
                write_groups=driver.mask("swa", "csa_tail", "hca_tail"),
                context_starts=starts,
            )
        )
        for g, kept in zip((1, 2, 4), before, strict=True):
            assert torch.equal(driver.store.groups[g].layers[0].nan_to_num(), kept.nan_to_num())
        assert_close(driver.run(resumed, ids[p : p + 20]), expected[p : p + 20])
        for sequence in (source, resumed):
            driver.release(sequence)


@pytest.mark.slow
def test_resuming_at_every_page_boundary_of_a_long_prompt() -> None:
    driver = HybridDriver(
        load_tiny(path_of("default"), page_size=PAGE), max_len=1536, num_sequences=40
    )
    ids = token_ids(1500, seed=10)
    expected = oracle_logits(path_of("default"), ids)
    source = driver.new()
    for p in range(PAGE, 1500, PAGE):
        driver.run(source, ids[p - PAGE : p])
        saved = driver.save(source)
        resumed = needed_state(driver, source, saved, p)
        count = min(23, 1500 - p)
        assert_close(driver.run(resumed, ids[p : p + count]), expected[p : p + count])
        driver.release(resumed)
        for g, block in saved.items():
            driver.free[g].append(np.int64(block))
