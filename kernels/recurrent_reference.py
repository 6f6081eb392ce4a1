"""Recurrent layers in plain torch: the gated delta rule, and short causal convolutions.

The state S [dk, dv] of a head is decayed, corrected towards v at key k, and read with q:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

A chunk of C tokens does the same with matrices: with G the running sum of g,

    A = strictly lower part of (beta k k^T * exp(G_i - G_j))
    (I + A) U = beta v;  (I + A) W = beta exp(G) k
    V = U - W S;  o = exp(G) q S + lower part of (q k^T * exp(G_i - G_j)) V
    S <- exp(G_C) S + (exp(G_C - G) k)^T V

Chunks are cut at multiples of `CHUNK` of a token's position, so that a row which stops at such a
multiple and goes on later computes the same chunks as one that did not stop.
Source: Yang et al., Gated Delta Networks, section 3.

This module does not try to be fast.

Shapes: T packed tokens, R rows, H heads, dk, dv key and value dim, C channels, K kernel size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64  # tokens
NORM_EPS = 1e-6


def causal_conv(
    x: Tensor, states: Tensor, weight: Tensor, starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over each row's tokens, behind the K-1 tokens in `states`.

    x [T, C], states [R, K-1, C], weight [C, K], starts [R+1] packed. Returns (silu of the result
    [T, C] in x's dtype, new states).
    """
    outs, kept = [], []
    size = weight.shape[1]
    for r, state in enumerate(states):
        row = torch.cat([state, x[starts[r] : starts[r + 1]].to(state.dtype)])
        windows = row.unfold(0, size, 1)  # [n, C, K]
        outs.append((windows * weight.to(row.dtype)).sum(-1))
        kept.append(row[len(row) - (size - 1) :])
    return functional.silu(torch.cat(outs)).to(x.dtype), torch.stack(kept)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: tuple[Sequence[int], Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over each row's tokens from its state on.

    q, k [T, H, dk] (of any length: normalised here, q scaled by dk^-0.5), v [T, H, dv], decay g
    and beta [T, H] in the states' dtype, states [R, H, dk, dv]; `rows` are ([R+1] packed starts,
    [R] positions of the first tokens). Returns (o [T, H, dv] in v's dtype, new states).
    """
    dtype = states.dtype
    q = unit(q.to(dtype)) * q.shape[-1] ** -0.5
    k, values = unit(k.to(dtype)), v.to(dtype)
    starts, positions = rows
    out = torch.empty(v.shape, dtype=dtype)
    kept = []
    for r, state in enumerate(states):
        at, end, position = starts[r], starts[r + 1], positions[r]
        while at < end:
            stop = min(end, at + CHUNK - position % CHUNK)
            part = slice(at, stop)
            out[part], state = _chunk(
                q[part], k[part], values[part], decay[part], beta[part], state
            )
            at, position = stop, position + stop - at
        kept.append(state)
    return out.to(v.dtype), torch.stack(kept)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one (nearly: a floor keeps zero finite)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of n tokens: q, k [n, H, dk], v [n, H, dv], decay, beta [n, H]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, n, ...]
    total = decay.T.cumsum(-1)  # [H, n]
    ratio = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
    grown = total.exp().unsqueeze(-1)
    weighted = k * beta.T.unsqueeze(-1)
    system = weighted @ k.transpose(1, 2) * ratio
    right = torch.cat([v * beta.T.unsqueeze(-1), weighted * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, seen = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    new = fresh - seen @ state
    out = (q * grown) @ state + (q @ k.transpose(1, 2) * ratio) @ new
    rest = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * grown[:, -1:] + (k * rest).transpose(1, 2) @ new
    return out.transpose(0, 1), state
