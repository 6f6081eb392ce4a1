"""What crosses the seam between scheduler and worker: frozen, no tensors, no torch.

    scheduler --ScheduledBatch--> worker --StepResult--> engine loop

A row is a run of consecutive tokens of one request. Its page tables are views of the request's
own arrays, valid until the step returns. Snapshot groups (tails, recurrent state) put their
working block at index 0 of their page table.

This module does not decide anything.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.scheduler.seen import SeenTokens

Int32 = NDArray[np.int32]


class RowKind(enum.Enum):
    """Why a row runs."""

    PREFILL = "prefill"  # prompt tokens, all groups written
    DECODE = "decode"  # one generated token, all groups written
    REPLAY = "replay"  # tokens whose history is cached; only some groups written


@dataclass(frozen=True)
class BlockCopy:
    """Copy block `src` to `dst` within one group's device pool (copy on write, snapshots)."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True)
class SampleSpec:
    """Choose a next token from the row's last logits.

    `output_ids` are the tokens generated so far and `prompt_ids` the prompt (penalties);
    `draw_index` counts the draws of this request so far: with the seed it decides the random
    number, so that a seeded request repeats whatever else is in its batch.
    """

    params: SamplingParams
    seed: int
    draw_index: int
    prompt_ids: Int32
    output_ids: Sequence[int]
    seen: SeenTokens | None = None  # of both, where a penalty asks; None: found out anew
    forbidden_ids: tuple[int, ...] = ()  # EOS and stop ids while below min_new_tokens
    top_logprobs: int = 0
    return_logprob: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    grammar_key: str | None = None  # the request whose grammar state masks the logits
    max_forced: int = 0  # tokens that may be jumped over where the grammar leaves no choice


@dataclass(frozen=True)
class BatchRow:
    """One request's share of a step."""

    request_id: str
    kind: RowKind
    start: int  # position of the first token computed
    tokens: Int32  # [n] token ids at positions start .. start+n-1
    page_tables: tuple[Int32, ...]  # per group
    context_starts: tuple[int, ...]  # per group: first position this row may read
    write_groups: int  # bit g set: group g is written
    num_layers: int  # layers to run (less than all: partial rebuild)
    sample: SampleSpec | None = None
    # Positions (absolute) whose next-token logprobs are wanted: [from, start+n); -1 for none.
    prompt_logprobs_from: int = -1
    prompt_top_logprobs: int = 0
    prompt_logprob_token_ids: tuple[int, ...] = ()
    next_token: int = -1  # prompt token after the row (for the last prompt logprob); -1 unknown

    @property
    def end(self) -> int:
        """Context length after this row: start + number of tokens."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's work. `deterministic` asks for results that do not depend on other rows."""

    step_id: int
    rows: tuple[BatchRow, ...]
    copies_before: tuple[BlockCopy, ...] = ()
    copies_after: tuple[BlockCopy, ...] = ()
    deterministic: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token; `top` and `chosen` are (logprob, token id) pairs."""

    logprob: float
    token_id: int
    top: tuple[tuple[float, int], ...] = ()
    chosen: tuple[tuple[float, int], ...] = ()  # of the token ids that the client named


@dataclass(frozen=True)
class RowResult:
    """What a row produced: a token where it sampled, logprobs where asked.

    `prompt_logprobs[i]` is of the token at position prompt_logprobs_from + 1 + i, given all
    before it; shorter by one where `next_token` was unknown.
    """

    request_id: str
    token_id: int = -1  # -1: the row did not sample
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""  # a row-level failure (NaN logits, say): the request ends with it
    is_invalid: bool = False  # the failure is of the request's own making: its grammar, its bias
    forced_ids: tuple[int, ...] = ()  # tokens that must follow `token_id`, by its grammar


@dataclass(frozen=True)
class StepResult:
    """All rows' results, in the batch's order; every write of the step has completed."""

    step_id: int
    rows: tuple[RowResult, ...]


class Worker(Protocol):
    """Runs forward passes over the device pools. The simulation has its own."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step; returns when all its writes are complete."""
        ...

    def checksums(self, group: int, blocks: Int32) -> NDArray[np.uint64]:
        """[num_blocks, num_layers_of_group] digests of the blocks' bytes (audit)."""
        ...

    def release(self, request_id: str) -> None:
        """Forget per-request state (grammar); called once per finished request."""
        ...

    def update_weights(self, model_path: str) -> CacheSchema:
        """Compute with other weights of the same architecture from the next step on.

        Returns the schema that names them. Raises OperatingError where they cannot be loaded or
        do not fit the pools; nothing has changed then.
        """
        ...
