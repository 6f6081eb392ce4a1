"""Which tokens run in the next step.

    step(): 1. decode rows        one token for each decoding request, oldest first
            2. prefill rows       next chunk of running prefills, within the token budget
            3. admissions         waiting requests, while budget, places and blocks last

All three share one token budget, so a long prompt never stalls decoding. When blocks run out the
youngest running request is preempted: its state stays in the tree as cache, its tokens are kept,
and it queues again; the oldest running request is never preempted, so the whole always advances.

Deterministic mode cuts prompts at multiples of the chunk size only, reuses state only there and
publishes only whole aligned chunks: a hit then runs the very same kernel calls as a miss.

This module does not touch tensors, sockets or clocks.
"""

from __future__ import annotations

from statewise.radix import Prefill, StaleMatchError
from statewise.radix.lossy import is_lossy
from statewise.radix.schema import CacheSchema
from statewise.runtime.cache.lookup import Lookup
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.cache.report import told_as_lossy, told_as_met
from statewise.runtime.counters import Labelled
from statewise.runtime.errors import OutOfBlocksError
from statewise.runtime.scheduler.admission import Admission, Blocked
from statewise.runtime.scheduler.batch import BatchRow, RowKind, ScheduledBatch
from statewise.runtime.scheduler.inflight import InflightPrefixes
from statewise.runtime.scheduler.loading import Loading
from statewise.runtime.scheduler.policy import is_aged, order
from statewise.runtime.scheduler.request import Request, RequestStatus
from statewise.runtime.scheduler.rows import build_row
from statewise.runtime.scheduler.settings import SchedulerConfig
from statewise.runtime.scheduler.spans import Span

# Waiting requests tried past the first that does not fit (unless that one is aged).
MAX_BYPASS = 4
# Steps for which the order of waiting requests relies on what each was offered before.
LOOK_EVERY = 16


