"""FlashInfer on a CUDA device: paged prefill and decode behind the kernels' interface.

The pool's layout is FlashInfer's "HND", so a pool is passed as it is. A step becomes page lists:
for each row with tokens, the pages from its first readable one to its last. Lists may begin in
the middle of a context, because positions are encoded before attention; the window then counts
from the end, as FlashInfer's `window_left` does.

    all rows have one token             decode wrapper
    anything else                       prefill wrapper, causal
    a row may not read the beginning    prefill wrapper with an explicit mask (rare: a replay
    of its first page                   that resumes inside a page)

Attention sinks need no kernel of their own: with the log-sum-exp l of the visible logits, adding
a sink s to the denominator multiplies the output by sigmoid(l - s).

Checked against the signatures of the installed package and, through a stand-in with the same
semantics, against the reference; not yet run on hardware. This module does not capture graphs and
does not tune workspace sizes.

Shapes: T packed tokens, R rows with tokens, Hq/Hkv heads, D head dim, P page size, B blocks.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statewise.kernels.interface import AttentionGeometry, BatchLayout
from statewise.kernels.layout import block_layout_id, block_shape, check_layout, readable_start

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
VECTOR_BYTES = 16
KV_LAYOUT = "HND"


def why_unavailable(dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run pools of `dtype` here, with the fix; None if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device and a CUDA build of torch; use cpu or torch"
    if dtype not in DTYPES:
        return f"takes bfloat16 and float16 pools, not {dtype}; set the kv cache dtype"
    try:
        importlib.import_module("flashinfer")
    except ImportError as error:
        return f"{error}; install it with: pip install 'statewise[cuda]'"
    return None


@dataclass(frozen=True)
class PageLists:
    """The rows with tokens, as FlashInfer takes them. All on the CPU, int32 unless noted."""

    qo_indptr: Tensor  # [R+1] packed tokens
    kv_indptr: Tensor  # [R+1] entries of kv_indices
    kv_indices: Tensor  # [N] blocks
    last_page_len: Tensor  # [R] tokens in the last page
    written: Tensor  # [W] int64 packed tokens that append writes
    batch_indices: Tensor  # [W] row of each
    positions: Tensor  # [W] position of each, counted from the row's first listed page
    mask: Tensor | None  # [sum n*S] bool, where a first page is not readable from its beginning


def page_lists(geometry: AttentionGeometry, layout: BatchLayout) -> PageLists:
    """Turn a step's layout into page lists; rows without tokens disappear."""
    page = geometry.page_size
    starts = layout.query_starts.tolist()
    qo, kv, indices, last = [0], [0], [], []
    written, batch, positions, spans = [], [], [], []
    needs_mask = False
    columns = (layout.context_lens, layout.context_starts, layout.write_mask)
    rows = zip(*(c.tolist() for c in columns), strict=True)
    for r, (context, start, writes) in enumerate(rows):
        count = starts[r + 1] - starts[r]
        if count == 0:
            continue
        lo = min(readable_start(geometry, start, context - count), context - count)
        base = lo // page * page
        indices.append(layout.page_table[r, lo // page : -(-context // page)])
        qo.append(starts[r + 1])
        kv.append(kv[-1] + indices[-1].shape[0])
        last.append((context - 1) % page + 1)
        needs_mask = needs_mask or start > base
        spans.append((count, context, start, base))
        if writes:
            written.append(torch.arange(starts[r], starts[r + 1]))
            batch.append(torch.full((count,), len(last) - 1, dtype=torch.int32))
            positions.append(torch.arange(context - count - base, context - base).to(torch.int32))
    return PageLists(
        qo_indptr=torch.tensor(qo, dtype=torch.int32),
        kv_indptr=torch.tensor(kv, dtype=torch.int32),
        kv_indices=_joined(indices, torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        written=_joined(written, torch.int64),
        batch_indices=_joined(batch, torch.int32),
        positions=_joined(positions, torch.int32),
        mask=_joined([_visible(geometry, s) for s in spans], torch.bool) if needs_mask else None,
    )


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _visible(geometry: AttentionGeometry, row: tuple[int, int, int, int]) -> Tensor:
    """[n*S] whether each query of a row (n, context, start, base) sees each listed position."""
    count, context, start, base = row
    queries = torch.arange(context - count, context).unsqueeze(1)
    keys = torch.arange(base, context).unsqueeze(0)
    visible = (keys <= queries) & (keys >= start)
    if geometry.window > 0:
        visible &= keys > queries - geometry.window
    return visible.flatten()


@dataclass(frozen=True)
class FlashInferPlan:
    """One step of one group: a planned wrapper and the device copies of what append needs."""

    geometry: AttentionGeometry
    layout: BatchLayout
    wrapper: Any
    written: Tensor
    batch_indices: Tensor
    positions: Tensor
    kv_indices: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor


class FlashInferAttention:
    """Paged attention by FlashInfer.

    `library` stands in for the flashinfer module (tests). Wrappers own buffers, so there is one for
    each geometry and kind of step: planning a group again ends its previous plan. All share one
    workspace on the device, since plans run one after the other.
    """

    name = "flashinfer"

    def __init__(self, device: str = "cuda", library: Any = None) -> None:
        self._library = importlib.import_module("flashinfer") if library is None else library
        self._device = torch.device(device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._wrappers: dict[tuple[AttentionGeometry, str], Any] = {}

    def layout_id(self, geometry: AttentionGeometry) -> str:
        """Word for [2, Hkv, P, D] blocks: the same bytes as the CPU backends'."""
        return block_layout_id(geometry)

    def block_alignment(self, geometry: AttentionGeometry) -> int:
        """16: its kernels load 128 bits at a time."""
        return VECTOR_BYTES

    def pool_shape(self, geometry: AttentionGeometry, num_blocks: int) -> tuple[int, ...]:
        """[B, 2, Hkv, P, D]."""
        return (num_blocks, *block_shape(geometry))

    def plan(self, geometry: AttentionGeometry, layout: BatchLayout) -> FlashInferPlan:
        """Plan a wrapper for the step; ValueError for a layout or geometry it cannot take."""
        check_layout(geometry, layout)
        if geometry.dtype not in DTYPES or geometry.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"flashinfer takes head dims {HEAD_DIMS} in bfloat16 or float16, not "
                f"{geometry.head_dim} in {geometry.dtype}; use the torch backend"
            )
        lists = page_lists(geometry, layout)
        on_device = self._on_device
        return FlashInferPlan(
            geometry=geometry,
            layout=layout,
            wrapper=self._planned_wrapper(geometry, lists),
            written=on_device(lists.written),
            batch_indices=on_device(lists.batch_indices),
            positions=on_device(lists.positions),
            kv_indices=on_device(lists.kv_indices),
            kv_indptr=on_device(lists.kv_indptr),
            last_page_len=on_device(lists.last_page_len),
        )

    def append(self, plan: FlashInferPlan, kv: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] of writing rows into `kv`."""
        if plan.written.shape[0] == 0:
            return
        if plan.written.shape[0] != k.shape[0]:
            k, v = k[plan.written], v[plan.written]
        self._library.append_paged_kv_cache(
            append_key=k.to(kv.dtype).contiguous(),
            append_value=v.to(kv.dtype).contiguous(),
            batch_indices=plan.batch_indices,
            positions=plan.positions,
            paged_kv_cache=kv,
            kv_indices=plan.kv_indices,
            kv_indptr=plan.kv_indptr,
            kv_last_page_len=plan.last_page_len,
            kv_layout=KV_LAYOUT,
        )

    def run(
        self, plan: FlashInferPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend q [T, Hq, D] -> [T, Hq, D] in q's dtype."""
        if plan.wrapper is None:
            return torch.zeros_like(q)
        wide = q.to(kv.dtype).contiguous()
        if sinks is None or not plan.geometry.has_sinks:
            out: Tensor = plan.wrapper.run(q=wide, paged_kv_cache=kv)
            return out.to(q.dtype)
        out, log2_sum = plan.wrapper.run(q=wide, paged_kv_cache=kv, return_lse=True)
        share = torch.sigmoid(log2_sum * math.log(2) - sinks.to(log2_sum))
        return (out.float() * share.unsqueeze(-1)).to(q.dtype)

    def _on_device(self, x: Tensor) -> Tensor:
        return x.to(self._device, non_blocking=True)

    def _planned_wrapper(self, geometry: AttentionGeometry, lists: PageLists) -> Any:
        counts = lists.qo_indptr[1:] - lists.qo_indptr[:-1]
        if counts.numel() == 0:
            return None
        if int(counts.max()) == 1 and lists.mask is None:
            return self._decode_wrapper(geometry, lists)
        return self._prefill_wrapper(geometry, lists)

    def _wrapper(self, geometry: AttentionGeometry, kind: Any, **options: Any) -> Any:
        key = (geometry, kind.__name__)
        if key not in self._wrappers:
            self._wrappers[key] = kind(
                self._workspace, kv_layout=KV_LAYOUT, backend="fa2", **options
            )
        return self._wrappers[key]

    def _decode_wrapper(self, geometry: AttentionGeometry, lists: PageLists) -> Any:
        kind = self._library.BatchDecodeWithPagedKVCacheWrapper
        wrapper = self._wrapper(geometry, kind, use_tensor_cores=True)
        wrapper.plan(
            indptr=lists.kv_indptr,
            indices=self._on_device(lists.kv_indices),
            last_page_len=lists.last_page_len,
            head_dim=geometry.head_dim,
            **_common_plan(geometry),
        )
        return wrapper

    def _prefill_wrapper(self, geometry: AttentionGeometry, lists: PageLists) -> Any:
        wrapper = self._wrapper(geometry, self._library.BatchPrefillWithPagedKVCacheWrapper)
        wrapper.plan(
            qo_indptr=lists.qo_indptr,
            paged_kv_indptr=lists.kv_indptr,
            paged_kv_indices=self._on_device(lists.kv_indices),
            paged_kv_last_page_len=lists.last_page_len,
            head_dim_qk=geometry.head_dim,
            custom_mask=None if lists.mask is None else self._on_device(lists.mask),
            causal=lists.mask is None,
            **_common_plan(geometry),
        )
        return wrapper


def _common_plan(geometry: AttentionGeometry) -> dict[str, Any]:
    """Arguments that both wrappers' `plan` take under the same names."""
    return {
        "num_qo_heads": geometry.num_q_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "page_size": geometry.page_size,
        "pos_encoding_mode": "NONE",
        "window_left": geometry.window - 1 if geometry.window > 0 else -1,
        "logits_soft_cap": geometry.soft_cap or None,
        "sm_scale": geometry.scale,
        "q_data_type": geometry.dtype,
        "kv_data_type": geometry.dtype,
    }
