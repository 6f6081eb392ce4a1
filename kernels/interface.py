"""The typed seam between models and attention kernels: plan once a step, run once a layer.

A *plan* is made per (state group, step): it turns page tables and lengths into whatever the
kernel wants (FlashInfer: its workspace plan; CPU: nothing but contiguous int32 arrays). `append`
writes the new K/V of one layer, `run` attends over everything the row may read, the new tokens
included. A backend also declares the layout of its blocks: `layout_id` is part of every segment's
stamp, so a block written for one backend can never be read by another that would misread it.

Shapes (one legend for this file):
    T    tokens computed in this step, all rows packed      R  rows (requests)
    Hq   query heads    Hkv  key/value heads    D  head dim  P  page size    B  blocks in the pool
    kv   one layer's pool: [B, 2, Hkv, P, D] (K then V, "HND")
    pool one layer's entries: [B, P / ratio, D]

Groups whose state is not K/V per head have geometries of their own: `EntryGeometry` (latents,
compressed entries, index keys: one vector for `ratio` tokens) and `StateGeometry` (one snapshot);
`SparseKernels` are the operations on them.

This module does not allocate pools, choose a backend, or know what a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from statewise.kernels.coded import Codes


@dataclass(frozen=True)
class AttentionGeometry:
    """What is constant for all layers of one state group."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype  # of K/V in the pool
    scale: float  # softmax scale
    window: int = 0  # a token sees itself and window-1 earlier ones; 0: all
    soft_cap: float = 0.0  # logits = cap * tanh(logits / cap); 0: none
    has_sinks: bool = False  # one extra logit per query head in the denominator


@dataclass(frozen=True)
class EntryGeometry:
    """One vector per `ratio` tokens, for all layers of one state group."""

    dim: int
    page_size: int  # tokens
    dtype: torch.dtype
    ratio: int = 1  # tokens of one entry
    window: int = 0  # as in `AttentionGeometry`; only where ratio is 1

    @property
    def entries_per_page(self) -> int:
        """Entries of one layer in one block."""
        return self.page_size // self.ratio


@dataclass(frozen=True)
class StateGeometry:
    """One snapshot of `num_values` numbers per layer and request."""

    num_values: int
    dtype: torch.dtype


GroupGeometry = AttentionGeometry | EntryGeometry | StateGeometry


@dataclass(frozen=True)
class StackShape:
    """What is constant for all layers of a dense decoder."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str  # of `Ops.gated_act`
    norm_eps: float
    norm_offset: float
    dtype: torch.dtype  # of all weights and hidden states


@dataclass(frozen=True)
class LayerMatrix:
    """A matrix as `Ops.linear` takes it: a weight, or what `pack` returned, and a bias."""

    weight: Any
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a dense decoder.

    h += attention_norm(output(attend(rope(norms(qkv(input_norm(h)))))))
    h += output_norm(down(act(gate_up(mlp_norm(h)))))        norms that are None change nothing
    """

    input_norm: Tensor
    qkv: LayerMatrix
    q_norm: Tensor | None  # of each head
    k_norm: Tensor | None
    cos: Tensor  # as in `Ops.rope`
    sin: Tensor
    sinks: Tensor | None  # [Hq] float32, where the layer's geometry has them
    output: LayerMatrix
    attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: LayerMatrix
    down: LayerMatrix
    output_norm: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerPools:
    """Where the layers of a dense decoder keep K/V; one object as long as pools do not move."""

    tensors: tuple[Tensor, ...]  # each layer's pool
    groups: tuple[int, ...]  # each layer's place among the plans of a step
    writes: tuple[bool, ...]  # False: the layer reads what another has written


class LayerStack(Protocol):
    """The layers of a dense decoder as one operation, bit for bit what `Ops` give one by one."""

    def takes(self, hidden: Tensor, plans: Sequence[Any]) -> bool:
        """Whether a step of these hidden states, with these plans, is worth this way."""
        ...

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        pools: LayerPools,
        plans: Sequence[Any],
        num_layers: int,
    ) -> tuple[Tensor, Tensor]:
        """The first layers on `hidden` [T, d], which is lost; appends K/V. (x, residual).

        Their sum is the hidden state; after all layers x is the sum's final norm instead.
        `plans` of groups that those layers do not use may be None.
        """
        ...


@dataclass(frozen=True)
class BatchLayout:
    """Where the rows of one step read and write in one state group. All on the CPU.

    Row r computes tokens query_starts[r] .. query_starts[r+1]-1 of the packed step; they are the
    last ones of its context: positions context_lens[r]-n .. context_lens[r]-1. It may read
    positions >= context_starts[r] only (0 normally; a replay that starts without a window must
    not read pages it does not have). `write_mask[r]` is 0 for a row that reads this group's
    cached state without writing it (replay): `append` skips it. Page table entries outside the
    readable range may be -1.
    """

    query_starts: Tensor  # [R+1] int32
    context_lens: Tensor  # [R] int32, new tokens included
    context_starts: Tensor  # [R] int32
    page_table: Tensor  # [R, max_pages] int32: block of each page, -1 where absent
    write_mask: Tensor  # [R] uint8


