"""From a request and a span to a batch row: what to sample, which logprobs to return.

This module decides nothing: it spells out one request's share of a step.
"""

from __future__ import annotations

import numpy as np

from statewise.runtime.scheduler.batch import BatchRow, RowKind, SampleSpec
from statewise.runtime.scheduler.request import Request
from statewise.runtime.scheduler.spans import Span


def sample_spec(request: Request, eos_ids: frozenset[int]) -> SampleSpec:
    """How the request's next token is chosen."""
    params = request.message.sampling
    logprob = request.message.logprob
    forbidden: tuple[int, ...] = ()
    if len(request.output_ids) < params.min_new_tokens:
        forbidden = tuple(sorted(eos_ids | set(params.stop_token_ids)))
    return SampleSpec(
        params=params,
        seed=request.seed,
        draw_index=len(request.output_ids),
        prompt_ids=request.tokens[: request.prompt_len],
        output_ids=request.output_ids,
        seen=request.seen_tokens() if params.repetition_penalty != 1.0 else None,
        forbidden_ids=forbidden,
        top_logprobs=logprob.top if logprob.enabled else 0,
        return_logprob=logprob.enabled,
        logprob_token_ids=logprob.token_ids if logprob.enabled else (),
        grammar_key=request.rid if params.grammar is not None else None,
        # The token itself takes one place; a jumped token would have no log probability.
        max_forced=0 if logprob.enabled else request.expected_output_len - 1,
    )


def build_row(request: Request, span: Span, eos_ids: frozenset[int]) -> BatchRow:
    """The row that computes `span` of `request`."""
    assert request.sequence is not None
    is_last = not span.is_replay and span.end == request.num_tokens
    wants_token = is_last and len(request.output_ids) < request.max_new_tokens
    kind = RowKind.DECODE if request.is_decoding else RowKind.PREFILL
    if span.is_replay:
        kind = RowKind.REPLAY
    logprob = request.message.logprob
    logprobs_from = -1
    if not request.prompt_logprobs_done and not span.is_replay and span.end > logprob.start:
        logprobs_from = max(logprob.start, span.start)
    next_token = int(request.tokens[span.end]) if span.end < request.prompt_len else -1
    return BatchRow(
        request_id=request.rid,
        kind=kind,
        start=span.start,
        tokens=np.asarray(request.tokens[span.start : span.end]),
        page_tables=request.sequence.views(),
        context_starts=tuple(request.sequence.context_starts),
        write_groups=span.write_groups,
        num_layers=span.num_layers,
        sample=sample_spec(request, eos_ids) if wants_token else None,
        prompt_logprobs_from=logprobs_from,
        prompt_top_logprobs=logprob.top,
        prompt_logprob_token_ids=logprob.token_ids,
        next_token=next_token,
    )
