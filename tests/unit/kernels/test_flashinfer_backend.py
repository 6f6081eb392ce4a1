"""The FlashInfer backend without a device: its calls against the installed package's signatures,
and its page lists against the reference, through a stand-in with FlashInfer's semantics.
"""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from statewise.kernels import flashinfer_backend
from statewise.kernels.flashinfer_backend import FlashInferAttention, page_lists
from support.attention_cases import Case, Row, expected_output, make_step

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")


class StandInWrapper:
    """What FlashInfer's documentation says `plan` and `run` do, in plain torch on the CPU."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str, **_: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(self, **arguments: Any) -> None:
        self.planned = arguments

    def _row(self, r: int, q: Tensor, kv: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        p = self.planned
        indptr, pages = p["indptr"].tolist(), p["indices"]
        listed = kv[pages[indptr[r] : indptr[r + 1]].long()].double()  # [n, 2, Hkv, P, D]
        flat = listed.permute(1, 2, 0, 3, 4).flatten(2, 3)
        length = (indptr[r + 1] - indptr[r] - 1) * p["page_size"] + int(p["last_page_len"][r])
        k, v = flat[:, :, :length].repeat_interleave(q.shape[1] // kv.shape[2], dim=1)
        logits = torch.einsum("nhd,hsd->hns", q.double(), k) * p["sm_scale"]
        if p["logits_soft_cap"]:
            logits = p["logits_soft_cap"] * torch.tanh(logits / p["logits_soft_cap"])
        queries = torch.arange(length - q.shape[0], length).unsqueeze(1)
        keys = torch.arange(length).unsqueeze(0)
        visible = keys <= queries if mask is None else mask.view(q.shape[0], length)
        if p["window_left"] >= 0:
            visible = visible & (keys >= queries - p["window_left"])
        logits = logits.masked_fill(~visible, -math.inf)
        v = torch.where(visible.any(0)[:, None], v, 0.0)
        out = torch.einsum("hns,hsd->nhd", logits.softmax(-1), v)
        return out, logits.logsumexp(-1).T / math.log(2)

    def run(self, q: Tensor, paged_kv_cache: Tensor, return_lse: bool = False) -> Any:
        starts = self.planned["qo_indptr"].tolist()
        masks, taken = self.planned.get("custom_mask"), 0
        outs, sums = [], []
        for r in range(len(starts) - 1):
            part = q[starts[r] : starts[r + 1]]
            mask = None
            if masks is not None:
                pages = int(self.planned["indptr"][r + 1] - self.planned["indptr"][r])
                last = int(self.planned["last_page_len"][r])
                size = part.shape[0] * ((pages - 1) * self.planned["page_size"] + last)
                mask, taken = masks[taken : taken + size], taken + size
            out, log_sum = self._row(r, part, paged_kv_cache, mask)
            outs.append(out)
            sums.append(log_sum)
        out = torch.cat(outs).to(q.dtype)
        return (out, torch.cat(sums).float()) if return_lse else out


class StandInPrefill(StandInWrapper):
    def plan(self, **arguments: Any) -> None:
        assert arguments["causal"] == (arguments["custom_mask"] is None)
        renamed = {
            k.removeprefix("paged_kv_"): v for k, v in arguments.items() if k != "head_dim_qk"
        }
        super().plan(**renamed)


class StandInDecode(StandInWrapper):
    def plan(self, **arguments: Any) -> None:
        rows = arguments["last_page_len"].shape[0]
        super().plan(**arguments, qo_indptr=torch.arange(rows + 1))


def stand_in_append(**a: Any) -> None:
    page = a["paged_kv_cache"].shape[3]
    for i in range(a["batch_indices"].shape[0]):
        first = int(a["kv_indptr"][a["batch_indices"][i]])
        position = int(a["positions"][i])
        block = a["kv_indices"][first + position // page]
        a["paged_kv_cache"][block, 0, :, position % page] = a["append_key"][i]
        a["paged_kv_cache"][block, 1, :, position % page] = a["append_value"][i]


def backend() -> FlashInferAttention:
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=StandInPrefill,
        BatchDecodeWithPagedKVCacheWrapper=StandInDecode,
        append_paged_kv_cache=stand_in_append,
    )
    return FlashInferAttention(device="cpu", library=library)


BASE = Case((), num_q_heads=6, num_kv_heads=2, head_dim=64, page_size=8, dtype=torch.float16)
CASES = {
    "decode": replace(BASE, rows=(Row(1, 20), Row(1, 1), Row(0, 9), Row(1, 64))),
    "prefill": replace(BASE, rows=(Row(20, 20), Row(3, 30), Row(1, 17))),
    "window": replace(BASE, rows=(Row(20, 50), Row(1, 33)), window=9),
    "window decode": replace(BASE, rows=(Row(1, 50), Row(1, 3)), window=9),
    "cap": replace(BASE, rows=(Row(5, 21),), soft_cap=3.0),
    "sinks": replace(BASE, rows=(Row(5, 21), Row(1, 8)), sinks=True),
    "page-aligned start": replace(BASE, rows=(Row(5, 29, start=16), Row(1, 20))),
    "start inside a page": replace(BASE, rows=(Row(5, 29, start=19), Row(2, 20)), window=11),
    "decode, start inside": replace(BASE, rows=(Row(1, 29, start=27), Row(1, 5))),
    "replay": replace(BASE, rows=(Row(6, 30, writes=False), Row(3, 8), Row(1, 9, writes=False))),
    "no tokens": replace(BASE, rows=(Row(0, 9),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_page_lists_mean_what_the_layout_means(name: str) -> None:
    case = CASES[name]
    step = make_step(case)
    pool = step.pool.clone()
    attention = backend()
    plan = attention.plan(case.geometry(), step.layout)
    attention.append(plan, pool, step.k, step.v)
    out = attention.run(plan, step.q, pool.nan_to_num(1e4), step.sinks)
    difference = np.abs(out.double().numpy() - expected_output(step))
    assert difference.max(initial=0) < 2e-3
    written = ~torch.isnan(pool) & torch.isnan(step.pool)
    tokens = sum(r.tokens for r in case.rows if r.writes)
    assert int(written.sum()) == tokens * 2 * case.num_kv_heads * case.head_dim


def test_wrappers_are_reused_between_steps() -> None:
    attention = backend()
    case = CASES["decode"]
    first = attention.plan(case.geometry(), make_step(case).layout)
    second = attention.plan(case.geometry(), make_step(replace(case, seed=1)).layout)
    assert first.wrapper is second.wrapper
    other = attention.plan(replace(case.geometry(), window=4), make_step(case).layout)
    assert other.wrapper is not first.wrapper


def test_poisoned_table_entries_are_not_listed() -> None:
    case = replace(BASE, rows=(Row(3, 40), Row(1, 30, start=24)), window=10)
    step = make_step(case)
    lists = page_lists(case.geometry(), step.layout)
    assert lists.kv_indptr.tolist() == [0, 2, 3]
    assert bool((lists.kv_indices >= 0).all())
    assert bool((lists.kv_indices < step.pool.shape[0]).all())
    assert lists.last_page_len.tolist() == [8, 6]


def test_geometries_that_it_cannot_take_are_refused() -> None:
    step = make_step(replace(BASE, rows=(Row(1, 4),)))
    for field, value in (("head_dim", 80), ("dtype", torch.float32)):
        with pytest.raises(ValueError, match="use the torch backend"):
            backend().plan(replace(BASE.geometry(), **{field: value}), step.layout)


class Recorder:
    """Records the arguments of every call made through it."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        if name in WRAPPERS:
            return type(
                name,
                (),
                {
                    "__init__": self._method(name, "__init__"),
                    "plan": self._method(name, "plan"),
                    "run": self._method(name, "run"),
                },
            )
        return self._method(name)

    def _method(self, *path: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls[".".join(path)] = (args, kwargs)
            if kwargs.get("return_lse"):
                return kwargs["q"], torch.zeros(kwargs["q"].shape[:2])
            return kwargs.get("q") if path[-1] == "run" else None

        return method


@pytest.mark.slow  # importing the package takes seconds
def test_calls_bind_to_the_installed_package() -> None:
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    recorder = Recorder()
    attention = FlashInferAttention(device="cpu", library=recorder)
    for name in ("decode", "start inside a page", "sinks"):
        step = make_step(CASES[name])
        plan = attention.plan(step.case.geometry(), step.layout)
        attention.append(plan, step.pool, step.k, step.v)
        attention.run(plan, step.q, step.pool, step.sinks)
    expected = {f"{w}.{m}" for w in WRAPPERS for m in ("__init__", "plan", "run")}
    assert set(recorder.calls) == expected | {"append_paged_kv_cache"}
    for path, (args, kwargs) in recorder.calls.items():
        target = flashinfer
        for part in path.split("."):
            target = getattr(target, part)
        bound = inspect.signature(target).bind(*args, **kwargs)
        if "kwargs" in bound.arguments:  # the decode wrapper passes them on
            accepted = inspect.signature(getattr(flashinfer, WRAPPERS[1])._plan_impl).parameters
            assert set(bound.arguments["kwargs"]) <= set(accepted), path


def test_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = flashinfer_backend.why_unavailable(torch.float32)
    assert reason is not None
    assert "set the kv cache dtype" in reason

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    reason = flashinfer_backend.why_unavailable(torch.bfloat16)
    assert reason is not None
    assert "pip install 'statewise[cuda]'" in reason
