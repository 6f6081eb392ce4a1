"""A small attention model with weights from a seed, and what it computes without any cache.

Layers alternate as `kinds` says: "full", "window", or "shared" (reads the previous layer's state).
`dense_logits` computes the same function over a whole token sequence with plain matrices: an
oracle for everything the runner does with pages, chunks, windows and copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from statewise.kernels.interface import AttentionGeometry
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.models.base import ForwardContext

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN = NUM_Q_HEADS * HEAD_DIM


class ToyModel:
    """Implements `CausalLM`; rotary-free, positions enter through a learned table."""

    architecture = "Toy"
    bos_token_id: int | None = None

    def __init__(
        self,
        kinds: tuple[str, ...] = ("full", "window", "window"),
        *,
        window: int = 6,
        page_size: int = 4,
        vocab_size: int = 37,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (0,),
    ) -> None:
        self.kinds, self.window, self.dtype = kinds, window, dtype
        self.vocab_size, self.max_context_len = vocab_size, 512
        self.eos_token_ids = eos_token_ids
        self.schema = _schema(kinds, window, page_size, dtype)
        self._page_size = page_size
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

        self.embedding = weight(vocab_size, HIDDEN) * 4
        self.places = weight(self.max_context_len, HIDDEN) * 2
        kv_width = NUM_KV_HEADS * HEAD_DIM
        self.layers = [
            (weight(HIDDEN, HIDDEN), weight(kv_width, HIDDEN), weight(kv_width, HIDDEN))
            for _ in kinds
        ]
        self.head = weight(vocab_size, HIDDEN) * 4
        self.poisoned_tokens: set[int] = set()

    def geometries(self) -> dict[str, AttentionGeometry]:
        out = {}
        for group in self.schema.groups:
            out[group.name] = AttentionGeometry(
                num_q_heads=NUM_Q_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                page_size=self._page_size,
                dtype=self.dtype,
                scale=HEAD_DIM**-0.5,
                window=group.window,
            )
        return out

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding[token_ids] + self.places[positions]
        for token in self.poisoned_tokens:
            x[token_ids == token] = float("nan")
        return x

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x @ w.T for w in self.layers[layer])
        return (
            q.view(-1, NUM_Q_HEADS, HEAD_DIM),
            k.view(-1, NUM_KV_HEADS, HEAD_DIM),
            v.view(-1, NUM_KV_HEADS, HEAD_DIM),
        )

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        x = self._embed(token_ids, ctx.positions)
        for layer in range(num_layers):
            x = x + ctx.attend(layer, *self._project(layer, x)).reshape(-1, HIDDEN)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head.T).float()

    def dense_hidden(self, token_ids: list[int]) -> Tensor:
        """Final hidden states [T, d] of the whole sequence, with no cache."""
        tokens = torch.tensor(token_ids)
        places = torch.arange(len(token_ids))
        x = self._embed(tokens, places)
        kept: tuple[Tensor, Tensor] | None = None
        for layer, kind in enumerate(self.kinds):
            q, k, v = self._project(layer, x)
            if kind == "shared":
                assert kept is not None
                k, v = kept
            kept = (k, v)
            window = self.window if self._kind_of(layer) == "window" else 0
            x = x + _dense_attention(q, k, v, window).reshape(-1, HIDDEN)
        return x

    def _kind_of(self, layer: int) -> str:
        while self.kinds[layer] == "shared":
            layer -= 1
        return self.kinds[layer]

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [T, V] of the whole sequence, with no cache."""
        return self.logits(self.dense_hidden(token_ids))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after the prompt, with no cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    length = q.shape[0]
    repeat = NUM_Q_HEADS // NUM_KV_HEADS
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", q, keys) * HEAD_DIM**-0.5
    row, column = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    hidden = column > row
    if window:
        hidden |= column <= row - window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hts,shd->thd", weights, values)


def _schema(kinds: tuple[str, ...], window: int, page_size: int, dtype: torch.dtype) -> CacheSchema:
    owners: dict[str, list[int]] = {}
    shared: dict[str, list[tuple[int, int]]] = {}
    owner, name = 0, kinds[0]
    for layer, kind in enumerate(kinds):
        if kind == "shared":
            shared.setdefault(name, []).append((layer, owner))
        else:
            owner, name = layer, kind
            owners.setdefault(kind, []).append(layer)
    groups = tuple(
        StateGroupSpec(
            name=kind,
            kind=GroupKind(kind),
            layers=tuple(layers),
            layout_id="toy",
            version="1",
            entry_bytes=2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize,
            window=window if kind == "window" else 0,
            shared_layers=tuple(shared.get(kind, ())),
        )
        for kind, layers in owners.items()
    )
    return CacheSchema(page_size, len(kinds), groups, "toy")
