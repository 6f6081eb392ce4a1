"""First figures: what a token reads of weights is what the server says."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "first_figures.py"


def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("first_figures", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_figures", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def test_weights_are_what_the_server_says_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = loaded(monkeypatch)
    facts = figures.MODELS["smollm2-135m"]
    info = {"model": {"packed_weight_bytes": 96_436_224}, "page_size": 64}
    assert figures.weight_bytes_of(info, facts) == 96_436_224
    plain = {"model": {"packed_weight_bytes": 0}}
    assert figures.weight_bytes_of(plain, facts) == 2 * facts.num_params
    decode = figures.Figure("decode, context 50", "tok/s", [1.0])
    limits = {"read_bytes_per_s": 96_436_224e2, "matmul_bf16_flops": 1.0}
    figures.add_limits([decode], facts, limits, figures.weight_bytes_of(info, facts))
    assert decode.limit == pytest.approx(100)