class Scheduler:
    """Owns the waiting and running requests of one engine."""

    def __init__(
        self, config: SchedulerConfig, schema: CacheSchema, cache: PrefixCache, admission: Admission
    ) -> None:
        self.config = config
        self.schema = schema
        self.cache = cache
        self.admission = admission
        self.loading = Loading(cache, self.granularity)
        self.waiting: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self.newly_admitted: list[Request] = []  # admitted by the last `schedule`
        self.admissions_delayed = Labelled(
            "Requests made to wait, by cause and, for blocks, by the short group.", "cause", "group"
        )
        self.events = cache.events
        self._all_groups = (1 << schema.num_groups) - 1
        self._step_id = 0
        self._turnover = 0  # requests that have begun or ceased to run

    @property
    def granularity(self) -> int:
        """Tokens whose multiples are the positions at which state is reused and kept."""
        return self.config.token_budget if self.config.deterministic else 1

    # ---------------------------------------------------------------- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request."""
        assert request.status is RequestStatus.WAITING
        self.waiting[request.rid] = request

    def remove(self, request: Request, *, keep_state: bool) -> None:
        """Take a request out for good and give its blocks back at once.

        `keep_state`: what it computed stays cached, its end a checkpoint.
        """
        self.waiting.pop(request.rid, None)
        if request in self.running:
            self.running.remove(request)
            self._turnover += 1
        self.loading.release(request)
        self.loading.give_up_meeting(request)
        if request.sequence is not None:
            self._end_sequence(request, keep_state=keep_state)

    def _end_sequence(self, request: Request, *, keep_state: bool) -> None:
        assert request.sequence is not None
        kept = request.num_computed if keep_state and not request.replays else 0
        self.cache.finish(
            request.sequence,
            request.tokens,
            kept,
            snapshot=kept % self.granularity == 0,
            resume_at=(request.prompt_len - 1) // self.granularity * self.granularity,
        )
        if request.report is not None:
            request.report = told_as_lossy(request.report, request.sequence.num_lossy)
        request.sequence = None

    def _preempt(self, victim: Request, *, keep_state: bool = True) -> None:
        self.loading.give_up_meeting(victim)
        self._requeue(victim, keep_state=keep_state)
        victim.num_retractions += 1
        self.num_preemptions += 1
        if keep_state:
            self.admission.reserve.preempted()

    def _requeue(self, request: Request, *, keep_state: bool) -> None:
        self._end_sequence(request, keep_state=keep_state)
        request.num_computed = 0
        request.lookup = None
        request.replays.clear()
        if not request.prompt_logprobs_done:
            request.prompt_logprobs.clear()
        request.become(RequestStatus.WAITING)
        self.running.remove(request)
        self._turnover += 1
        self.waiting[request.rid] = request

    def _meet(self) -> None:
        """Give back to the queue, to be looked up again, whoever has come to what was loaded."""
        for request in [r for r in self.running if r.meeting is not None and not r.replays]:
            assert request.sequence is not None
            position = request.sequence.num_published * self.schema.page_size
            if self.loading.meet(request, position):
                request.num_apart += max(position - request.began_at, 0)
                request.report = None  # which spoke of the plan without loads
                self._requeue(request, keep_state=False)

    def restart_running(self) -> int:
        """Preempt all running requests, forgetting what they computed; returns how many."""
        victims = list(self.running)
        for request in reversed(victims):
            self._preempt(request, keep_state=False)
        return len(victims)

    # ---------------------------------------------------------------- one step

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step's work, or None when nothing can run. Blocks are reserved for it."""
        self.newly_admitted = []
        rows: dict[str, BatchRow] = {}
        self._recall(rows)
        self._meet()
        budget = self.config.token_budget
        preempted = self.num_preemptions
        decodes = self._add_decodes(rows)
        budget -= 0 if self.config.deterministic else decodes  # an aligned chunk needs it whole
        budget -= self._add_prefills(rows, budget)
        if self.running and not rows and not self.loading.holds_blocks:
            self._unstick(self.running[0])
        if self.num_preemptions == preempted and self._may_admit(budget):
            self._add_admissions(rows, budget, now)
            self.admission.reserve.step()
        self.loading.prefetch(self.waiting, self._glance)
        self._recall(rows)  # an admission may have found what others rely on to be damaged
        if not rows:
            return None
        self._step_id += 1
        before, after = self.cache.take_copies()
        return ScheduledBatch(
            self._step_id,
            tuple(rows.values()),
            copies_before=before,
            copies_after=after,
            deterministic=self.config.deterministic,
        )

    def _recall(self, rows: dict[str, BatchRow]) -> None:
        """Send back to the queue whoever relies on state that has failed since it began."""
        while concerned := [r for r in self.running if self._is_recalled(r)]:
            for request in concerned:
                assert request.sequence is not None
                rows.pop(request.rid, None)
                self.cache.disown(request.sequence, request.tokens)
                self._preempt(request, keep_state=False)

    def _is_recalled(self, request: Request) -> bool:
        return request.sequence is not None and self.cache.is_recalled(request.sequence)

    def _may_admit(self, budget: int) -> bool:
        if self.config.deterministic and budget < self.config.token_budget:
            return False
        return bool(self.waiting) and budget > 0 and len(self.running) < self.config.max_running

    def _add_decodes(self, rows: dict[str, BatchRow]) -> int:
        used = 0
        for request in [r for r in self.running if r.is_decoding]:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one just now
            span = self._next_span(request, 1)
            if self._reserve(request, span, rows):
                self._take(request, span, rows)
                used += 1
        return used

    def _add_prefills(self, rows: dict[str, BatchRow], budget: int) -> int:
        used = 0
        for request in [r for r in self.running if not r.is_decoding]:
            if request.status is not RequestStatus.RUNNING or used >= budget:
                continue
            used += self._add_chunk(request, rows, budget - used)
        return used

    def _add_chunk(self, request: Request, rows: dict[str, BatchRow], budget: int) -> int:
        """Add the request's next chunk, smaller where blocks are short; returns its tokens."""
        limit = budget
        while limit > 0:
            span = self._next_span(request, limit)
            size = span.end - span.start
            if size == 0:
                return 0
            last_try = size <= self.schema.page_size or self.config.deterministic
            if self._reserve(request, span, rows, may_preempt=last_try):
                self._take(request, span, rows)
                return size
            if last_try or request.status is not RequestStatus.RUNNING:
                break
            limit = size // 2
        is_first = bool(self.running) and request is self.running[0]
        if request.replays and is_first and not self.loading.holds_blocks:
            self._ask_less(request)  # its repair does not fit beside its history
            request.report = None  # which spoke of the repair
            self._preempt(request)
        return 0

    def _unstick(self, request: Request) -> None:
        """Begin the oldest request anew where nobody could go on: its lease holds what it lacks."""
        self._ask_less(request)
        self._preempt(request)

    @staticmethod
    def _ask_less(request: Request) -> None:
        """Let the request rely on less of the cache when it begins next: a cold one always fits."""
        request.starts_cold = request.direct_only
        request.direct_only = True
        request.lookup = None

    def _take(self, request: Request, span: Span, rows: dict[str, BatchRow]) -> None:
        """Put the span into this step; its blocks are reserved."""
        assert request.sequence is not None
        if not span.is_replay and span.end in request.checkpoints:
            self.cache.prepare_checkpoint(request.sequence, span.end)
        rows[request.rid] = build_row(request, span, self.config.eos_ids)

    def _stop_at(self, request: Request, position: int, rows: dict[str, BatchRow]) -> None:
        """End the request's row of this step at a checkpoint that was asked for after it was cut.

        Snapshots exist only where a row ends; windows can be kept anywhere below.
        """
        row = rows.get(request.rid)
        if row is None or row.kind is RowKind.REPLAY or not row.start < position < row.end:
            return
        if self.cache.has_snapshots:
            assert request.sequence is not None
            self.cache.forgo_checkpoint(request.sequence, row.end)
            self._take(request, Span(row.start, position, row.write_groups, row.num_layers), rows)

    def _next_span(self, request: Request, limit: int) -> Span:
        """The request's next run of tokens, at most `limit` long; empty if it cannot be cut so."""
        if request.replays:
            replay = request.replays[0]
            start = request.replay_at
            end = min(replay.end, start + limit)
            if self.config.deterministic:
                end = self._aligned_end(replay.end, start, limit)
            return Span(start, end, replay.write_groups, replay.num_layers, is_replay=True)
        start = request.num_computed
        end = min(start + limit, request.num_tokens)
        if self.config.deterministic:
            # Generated tokens are always computed one by one.
            in_prompt = start < request.prompt_len
            end = self._aligned_end(request.prompt_len, start, limit) if in_prompt else start + 1
        stops = [c for c in request.checkpoints if start < c < end]
        if stops and self.cache.has_snapshots:
            end = min(stops)
        if start < (met := self.loading.meeting_point(request)) < end and self.granularity == 1:
            end = met
        return Span(start, end, self._all_groups, self.config.num_layers)

    def _aligned_end(self, stop: int, start: int, limit: int) -> int:
        """End of the whole chunk that `start` lies in, or `stop`; `start` where it must wait."""
        chunk = self.config.token_budget
        end = min((start // chunk + 1) * chunk, stop)
        return end if end - start <= limit else start

    def _reserve(
        self,
        request: Request,
        span: Span,
        rows: dict[str, BatchRow],
        *,
        may_preempt: bool = True,
    ) -> bool:
        """Blocks for `span`, preempting younger requests without a row if needed."""
        assert request.sequence is not None
        has_yielded = False
        while True:
            try:
                if span.is_replay:
                    replay = request.replays[0]
                    self.cache.reserve_replay(request.sequence, replay, span.start, span.end)
                else:
                    self.cache.reserve(request.sequence, span.end)
                return True
            except StaleMatchError:
                self._preempt(request)
                return False
            except OutOfBlocksError:
                if self.loading.is_on and not has_yielded:
                    self.loading.yield_to_running()
                    has_yielded = True
                    continue
                if self.loading.holds_blocks:
                    return False
                victim = self._victim(request, rows) if may_preempt else None
                if victim is None:
                    return False
                self._preempt(victim)

    def _victim(self, request: Request, rows: dict[str, BatchRow]) -> Request | None:
        """The youngest running request without a row, not older than `request`."""
        for candidate in reversed(self.running):
            if candidate is request:
                break
            if candidate.rid not in rows:
                return candidate
        return None  # older ones finish or preempt this one; it waits a step

    # ---------------------------------------------------------------- admission

    def _add_admissions(self, rows: dict[str, BatchRow], budget: int, now: float) -> None:
        sharing = [r for r in self.running if r.sequence is None or not r.sequence.is_private]
        apart = is_lossy(self.schema)
        inflight = InflightPrefixes(self.schema.page_size, sharing, exact_apart=apart)
        queue = order(
            self.waiting.values(),
            self.config.policy,
            now,
            self.config.max_wait_s,
            self._known_position,
        )
        bypassed = 0
        for request in queue:
            if not self._may_admit(budget):
                return
            used = self._try_admit(request, rows, budget, inflight)
            budget -= used
            if used == 0 and request.delayed_by == "blocks":
                bypassed += 1
                if bypassed > MAX_BYPASS or is_aged(request, now, self.config.max_wait_s):
                    return

    def _known_position(self, request: Request) -> int:
        """Where the request would begin: it only decides the order."""
        return self._glance(request).promised_position

    def _glance(self, request: Request) -> Lookup:
        """What was offered lately, looked up once in a while: not to be used as it is."""
        known = request.lookup
        is_old = self._step_id - request.looked_at >= LOOK_EVERY
        if known is None or (is_old and not self._is_still_blocked(request)):
            known = self._lookup(request)
        return known

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether nothing has changed that could let a request run which lacked blocks.

        Then it need not be looked up, planned and leased again, however much the tree has changed.
        """
        return self.admission.is_still_short(
            request, self.running, self.cache.available(), self._circumstances
        )

    @property
    def _circumstances(self) -> object:
        return self._turnover, self.loading.progress

    def _lookup(self, request: Request, *, at_use: bool = False) -> Lookup:
        """What the tree offers the request now; repeated only when the tree has changed.

        `at_use`: checksums count as well, where they are kept.
        """
        known = request.lookup
        is_current = known is not None and known.tree_version == self.cache.version
        if known is None or not is_current or (at_use and self.cache.audits):
            request.looked_at = self._step_id
            known = request.lookup = self.cache.lookup(
                request.message.cache,
                request.tokens[: request.num_tokens],
                request.reuse_limit,
                self.granularity,
                direct_only=request.direct_only,
                audit=at_use,
            )
        return known

    def _try_admit(
        self,
        request: Request,
        rows: dict[str, BatchRow],
        budget: int,
        inflight: InflightPrefixes,
    ) -> int:
        """Admit `request` with its first chunk; returns its tokens, 0 if it waits on."""
        if self._is_known_to_wait(request, rows, inflight):
            return 0
        request.blocked = None
        if not self._is_due(request, rows, inflight) or not self._begin(request):
            return 0
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        del self.waiting[request.rid]
        used = self._add_chunk(request, rows, budget)
        if request.status is not RequestStatus.RUNNING:
            return 0  # what it was to start from has just gone
        if used == 0:
            self.running.remove(request)
            request.become(RequestStatus.WAITING)
            self.waiting[request.rid] = request
            self._give_up(request)
            request.blocked = Blocked(self.cache.available(), self._circumstances)
            self._lacks_blocks(request, "no room for its next chunk")
            return 0
        self._turnover += 1
        request.blocked_reason = request.delayed_by = ""
        request.prefill_target = request.num_tokens
        self.loading.admitted(request)
        if request.report is None:
            assert request.lookup is not None
            report = request.lookup.report(request.loaded, request.load_faults)
            request.report = told_as_met(report, request.num_apart)
        self.newly_admitted.append(request)
        inflight.add(request)
        return used

    def _is_known_to_wait(
        self, request: Request, rows: dict[str, BatchRow], inflight: InflightPrefixes
    ) -> bool:
        """Whether what it waits for is still to come, by what it was offered last.

        Another request that is computing its prefix has not come to the end of what they share; or
        blocks are as short as they were.
        """
        known = request.lookup
        if known is None:
            return False
        if request.delayed_by == "prefix" and request.promotion is None:
            return self._waits_for_prefix(request, known, rows, inflight)
        if self._provider(request, known, inflight) is not None:
            return False
        return request.delayed_by == "blocks" and self._is_still_blocked(request)

    def _is_due(
        self, request: Request, rows: dict[str, BatchRow], inflight: InflightPrefixes
    ) -> bool:
        """Whether nobody is about to bring more of its prefix: another request, or a load."""
        lookup = self._lookup(request)
        if self._waits_for_prefix(request, lookup, rows, inflight):
            return False
        reason = self.loading.must_wait(request, lookup, is_alone=not self.running)
        if reason is not None:
            self._delay(request, *reason)
        return reason is None

    def _begin(self, request: Request) -> bool:
        """Lease what it reuses, and count its blocks; False, and nothing is held, if it waits."""
        lookup = self._lookup(request, at_use=True)
        before = self.cache.available()
        try:
            request.sequence = self.cache.begin(lookup, len(request.tokens))
        except OutOfBlocksError as error:
            request.blocked = Blocked(before, self._circumstances)
            self._lacks_blocks(request, str(error), error.group)
            return False
        except StaleMatchError:
            request.lookup = None
            self._delay(request, "cache", "what it would have reused has just been evicted")
            return False
        request.replays = list(lookup.plan.replays)
        if request.replays:
            request.replay_at = request.replays[0].start
            self.cache.enter_replay(request.sequence, request.replays[0])
        after = self.cache.available()
        shortage = self.admission.shortage(request, self.running, after)
        if shortage is not None:
            request.blocked = self.admission.blocked(
                request, shortage, (before, after), self._circumstances
            )
            self._give_up(request)
            spare = f"{shortage.available} to spare, {shortage.needed} needed"
            why = f"group {shortage.group!r} has {spare}"
            self._lacks_blocks(request, why, shortage.group)
            return False
        request.num_computed = request.began_at = lookup.position
        self._mark_checkpoints(request, lookup.branch_position)
        return True

    def _provider(
        self, request: Request, lookup: Lookup, inflight: InflightPrefixes
    ) -> tuple[Request, int] | None:
        """Who is computing more of the prompt than was found, and up to where."""
        shares = self.cache.enabled and not self.config.deterministic
        return inflight.provider_of(request, lookup.promised_position) if shares else None

    def _waits_for_prefix(
        self,
        request: Request,
        lookup: Lookup,
        rows: dict[str, BatchRow],
        inflight: InflightPrefixes,
    ) -> bool:
        """Whether a running prefill will publish more of the prompt than the tree has now."""
        provider = self._provider(request, lookup, inflight)
        if provider is None:
            return False
        other, shared = provider
        other.checkpoints.add(shared)  # keep the trailing state where this one will resume
        self._stop_at(other, shared, rows)
        self._delay(request, "prefix", f"{other.rid} is computing it")
        return True

    def _give_up(self, request: Request) -> None:
        assert request.sequence is not None
        self.cache.cancel(request.sequence)
        request.sequence = None
        request.replays = []
        request.num_computed = 0

    def _lacks_blocks(self, request: Request, why: str, group: str = "") -> None:
        """Let the request wait; where nothing runs that could give blocks, it asks for less.

        Before that, copies and loads must give theirs.
        """
        self._delay(request, "blocks", why, group)
        if self.running or self.loading.yield_to_running() or self.loading.holds_blocks:
            return
        self._ask_less(request)

    def _delay(self, request: Request, cause: str, why: str, group: str = "") -> None:
        """Take note why a request waits; counted when the cause is another than before."""
        request.blocked_reason = f"{cause}: {why}"
        if request.delayed_by != cause:
            request.delayed_by = cause
            self.admissions_delayed.add(cause, group)
            self.events.emit("admission_delayed", rid=request.rid, cause=cause, group=group)

    def _mark_checkpoints(self, request: Request, branch_position: int) -> None:
        """Positions at which the trailing state will be kept once computed."""
        page = self.schema.page_size
        marks: tuple[int, ...] = ()
        if request.message.cache.checkpoint or self.cache.has_snapshots:
            last = request.prompt_len - (0 if request.message.cache.checkpoint else 1)
            marks = (last - last % page,)
        prefill = Prefill(request.num_computed, request.num_tokens, branch_position, marks)
        wanted = self.config.checkpoints.positions(prefill)
        request.checkpoints.update(p - p % page for p in wanted)
        unit = self.granularity  # chunks stay whole
        if self.config.deterministic:  # the last position that is published: its window moves on
            request.checkpoints.add(request.prompt_len - request.prompt_len % unit)
        request.checkpoints = {
            c for c in request.checkpoints if c > request.num_computed and c % unit == 0
        }

    # ---------------------------------------------------------------- after a step

    def advance(self, request: Request, row: BatchRow) -> None:
        """The worker has completed `row`: its writes may be published."""
        assert request.sequence is not None
        if row.kind is RowKind.REPLAY:
            self._advance_replay(request, row)
            return
        request.num_computed = row.end
        publishable = row.end
        if self.config.deterministic:
            chunk = self.config.token_budget
            publishable = min(row.end, request.prompt_len // chunk * chunk)
        passed = sorted(c for c in request.checkpoints if c <= row.end)
        self.cache.commit(
            request.sequence, request.tokens, row.end, publishable, checkpoints=passed
        )
        request.checkpoints.difference_update(passed)

    def _advance_replay(self, request: Request, row: BatchRow) -> None:
        assert request.sequence is not None
        replay = request.replays[0]
        request.replay_at = row.end
        after = request.replays[1] if len(request.replays) > 1 else None
        self.cache.replayed(request.sequence, request.tokens, replay, row.end, after)
        if row.end == replay.end:
            request.replays.pop(0)
            if after is not None:
                request.replay_at = after.start
                self.cache.enter_replay(request.sequence, after)
