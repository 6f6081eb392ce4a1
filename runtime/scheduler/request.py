"""One request inside the scheduler process: its tokens, status and progress.

    positions   0 ........ num_computed ........ num_tokens ........ capacity
                |  state in blocks  |  known, not computed  |  not chosen yet |

A request is *prefilling* while more than the newest token is uncomputed and *decoding* after.
Preemption forgets state, never tokens: the request goes back to the queue with its output and
computes it again as if it had been part of the prompt.

This module does not decide who runs.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from statewise.radix.plan import Replay
from statewise.runtime.cache.sequence import Sequence
from statewise.runtime.messages import (
    CacheReport,
    FinishReason,
    LogprobEntry,
    TokenizedRequest,
    Usage,
    unpack_ids,
)
from statewise.runtime.scheduler.seen import SeenTokens

if TYPE_CHECKING:
    from statewise.radix.segment import Tier
    from statewise.runtime.cache.lookup import Lookup
    from statewise.runtime.cache.meeting import Meeting
    from statewise.runtime.cache.probe import Probe
    from statewise.runtime.cache.promotion import Promotion
    from statewise.runtime.scheduler.admission import Blocked

Int32 = NDArray[np.int32]


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    COMPILING = "compiling"  # its grammar is not ready
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Every legal change of status; anything else is a programmer error. Printed in docs/scheduler.md.
TRANSITIONS: frozenset[tuple[RequestStatus, RequestStatus]] = frozenset(
    {
        (RequestStatus.COMPILING, RequestStatus.WAITING),
        (RequestStatus.COMPILING, RequestStatus.FINISHED),
        (RequestStatus.WAITING, RequestStatus.RUNNING),
        (RequestStatus.WAITING, RequestStatus.FINISHED),
        (RequestStatus.RUNNING, RequestStatus.WAITING),  # preempted
        (RequestStatus.RUNNING, RequestStatus.FINISHED),
    }
)


class Request:
    """Mutable; owned by the scheduler."""

    def __init__(
        self,
        message: TokenizedRequest,
        *,
        max_new_tokens: int,
        seed: int,
        arrival: float,
        send_interval: int = 1,
    ) -> None:
        prompt = unpack_ids(message.input_ids)
        self.message = message
        self.rid = message.rid
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.arrival = arrival  # monotonic seconds
        self.admitted_at = -1.0
        self.first_token_at = -1.0
        self.status = RequestStatus.WAITING
        self.tokens: Int32 = np.empty(self.prompt_len + max_new_tokens, dtype=np.int32)
        self.tokens[: self.prompt_len] = prompt
        self.num_tokens = self.prompt_len  # known tokens: prompt and output
        self.num_computed = 0  # tokens whose state is in blocks
        self.output_ids: list[int] = []
        self._seen: SeenTokens | None = None
        self.replays: list[Replay] = []  # run before anything else, in order
        self.replay_at = 0  # next position of the first replay
        self.direct_only = False  # a recovery did not get its blocks: no replays any more
        self.starts_cold = False  # what it reused held the blocks that it lacked: no reuse
        self.sequence: Sequence | None = None
        self.prefill_target = self.prompt_len  # known length at admission
        self.num_retractions = 0
        self.report: CacheReport | None = None
        self.logprobs: list[LogprobEntry] = []  # not sent yet
        self.prompt_logprobs: list[LogprobEntry] = []
        self.prompt_logprobs_done = not (message.logprob.enabled and message.logprob.start >= 0)
        self.lookup: Lookup | None = None  # memo, valid for one tree version
        self.looked_at = 0  # step of that lookup
        self.blocked: Blocked | None = None  # by which blocks it was kept waiting last
        self.promotion: Promotion | None = None  # loads under way, or done and kept for it
        self.meeting: Meeting | None = None  # loads from its end while it computes
        self.began_at = self.num_apart = 0  # where it began to compute; tokens until it met a load
        self.num_loads = 0  # promotions and meetings so far
        self.loaded: dict[int, Tier] = {}  # pages that were copied back for it
        self.load_faults: list[str] = []  # what did not come back, in sentences
        # Its state was fetched ahead; a remote store was asked, or need not be; its report counted.
        self.is_prefetched = self.has_asked = self.is_counted = False
        self.probe: Probe | None = None  # what it is being asked
        self.checkpoints: set[int] = set()  # positions at which trailing state is kept
        self.blocked_reason = ""
        self.delayed_by = ""  # its first word, while it waits
        self.send_interval = send_interval  # output tokens between two deltas
        self.num_sent = 0  # output tokens already sent
        self.announced = False  # a delta has been sent
        self.last_token_at = -1.0

    def seen_tokens(self) -> SeenTokens:
        """The tokens it has seen, for penalties; one object, made when first asked for."""
        if self._seen is None:
            self._seen = SeenTokens(self.tokens[: self.prompt_len])
        return self._seen

    def become(self, status: RequestStatus) -> None:
        """Change status along `TRANSITIONS`."""
        assert (self.status, status) in TRANSITIONS, f"{self.rid}: {self.status} -> {status}"
        self.status = status

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without state."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only the newest generated token is uncomputed."""
        return bool(self.output_ids) and self.num_uncomputed == 1 and not self.replays

    @property
    def reuse_limit(self) -> int:
        """Deepest position at which cached state may be used: some logits are always needed."""
        if self.starts_cold:
            return 0
        limit = self.num_tokens - 1
        if not self.prompt_logprobs_done:
            limit = min(limit, self.message.logprob.start)
        return max(limit, 0)

    @property
    def expected_output_len(self) -> int:
        """Output tokens that may still come."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def is_due(self) -> bool:
        """Whether a delta should go out now: the first token at once, then every interval's."""
        num_new = len(self.output_ids) - self.num_sent
        has_prompt_logprobs = self.prompt_logprobs_done and bool(self.prompt_logprobs)
        return has_prompt_logprobs or num_new >= (self.send_interval if self.announced else 1)

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.output_ids.append(token_id)

    def finish_reason_after(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """Why the request ends with `token_id` as its newest output token, or None."""
        params = self.message.sampling
        if len(self.output_ids) >= params.min_new_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason("stop", token_id)
            if not params.ignore_eos and token_id in eos_ids:
                return FinishReason("stop", token_id)
        if len(self.output_ids) >= self.max_new_tokens:
            return FinishReason("length")
        return None

    def usage(self, weight_version: str) -> Usage:
        """Counts for the client."""
        started = self.admitted_at if self.admitted_at >= 0 else self.arrival
        first = self.first_token_at if self.first_token_at >= 0 else started
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.output_ids),
            cached_tokens=self.report.reused + self.report.loaded if self.report else 0,
            num_retractions=self.num_retractions,
            queue_s=started - self.arrival,
            prefill_s=first - started,
            weight_version=weight_version,
        )
