"""What all dense decoders share around their layers: building, partial depth, logits.

A model file (llama.py, gemma3.py) brings its layer; this module builds the layers, runs the first
n of them, and holds what `CausalLM` promises. The residual stream is carried as (x, residual), to
be added by the norm that follows, so that addition and norm are one pass over memory.

This module does not load files and does not know the order of a layer's parts.

Shapes: T tokens of the step, d hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from statewise.kernels.interface import AttentionGeometry, LayerStack, LayerWeights, StackShape
from statewise.kernels.reference import TorchOps
from statewise.radix.schema import CacheSchema
from statewise.runtime.models.base import ForwardContext, LoadOptions
from statewise.runtime.models.config import DenseConfig, ModelInfo
from statewise.runtime.models.layers import Build, Embedding, Norm
from statewise.runtime.models.rope import RopeTable
from statewise.runtime.models.schema import build_schema, group_geometries
from statewise.runtime.models.weights import WeightReader


class DecoderLayer(Protocol):
    """One layer: takes and returns (x, residual); their sum is the hidden state."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on x [T, d] with residual [T, d] (None: nothing to add yet)."""
        ...

    def weights(self) -> LayerWeights | None:
        """What `__call__` computes with, for `Ops.stack`; None where that is something else."""
        ...


LayerFactory = Callable[[Build, int], DecoderLayer]


class DenseDecoder:
    """A `CausalLM` made of equal layers."""

    schema: CacheSchema

    def __init__(self, build: Build, info: ModelInfo, layer_factory: LayerFactory) -> None:
        config = build.config
        self.architecture = config.architecture
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context_len = info.max_context_len
        self.bos_token_id = info.bos_token_id
        self.eos_token_ids = info.eos_token_ids
        self.ropes = tuple(build.ropes.values())
        self.embedding = Embedding(build)
        self.layers = [layer_factory(build, i) for i in range(config.num_layers)]
        self.norm = Norm(build, "model.norm", config.hidden_size)
        self.stack = _stack_of(build, self.layers, self.norm)
        self._geometries: dict[str, AttentionGeometry] = {}

    def describe_cache(self, options: LoadOptions, weights_digest: str) -> None:
        """Fix the cache schema, once the weights' digest is known."""
        self._geometries = group_geometries(self.config, options)
        self.schema = build_schema(self.config, options, weights_digest)

    def geometries(self) -> dict[str, AttentionGeometry]:
        """Attention geometry of each group, by group name."""
        return dict(self._geometries)

    def forward(self, token_ids: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor:
        """Hidden states [T, d] after `num_layers` layers, the final norm applied if all ran."""
        assert 0 <= num_layers <= len(self.layers)
        self._prepare_positions(ctx.positions)
        x, residual = self.embedding.embed(token_ids), None
        stacked = self._run_stack(x, ctx, num_layers)
        if stacked is not None:
            return stacked
        for layer in self.layers[:num_layers]:
            x, residual = layer(x, residual, ctx)
        if num_layers == len(self.layers):
            return self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        return x if residual is None else x + residual

    def _run_stack(self, x: Tensor, ctx: ForwardContext, num_layers: int) -> Tensor | None:
        """What `forward` returns, for embeddings `x`, as one operation; None where there is none.

        The same bits, so that it does not matter which steps take which way.
        """
        if self.stack is None or num_layers == 0:
            return None
        pools, plans = ctx.layer_pools(num_layers)
        if not self.stack.takes(x, plans):
            return None
        out, residual = self.stack.run(x, ctx.positions, pools, plans, num_layers)
        return out if num_layers == len(self.layers) else out + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] float32 of hidden states [N, d] after all layers."""
        return self.embedding.logits(hidden)

    def _prepare_positions(self, positions: Tensor) -> None:
        if positions.numel():
            needed = int(positions.max()) + 1
            for rope in self.ropes:
                rope.fill(needed)


def _stack_of(build: Build, layers: Sequence[DecoderLayer], norm: Norm) -> LayerStack | None:
    weights = [w for layer in layers if (w := layer.weights()) is not None]
    if len(weights) < len(layers):
        return None
    config = build.config
    shape = StackShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation=config.activation,
        norm_eps=config.norm_eps,
        norm_offset=config.norm_offset,
        dtype=build.reader.dtype,
    )
    return build.ops.stack(shape, weights, norm.weight)


def build_dense(
    info: ModelInfo, reader: WeightReader, options: LoadOptions, layer_factory: LayerFactory
) -> DenseDecoder:
    """Build a model from its weights; ModelLoadError where they do not fit its config."""
    config: DenseConfig = info.config
    distinct = dict.fromkeys(layer.rope for layer in config.layers)
    ropes = {r: RopeTable(r, config.head_dim, info.max_context_len) for r in distinct}
    build = Build(config, reader, options.ops or TorchOps(), ropes)
    model = DenseDecoder(build, info, layer_factory)
    model.describe_cache(options, reader.finish(lambda name: _is_redundant(config, name)))
    return model


def _is_redundant(config: DenseConfig, name: str) -> bool:
    """Tensors that some checkpoints carry though they follow from others."""
    is_tied_head = config.tied_embeddings and name == "lm_head.weight"
    return is_tied_head or name.endswith("rotary_emb.inv_freq")