class AttentionBackend(Protocol):
    """Paged attention of one device family."""

    name: str

    def layout_id(self, geometry: AttentionGeometry) -> str:
        """Stable word for the physical layout of a block (dtype, order, geometry)."""
        ...

    def pool_shape(self, geometry: AttentionGeometry, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's pool tensor."""
        ...

    def block_alignment(self, geometry: AttentionGeometry) -> int:
        """Bytes that the address of every block must be a multiple of."""
        ...

    def plan(self, geometry: AttentionGeometry, layout: BatchLayout) -> Any:
        """Prepare one step of one group; called once however many layers the group has."""
        ...

    def append(self, plan: Any, kv: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] of the step's tokens into one layer's pool `kv` (mutated)."""
        ...

    def run(self, plan: Any, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend: q [T, Hq, D] over the pool -> [T, Hq, D] in q's dtype.

        Causal, window, soft cap and sinks ([Hq] float32) as the plan's geometry says; softmax
        and accumulation in float32 (float64 for float64 input).
        """
        ...


class SparseKernels(Protocol):
    """Operations on entries: one key that is its own value, shared by all query heads.

    Entry i of a row covers its tokens i*ratio .. (i+1)*ratio-1 and is complete, and visible, from
    the last of them on: the query at position p sees entries i < (p + 1) // ratio.
    """

    name: str

    def plan(self, geometry: EntryGeometry, layout: BatchLayout) -> Any:
        """Prepare one step of one group; ValueError if the layout is malformed."""
        ...

    def append(self, plan: Any, pool: Tensor, entries: Tensor) -> None:
        """Write the entries [N, D] that the step's tokens complete, in order of row and entry.

        Rows whose write mask is 0 are skipped.
        """
        ...

    def select(
        self, plan: Any, pool: Tensor, q: Tensor, weights: Tensor, top_k: int
    ) -> Tensor | None:
        """Choose the visible entries with the highest scores: [T, top_k] int32, ascending.

        score = sum over heads h of weights[t, h] * relu(q[t, h] . entry); q [T, H, D], weights
        [T, H]. Of equal scores the lower entry wins. -1 fills rows that see fewer. None where no
        query sees more than `top_k`: all are chosen.
        """
        ...

    def attend(
        self,
        q: Tensor,
        window: tuple[Any, Tensor] | None,
        entries: tuple[Any, Tensor] | None,
        selected: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        """Attend q [T, H, D] over the (plan, pool) of a window and of entries, in one softmax.

        Keys are the window's and the visible entries (those in `selected`, where it is given);
        the value of a key is its first `value_dim` numbers. Returns [T, H, value_dim] in q's
        dtype. `sinks` [H]: one more logit per head in the denominator.
        """
        ...


class Ops(Protocol):
    """Small fused operations beside attention; each allocates its result unless noted."""

    name: str

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights that `pack` and `pack_codes` have laid out themselves so far."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return x * rsqrt(mean(x^2, -1) + eps) * (offset + weight); x [..., d], float32 inside."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); neither argument is mutated."""
        ...

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place, half-split pairs (i, i + D/2).

        cos, sin [max_positions, D/2] float32; positions [T] int64. Narrower tables rotate only
        the first 2 * cos.shape[1] dimensions, in pairs (i, i + cos.shape[1]).
        """
        ...

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        """act(gate) * up for gate_up [..., 2*d] = (gate | up); kind "silu" or "gelu_tanh"."""
        ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Return x [T, in] @ weight.T (+ bias); weight [out, in] or what `pack` returned."""
        ...

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        """What `linear` returns, in float32 (float64 stays)."""
        ...

    def pack(self, weight: Tensor) -> Any:
        """Prepare a [out, in] weight for `linear` (may return it unchanged)."""
        ...

    @property
    def keeps_codes(self) -> bool:
        """Whether `pack_codes` keeps any: else nobody need make them."""
        ...

    def pack_codes(self, codes: Codes) -> Any | None:
        """Like `pack`, for a bfloat16 weight that a quantised file keeps as codes.

        Results are those of the dequantised weight, bit for bit. None where such a weight had
        better be packed as numbers.
        """
        ...

    def stack(
        self, shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> LayerStack | None:
        """The layers as one operation; None where there is none for them."""
        ...

    def rows(self, weight: Any, indices: Tensor) -> Tensor:
        """Rows [n] int64 of a weight or of what `pack` returned: [n, in]."""
        ...

    def pool_windows(self, values: Tensor, gates: Tensor) -> Tensor:
        """Sum over j of softmax_j(gates) * values: [N, J, D] twice -> [N, D], channel by channel.

        A gate of -inf takes its value (which must be finite) out.
        """
        ...

    def sinkhorn(self, raw: Tensor, iterations: int, eps: float) -> Tensor:
        """Doubly stochastic matrices [N, n, n] from raw ones, by alternating normalisation."""
        ...

    def causal_conv(
        self, x: Tensor, states: Tensor, weight: Tensor, starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Silu of a depthwise convolution over each row's tokens, and the new states.

        x [T, C], states [R, K-1, C] the tokens before, weight [C, K], starts [R+1] packed.
        """
        ...

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule over each row's tokens, and the new states.

        q, k [T, H, dk], v [T, H, dv], decay (a logarithm) and beta [T, H], states [R, H, dk, dv];
        `rows` are ([R+1] packed starts, [R] positions of the first tokens). Stopping a row at a
        multiple of 64 tokens and going on later changes nothing.
        """
        ...
