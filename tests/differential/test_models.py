"""Logits equal transformers' on tiny random checkpoints: prefill, odd chunks, decode, rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from statewise.kernels.select import BackendUnavailableError, select_backend
from statewise.runtime.models.tiny import TinySize
from support.model_driver import ModelDriver
from support.tiny import ARCHS, load_tiny, tiny_model

TOLERANCE = 1e-4
LENGTH = 130  # eight windows of 16
CHUNKS = (7, 3, 40, 1, 1, 33, 2, 1, 1, 41)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "yarn": ("llama", {"rope_scaling": YARN}),
    "yarn-tuned": (
        "llama",
        {
            "rope_scaling": YARN
            | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.8}
        },
    ),
    "yarn-attention": ("llama", {"rope_scaling": YARN | {"attention_factor": 1.3}}),
    "new-dialect": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 50_000.0}}),
    "no-window": ("mistral", {"sliding_window": None}),
    "upper-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "soft-cap": ("gemma3", {"final_logit_softcapping": 0.2}),
    "query-scale": ("gemma3", {"query_pre_attn_scalar": 40}),
    "untied": ("gemma3", {"tie_word_embeddings": False}),
    "pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma-linear": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
}


@functools.cache
def oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def oracle_logits(path: Path, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = oracle(path)(ids.unsqueeze(0), use_cache=False, **arguments).logits[0]
    return logits


def token_ids(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 384, (length,), generator=torch.Generator().manual_seed(seed))


def chunked(driver: ModelDriver, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    parts, at = [], 0
    for size in sizes:
        parts.append(driver.step(ids[at : at + size])[0])
        at += size
    assert at == len(ids)
    return torch.cat(parts)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours - theirs).abs().max())
    assert difference <= TOLERANCE, f"max |difference| {difference:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_full_prefill_equals_transformers(arch: str) -> None:
    path, ids = tiny_model(arch), token_ids()
    assert_close(ModelDriver(load_tiny(path)).step(ids)[0], oracle_logits(path, ids))


@pytest.mark.parametrize("arch", ARCHS)
def test_odd_chunks_equal_transformers(arch: str) -> None:
    path, ids = tiny_model(arch), token_ids()
    ours = chunked(ModelDriver(load_tiny(path)), ids, CHUNKS)
    assert_close(ours, oracle_logits(path, ids))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_decode_past_the_window_equals_transformers(arch: str) -> None:
    path, ids = tiny_model(arch), token_ids(80, seed=1)
    ours = chunked(ModelDriver(load_tiny(path)), ids, (10, *[1] * 70))
    assert_close(ours, oracle_logits(path, ids))


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_one_step_do_not_see_each_other(arch: str) -> None:
    path = tiny_model(arch)
    rows = [token_ids(50, seed=2), token_ids(33, seed=3), token_ids(41, seed=4)]
    driver = ModelDriver(load_tiny(path), num_rows=3)
    first = driver.step(*(r[:20] for r in rows))
    second = driver.step(*(r[20:] for r in rows))
    for ids, a, b in zip(rows, first, second, strict=True):
        assert_close(torch.cat([a, b]), oracle_logits(path, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_config_variants_equal_transformers(name: str) -> None:
    arch, config = VARIANTS[name]
    path, ids = tiny_model(arch, **config), token_ids(seed=5)
    ours = chunked(ModelDriver(load_tiny(path)), ids, (60, 1, 69))
    assert_close(ours, oracle_logits(path, ids))


@pytest.mark.slow
def test_attention_soft_cap_equals_transformers() -> None:
    """Its Gemma 3 ignores the config entry but passes the argument through."""
    path, ids = tiny_model("gemma3", attn_logit_softcapping=0.7), token_ids(60)
    ours = ModelDriver(load_tiny(path)).step(ids)[0]
    assert_close(ours, oracle_logits(path, ids, softcap=0.7))
    assert (ours - oracle_logits(path, ids)).abs().max() > 100 * TOLERANCE


@pytest.mark.slow
def test_dynamic_rope_is_fixed_for_the_context_it_was_loaded_with() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    path = tiny_model("llama", rope_scaling=scaling, max_position_embeddings=64)
    ids = token_ids(100)
    ours = ModelDriver(load_tiny(path, context_length=100)).step(ids)[0]
    assert_close(ours, oracle_logits(path, ids))
    short = token_ids(60)
    assert_close(ModelDriver(load_tiny(path)).step(short)[0], oracle_logits(path, short))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_native_kernels_equal_transformers(arch: str) -> None:
    try:
        backend, ops = select_backend("cpu", torch.float32)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    path, ids = tiny_model(arch), token_ids()
    driver = ModelDriver(load_tiny(path, ops=ops), backend=backend)
    assert_close(chunked(driver, ids, CHUNKS), oracle_logits(path, ids))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_partial_depth_equals_transformers_hidden_states(arch: str) -> None:
    path, ids = tiny_model(arch), token_ids(60)
    with torch.no_grad():
        states = oracle(path)(ids.unsqueeze(0), output_hidden_states=True).hidden_states
    for depth in range(4):
        ours = ModelDriver(load_tiny(path)).hidden(ids, num_layers=depth)[0]
        assert_close(ours, states[depth][0])
    full = ModelDriver(load_tiny(path)).hidden(ids)[0]
    assert_close(full, states[-1][0])


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16_stays_near_float32(arch: str) -> None:
    path, ids = tiny_model(arch), token_ids()
    exact = oracle_logits(path, ids)
    ours = ModelDriver(load_tiny(path, torch.bfloat16)).step(ids)[0]
    assert ours.dtype == torch.float32
    error = (ours - exact).abs().max() / exact.std()
    assert error < 0.3, f"{error:.3f} standard deviations"


def test_head_dimension_apart_from_hidden_size() -> None:
    size = TinySize(hidden=48, heads=3, kv_heads=1, head_dim=32)
    path, ids = tiny_model("qwen3", size), token_ids(40)
    assert_close(ModelDriver(load_tiny(path)).step(ids)[0], oracle_logits(path, ids))


def test_a_mutated_layer_would_be_noticed() -> None:
    """The tolerance is meaningful: one wrong window changes logits by far more."""
    path, ids = tiny_model("mistral"), token_ids()
    wider = tiny_model("mistral", sliding_window=17)
    ours = ModelDriver(load_tiny(wider)).step(ids)[0]
    assert (ours - oracle_logits(path, ids)).abs().max() > 100 * TOLERANCE
