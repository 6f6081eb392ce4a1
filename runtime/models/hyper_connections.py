"""Manifold-constrained hyper-connections: n residual streams, mixed around every block.

    u = fn @ rms(flat(X));   pre, post, mix from u under sigmoid, 2 sigmoid, Sinkhorn
    x = sum_j pre_j X_j  ->  block  ->  y
    X'_k = post_k y + sum_j mix[j, k] X_j

`mix` is made doubly stochastic by alternating normalisation, so that mixing never amplifies. The
coefficients are computed in float32; a token's streams depend on that token alone.

Source: the DeepSeek-V4 report, section 2.2.

Shapes: T tokens, n streams, d hidden, X [T, n, d].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels.interface import Ops
from statewise.runtime.models.deepseek_config import HyperConfig
from statewise.runtime.models.parts import unit_rms


class HyperConnection:
    """The mixing around one block; fn [(2 + n) n, n d], base [(2 + n) n], scale [3]."""

    def __init__(
        self, ops: Ops, config: HyperConfig, weights: tuple[Tensor, Tensor, Tensor], norm_eps: float
    ) -> None:
        self.ops, self.config, self.norm_eps = ops, config, norm_eps
        self.fn, base, scale = weights
        n = config.streams
        self.scales = torch.cat(
            [scale[:1].expand(n), scale[1:2].expand(n), scale[2:].expand(n * n)]
        )
        self.base = base

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (block input [T, d], post [T, n, 1], mix transposed [T, n, n])."""
        n, eps = self.config.streams, self.config.eps
        raw = coefficients(streams, self.fn, self.norm_eps) * self.scales + self.base
        pre, post, mix = torch.split(raw, [n, n, n * n], dim=-1)
        pre = pre.sigmoid() + eps
        x = (pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype)
        matrix = self.ops.sinkhorn(mix.reshape(-1, n, n), self.config.iterations, eps)
        post = (2 * post.sigmoid()).unsqueeze(-1)
        return x, post.to(streams.dtype), matrix.transpose(1, 2).to(streams.dtype)

    @staticmethod
    def expand(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
        """Streams [T, n, d] after a block that returned y [T, d]."""
        return post * y.unsqueeze(1) + torch.matmul(mix, streams)


class HyperHead:
    """The last collapse of the streams; fn [n, n d], base [n], scale [1]."""

    def __init__(
        self, config: HyperConfig, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float
    ) -> None:
        self.eps, self.norm_eps = config.eps, norm_eps
        self.fn, self.base, self.scale = fn, base, scale

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, n, d] -> [T, d]."""
        pre = coefficients(streams, self.fn, self.norm_eps) * self.scale + self.base
        pre = pre.sigmoid() + self.eps
        return (pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


def coefficients(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """Fn @ rms(flat(streams)): [T, rows of fn] in fn's dtype."""
    return functional.linear(unit_rms(streams.flatten(1).to(fn.dtype), norm_eps), fn)
