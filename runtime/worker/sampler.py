"""The next token of each row: greedy or drawn, under penalties, bias, masks and filters.

Order of operations on a row of logits, each step only where asked for:

    1  repetition penalty      tokens of prompt and output: positive logits / r, negative * r
    2  frequency, presence     tokens of the output: - f * count - p
    3  logit bias              + b
    4  forbidden ids           -inf (EOS and stop ids while below min_new_tokens)
    5  grammar mask            -inf outside (wins over 4 where nothing would be left)
    6  greedy: the largest     else: / temperature, softmax, filters, draw

Filters act jointly on the temperature-scaled distribution, as SGLang's do: a token survives if it
is among the `top_k` most likely, if the tokens before it hold at most `top_p` of the mass, and if
it has at least `min_p` of the most likely token's probability. The survivors are renormalised.

A row is computed from its own logits alone, so the rest of the batch cannot change its token.
Rows that are greedy and unmodified take the first largest. Log probabilities are of the raw logits
(see logprobs.py). NaN or infinite logits end their row with an error and touch no other.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statewise.runtime.errors import OperatingError
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.batch import SampleSpec, TokenLogprob
from statewise.runtime.worker.logprobs import token_logprob
from statewise.runtime.worker.random import uniform

DRAW_BLOCK = 512  # weights summed at once where a running sum of all would be slow
FLOOR_STEP = 0.03  # each floor of the search for candidates, relative to the one before
FLOOR_END = 1e-9  # of the largest probability: then all tokens are candidates
ALMOST_ONE = 1.0 - 2.0**-53

# For a spec with a grammar: [V] bool of the tokens its grammar allows next.
MaskOf = Callable[[SampleSpec], Tensor]


@dataclass(frozen=True)
class Sampled:
    """One row's outcome: a token, or the reason there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str = ""
    is_invalid: bool = False  # the error is of the request's own making


def is_plain(spec: SampleSpec) -> bool:
    """Whether the row's token is just its largest logit."""
    p = spec.params
    return p.is_greedy and not (
        spec.grammar_key or spec.forbidden_ids or p.logit_bias or _has_penalties(p)
    )


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _penalize(row: Tensor, spec: SampleSpec) -> None:
    """Apply repetition, frequency and presence penalties to `row` in place."""
    params = spec.params
    output = np.asarray(spec.output_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        if spec.seen is not None:
            seen = torch.from_numpy(spec.seen.ids(spec.output_ids))
        else:
            seen = torch.from_numpy(np.unique(np.concatenate([spec.prompt_ids, output])))
            seen = seen.to(torch.int64)
        values, r = row[seen], params.repetition_penalty
        row[seen] = torch.where(values > 0, values / r, values * r)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(output, return_counts=True)
        amount = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(ids)] -= torch.from_numpy(amount).to(row.dtype)


def adjusted(row: Tensor, spec: SampleSpec, mask_of: MaskOf) -> Tensor:
    """Apply steps 1 to 5 to a copy of one row of logits [V]."""
    out = row.clone()
    if _has_penalties(spec.params):
        _penalize(out, spec)
    for token_id, bias in spec.params.logit_bias:
        out[token_id] += bias
    allowed = out
    if spec.forbidden_ids:
        allowed = out.clone()
        allowed[list(spec.forbidden_ids)] = -math.inf
    if spec.grammar_key is not None:
        outside = ~mask_of(spec)
        allowed = allowed.masked_fill(outside, -math.inf)
        if spec.forbidden_ids and not bool(torch.isfinite(allowed).any()):
            allowed = out.masked_fill(outside, -math.inf)
    return allowed


