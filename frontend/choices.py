"""How `select` picks: rules over the log probabilities of the choices' tokens.

A rule gets, for each choice, the scored tokens as the server returns them,
`[logprob, token_id, text]`, and says which choice wins. Rules are callables with keyword arguments
so that a user's own rule can be passed as `choices_method`. `constrained` is not a rule over
scores: it makes the backend decode once over the choices alone.

    token_length_normalized             highest mean log probability (the default)
    greedy_token_selection              follow the likeliest token where the choices part
    unconditional_likelihood_normalized highest mean gain over the choice's own likelihood
    constrained                         one constrained greedy generation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

ScoredToken = Sequence[Any]  # [logprob | None, token_id, text | None]
ScoredTokens = Sequence[ScoredToken]


@dataclass(frozen=True)
class ChoicesDecision:
    """The choice made and the figures it was made from."""

    decision: str
    meta_info: dict[str, Any] | None = field(default=None)


class ChoicesMethod(Protocol):
    """A rule. `requires_unconditional_logprobs` asks for the choices' scores without a prompt."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether `unconditional_token_logprobs` must be given."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[ScoredTokens],
        output_token_logprobs: list[ScoredTokens],
        unconditional_token_logprobs: list[ScoredTokens] | None = None,
    ) -> ChoicesDecision:
        """Pick one of `choices`; every list has one entry for each choice."""


def mean_logprob(tokens: ScoredTokens) -> float:
    """Mean of the known log probabilities; 0 where none is known (a prompt's first token)."""
    known = [float(token[0]) for token in tokens if token[0] is not None]
    return sum(known) / len(known) if known else 0.0


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


class _Rule:
    """What the three rules share: the shape of their answer."""

    requires_unconditional_logprobs = False

    def _decide(self, index: int, figures: dict[str, Any], **more: Any) -> ChoicesDecision:
        meta = {k: v for k, v in figures.items() if k != "choices" and v is not None}
        return ChoicesDecision(figures["choices"][index], {**meta, **more})

    def __repr__(self) -> str:
        return type(self).__name__


class TokenLengthNormalized(_Rule):
    """The highest mean log probability over a choice's tokens."""

    def __call__(self, **figures: Any) -> ChoicesDecision:
        """See `ChoicesMethod`."""
        return self._decide(_best(figures["normalized_prompt_logprobs"]), figures)


class GreedyTokenSelection(_Rule):
    """Token by token, keep the choices that start with the likeliest next token.

    A choice that ends where others go on competes with its mean log probability.
    """

    def __call__(self, **figures: Any) -> ChoicesDecision:
        """See `ChoicesMethod`."""
        scored: list[ScoredTokens] = figures["input_token_logprobs"]
        matrix = _extended(scored)
        remaining = list(range(len(scored)))
        for column in range(len(matrix[0])):
            best = max(remaining, key=lambda i: matrix[i][column])
            if len(scored[best]) <= column:  # it ended, and nothing longer is likelier
                remaining = [best]
            else:
                token = scored[best][column][1]
                remaining = [i for i in remaining if _token_at(scored[i], column) == token]
            if len(remaining) == 1:
                break
        return self._decide(remaining[0], figures, greedy_logprob_matrix=matrix)


def _token_at(tokens: ScoredTokens, column: int) -> Any:
    return tokens[column][1] if column < len(tokens) else None


def _extended(scored: list[ScoredTokens]) -> list[list[float]]:
    """Log probabilities as a rectangle; rows that end early go on with their mean."""
    width = max(len(tokens) for tokens in scored)
    rows = []
    for tokens in scored:
        row = [0.0 if token[0] is None else float(token[0]) for token in tokens]
        rows.append(row + [mean_logprob(tokens)] * (width - len(row)))
    return rows


class UnconditionalLikelihoodNormalized(_Rule):
    """The highest mean difference between a choice's scores with and without the prompt.

    A choice's first token has no score without a prompt; it counts as 0 there.
    """

    requires_unconditional_logprobs = True

    def __call__(self, **figures: Any) -> ChoicesDecision:
        """See `ChoicesMethod`."""
        unconditional = figures.get("unconditional_token_logprobs")
        if unconditional is None:
            raise ValueError("this rule needs the unconditional log probabilities")
        gains = [
            _mean_gain(own, alone)
            for own, alone in zip(figures["input_token_logprobs"], unconditional, strict=True)
        ]
        return self._decide(_best(gains), figures, normalized_unconditional_prompt_logprobs=gains)


def _mean_gain(own: ScoredTokens, alone: ScoredTokens) -> float:
    if len(own) != len(alone):
        raise ValueError(f"{len(own)} scores with the prompt, {len(alone)} without")
    gains = [(a[0] or 0.0) - (b[0] or 0.0) for a, b in zip(own, alone, strict=True)]
    return sum(gains) / len(gains) if gains else 0.0


class Constrained(_Rule):
    """Decode once, greedily, over the choices alone; cheap for many or long choices."""

    def __call__(self, **figures: Any) -> ChoicesDecision:
        """Never scored: backends recognise this method and generate instead."""
        raise TypeError("constrained selection generates; it does not score")


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
constrained = Constrained()
