"""DeepSeek's routed experts with a shared expert.

    score      sqrt(softplus(gate x)), sigmoid or softmax, in float32
    chosen     the best of score + bias (within the best groups of experts, where there are
               groups), or what a table says for the token id (hash routing)
    weights    scores of the chosen, without the bias, normalised and scaled

This module does not know where weights come from.

Shapes: T tokens, d hidden, E experts, k chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from statewise.kernels.interface import Ops
from statewise.runtime.models.deepseek_config import MoeConfig
from statewise.runtime.models.moe import Activation, Experts, clamped_swiglu
from statewise.runtime.models.parts import Linear


def swiglu(ops: Ops, limit: float) -> Activation:
    """silu(gate) * up, clamped where there is a limit."""
    return clamped_swiglu(limit) if limit else lambda x: ops.gated_act(x, "silu")


class GatedMlp:
    """down(act(gate_up x)): a dense MLP, or the expert that every token goes through."""

    def __init__(self, ops: Ops, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        self.gate_up, self.down = Linear(ops, gate_up), Linear(ops, down)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]; gate_up [2I, d], down [d, I]."""
        return self.down(self.activation(self.gate_up(x)))


class Router:
    """Chooses experts: gate [E, d] and bias [E] in float32, or `table` [V, k] by token id."""

    def __init__(
        self, config: MoeConfig, gate: Tensor, bias: Tensor | None, table: Tensor | None
    ) -> None:
        self.config, self.gate, self.bias, self.table = config, gate, bias, table

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (chosen [T, k] int64, weights [T, k])."""
        config = self.config
        scores = self._scores(functional.linear(x.to(self.gate.dtype), self.gate))
        chosen = self._choose(scores) if self.table is None else self.table[token_ids]
        weights = scores.gather(1, chosen)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.scaling

    def _scores(self, logits: Tensor) -> Tensor:
        match self.config.score:
            case "sigmoid":
                return logits.sigmoid()
            case "softmax":
                return logits.softmax(-1)
            case _:
                return functional.softplus(logits).sqrt()

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        biased = scores if self.bias is None else scores + self.bias
        if config.num_chosen_groups < config.num_groups:
            groups = biased.view(len(biased), config.num_groups, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.num_chosen_groups).indices
            is_out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
            biased = groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(config.num_chosen, dim=-1).indices


class MoeBlock:
    """Router, routed experts and the shared expert."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMlp) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        chosen, weights = self.router(x, token_ids)
        return self.experts(x, chosen, weights) + self.shared(x)
