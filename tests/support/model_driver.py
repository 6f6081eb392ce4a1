"""Run a model without the runtime: contiguous page tables, reference kernels, one or more rows.

The driver is the smallest honest implementation of `ForwardContext`: it owns a pool per layer,
gives row r the pages r*max_pages .. in order (shuffled, so that a kernel that ignores the page
table fails), and poisons unused slots with NaN.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from statewise.kernels.interface import (
    AttentionBackend,
    AttentionGeometry,
    BatchLayout,
    LayerPools,
)
from statewise.kernels.reference import TorchAttention
from statewise.runtime.models.base import CausalLM


class DriverContext:
    """One step over all rows."""

    def __init__(
        self, driver: ModelDriver, spans: list[tuple[int, int]], token_ids: Tensor
    ) -> None:
        self.driver = driver
        self.token_ids = token_ids
        self.positions = torch.cat([torch.arange(a, b) for a, b in spans])
        counts = [b - a for a, b in spans]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        layout = BatchLayout(
            query_starts=starts,
            context_lens=torch.tensor([b for _, b in spans], dtype=torch.int32),
            context_starts=torch.zeros(len(spans), dtype=torch.int32),
            page_table=driver.page_table,
            write_mask=torch.ones(len(spans), dtype=torch.uint8),
        )
        self.plans = {
            name: driver.backend.plan(geometry, layout)
            for name, geometry in driver.geometries.items()
        }

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        plan = self.plans[self.driver.group_of[layer]]
        pool = self.driver.pools[layer]
        self.driver.backend.append(plan, pool, k, v)
        return self.driver.backend.run(plan, q, pool, sinks)

    def layer_pools(self, num_layers: int) -> tuple[LayerPools, list[object]]:
        return self.driver.layer_pools, list(self.plans.values())


class ModelDriver:
    """Feeds token spans of several rows to a model and returns logits of every token."""

    def __init__(
        self,
        model: CausalLM,
        num_rows: int = 1,
        max_len: int = 256,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.model = model
        self.backend = backend or TorchAttention()
        self.geometries: dict[str, AttentionGeometry] = model.geometries()
        self.lengths = [0] * num_rows
        page_size = model.schema.page_size
        max_pages = -(-max_len // page_size)
        num_blocks = num_rows * max_pages
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.page_table = order.view(num_rows, max_pages).to(torch.int32)
        self.group_of = {
            layer: group.name for group in model.schema.groups for layer in group.layers
        }
        self.pools = {
            layer: self._pool(self.geometries[name], num_blocks)
            for layer, name in self.group_of.items()
        }

    @functools.cached_property
    def layer_pools(self) -> LayerPools:
        layers, names = sorted(self.pools), list(self.geometries)
        return LayerPools(
            tensors=tuple(self.pools[layer] for layer in layers),
            groups=tuple(names.index(self.group_of[layer]) for layer in layers),
            writes=(True,) * len(layers),
        )

    def step(self, *tokens: Tensor, num_layers: int | None = None) -> list[Tensor]:
        """Append tokens [n_r] to each row; return the logits [n_r, V] of each row."""
        hidden = self.hidden(*tokens, num_layers=num_layers)
        return [self.model.logits(h) for h in hidden]

    def hidden(self, *tokens: Tensor, num_layers: int | None = None) -> list[Tensor]:
        """Append tokens to each row; return the hidden states [n_r, d] of each row."""
        spans = [(a, a + len(t)) for a, t in zip(self.lengths, tokens, strict=True)]
        packed = torch.cat(list(tokens))
        ctx = DriverContext(self, spans, packed)
        depth = self.model.schema.num_layers if num_layers is None else num_layers
        with torch.no_grad():
            out = self.model.forward(packed, ctx, depth)
        self.lengths = [b for _, b in spans]
        return list(out.split([b - a for a, b in spans]))

    def greedy(self, prompt: Tensor, num_tokens: int) -> list[int]:
        """Token ids of a greedy continuation of a prompt (one row)."""
        logits = self.step(prompt)[0][-1]
        out: list[int] = []
        while len(out) < num_tokens:
            out.append(int(logits.argmax()))
            logits = self.step(torch.tensor(out[-1:]))[0][-1]
        return out

    def _pool(self, geometry: AttentionGeometry, num_blocks: int) -> Tensor:
        shape = self.backend.pool_shape(geometry, num_blocks)
        return torch.full(shape, float("nan"), dtype=geometry.dtype)
