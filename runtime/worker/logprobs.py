"""Log probabilities of tokens under the model's own distribution.

Always of the *raw* logits: before temperature, penalties, bias and masks, computed in float32.
So a token's value does not depend on how it was sampled, prompt and output values compare, and a
program may rank choices by them. (SGLang returns temperature-scaled values for sampled tokens by
default and these with SGLANG_RETURN_ORIGINAL_LOGPROB.)

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from statewise.runtime.scheduler.batch import TokenLogprob


def _pairs(logits: Tensor, norm: float, ids: Sequence[int]) -> tuple[tuple[float, int], ...]:
    return tuple((logit - norm, i) for logit, i in zip(logits.tolist(), ids, strict=True))


def token_logprob(
    row: Tensor, norm: float, token_id: int, *, top: int = 0, chosen: Sequence[int] = ()
) -> TokenLogprob:
    """Log probability of `token_id` under logits `row` [V] whose logsumexp is `norm`.

    `top` adds the most likely tokens in descending order; `chosen` the tokens asked for.
    """
    best: tuple[tuple[float, int], ...] = ()
    if top:
        values, ids = torch.topk(row, min(top, row.shape[0]))
        best = _pairs(values, norm, ids.tolist())
    named = _pairs(row[list(chosen)], norm, chosen) if chosen else ()
    return TokenLogprob(float(row[token_id]) - norm, token_id, best, named)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], *, top: int = 0, chosen: Sequence[int] = ()
) -> list[TokenLogprob]:
    """`token_logprob` of each row of logits [N, V]."""
    norms = torch.logsumexp(logits, dim=-1).tolist()
    return [
        token_logprob(logits[i], norms[i], token, top=top, chosen=chosen)
        for i, token in enumerate(token_ids)
    ]