def _candidates(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(probabilities, ids) in descending order of all tokens that a filter might keep.

    Sorting a vocabulary is slow and rarely needed: once the tokens above a floor hold more than
    top_p together, no token below it is among the first top_p of the mass.
    """
    if params.top_k > 0:
        best = torch.topk(probs, min(params.top_k, probs.shape[0]))
        return best.values, best.indices
    largest = float(probs.amax())
    least = params.min_p * largest
    floor = max(least, FLOOR_STEP * largest)
    while True:
        ids = (probs >= floor).nonzero().flatten()
        values = probs[ids]
        if floor <= least or float(values.sum(dtype=torch.float64)) > params.top_p:
            break
        floor = max(least, FLOOR_STEP * floor) if floor > FLOOR_END * largest else least
    values, order = torch.sort(values, descending=True, stable=True)
    return values, ids[order]


def _survivors(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(probabilities, ids) of the tokens that all filters keep; the most likely always is."""
    values, ids = _candidates(probs, params)
    keep = values >= params.min_p * values[0]
    if params.top_p < 1.0:
        keep &= torch.cumsum(values, 0, dtype=torch.float64) - values <= params.top_p
    keep[0] = True
    return values[keep], ids[keep]


def _pick(weights: Tensor, u: float) -> int:
    """Index drawn in proportion to `weights` by inverting their running sum at `u` in [0, 1)."""
    total = torch.cumsum(weights, 0, dtype=torch.float64)
    index = int(torch.searchsorted(total, total[-1] * u, right=True))
    return min(index, int(torch.searchsorted(total, total[-1])))


def _draw(weights: Tensor, u: float) -> int:
    """Do as `_pick`, in two levels where `weights` is long: first a block, then within it."""
    num_blocks = weights.shape[0] // DRAW_BLOCK
    if num_blocks < 2:
        return _pick(weights, u)
    body = weights[: num_blocks * DRAW_BLOCK].view(num_blocks, DRAW_BLOCK).sum(1)
    tail = weights[num_blocks * DRAW_BLOCK :].sum().unsqueeze(0)
    sums = torch.cat([body, tail]).double()
    block = _pick(sums, u)
    before, here = float(sums[:block].sum()), float(sums[block])
    rest = (u * float(sums.sum()) - before) / here
    first = block * DRAW_BLOCK
    return first + _pick(weights[first : first + DRAW_BLOCK], min(max(rest, 0.0), ALMOST_ONE))


def choose(row: Tensor, params: SamplingParams, u: float) -> int:
    """Step 6: a token from adjusted logits `row` [V], given the uniform number `u`."""
    if params.is_greedy:
        return int(torch.argmax(row))
    probs = torch.softmax(row if params.temperature == 1.0 else row / params.temperature, dim=0)
    if params.top_k < 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(probs, u)
    weights, ids = _survivors(probs, params)
    return int(ids[_draw(weights, u)])


def _sample_row(row: Tensor, spec: SampleSpec, mask_of: MaskOf) -> tuple[int, str]:
    if is_plain(spec):
        return int(torch.argmax(row)), ""
    try:
        logits = adjusted(row, spec, mask_of)
    except OperatingError as error:
        return -1, str(error)
    if not bool(torch.isfinite(logits.max())):
        return -1, "no token is allowed here: grammar, bias and forbidden ids exclude all"
    return choose(logits, spec.params, uniform(spec.seed, spec.draw_index)), ""


def _logprob(row: Tensor, spec: SampleSpec, token_id: int) -> TokenLogprob | None:
    if not spec.return_logprob:
        return None
    norm = float(torch.logsumexp(row, dim=0))
    return token_logprob(row, norm, token_id, top=spec.top_logprobs, chosen=spec.logprob_token_ids)


def _largest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Each row's first largest logit, and whether that is finite (NaN counts as largest).

    By numpy, on this thread: torch would wake threads of its own for it.
    """
    values = (logits if logits.device.type == "cpu" else logits.cpu()).numpy()
    ids = values.argmax(-1)
    return ids.tolist(), np.isfinite(values[np.arange(len(ids)), ids]).tolist()


def sample(logits: Tensor, specs: Sequence[SampleSpec], mask_of: MaskOf) -> list[Sampled]:
    """One outcome for each row of logits [N, V] float32; `logits` is not changed.

    `mask_of` may raise `OperatingError`: the row ends with its message.
    """
    greedy, finite = _largest(logits)
    out = []
    for i, spec in enumerate(specs):
        if not finite[i]:
            out.append(Sampled(error="the model's logits are not finite"))
            continue
        token, error = (greedy[i], "") if is_plain(spec) else _sample_row(logits[i], spec, mask_of)
        out.append(
            Sampled(error=error, is_invalid=True)
            if error
            else Sampled(token, _logprob(logits[i], spec, token))
        )
    return out
