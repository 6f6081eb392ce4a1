"""The engine loop's body: requests in, one step, deltas out. No sockets, no threads, no torch.

    add_request -> [grammar compiles] -> Scheduler -> Worker -> commit -> TokenDelta ... finish

Every request that was added ends with exactly one delta whose `finish` is set: stop, length,
abort or error. A worker exception is a programmer error and propagates: the process ends, and
whoever supervises it answers the open requests.

This module does not turn text into tokens or tokens into text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from statewise.radix import GroupEnv, checkpoint_policy
from statewise.radix.cost import CostModel
from statewise.radix.schema import CacheSchema
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.clock import Clock
from statewise.runtime.config import ServerArgs
from statewise.runtime.counters import histograms_of, labelled_of
from statewise.runtime.engine.calibrate import describe, guess
from statewise.runtime.engine.counters import EngineCounters
from statewise.runtime.engine.recoveries import Recoveries
from statewise.runtime.errors import (
    InvalidRequestError,
    OperatingError,
    PromptTooLongError,
    RefusedError,
)
from statewise.runtime.events import EventLog
from statewise.runtime.messages import (
    CacheOptions,
    FinishReason,
    LogprobEntry,
    TokenDelta,
    TokenizedRequest,
)
from statewise.runtime.scheduler.admission import Admission
from statewise.runtime.scheduler.batch import (
    BatchRow,
    RowKind,
    RowResult,
    ScheduledBatch,
    TokenLogprob,
    Worker,
)
from statewise.runtime.scheduler.request import Request, RequestStatus
from statewise.runtime.scheduler.scheduler import Scheduler
from statewise.runtime.scheduler.settings import SchedulerConfig
from statewise.runtime.tiers.page import GroupShape
from statewise.runtime.tiers.tiers import Tiers

Int32 = NDArray[np.int32]

# Tokens between two deltas of a request whose reader waits for the end: few messages, and still no
# heap of text to make at once.
QUIET_INTERVAL = 32


ShapesOf = Callable[[CacheSchema], tuple[GroupShape, ...]]


class GrammarCompiler(Protocol):
    """Compiles grammars beside the loop."""

    def submit(self, rid: str, kind: str, text: str) -> None:
        """Begin to compile for request `rid`."""
        ...

    def poll(self) -> list[tuple[str, str]]:
        """(rid, error) of those done since the last poll; error empty on success."""
        ...

    def cancel(self, rid: str) -> None:
        """The request ended; its result is not wanted."""
        ...


class EngineLimits:
    """What the loaded model allows."""

    def __init__(
        self, *, vocab_size: int, max_context_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.eos_token_ids = frozenset(eos_token_ids)


class EngineCore:
    """Runs one model's requests; owned by one thread."""

    def __init__(
        self,
        args: ServerArgs,
        schema: CacheSchema,
        worker: Worker,
        num_blocks: tuple[int, ...],
        limits: EngineLimits,
        *,
        clock: Clock,
        grammar: GrammarCompiler | None = None,
    ) -> None:
        self.args = args
        self.schema = schema
        self.worker = worker
        self.limits = limits
        self.clock = clock
        self.grammar = grammar
        self.counters = EngineCounters()
        self.events = EventLog()
        self.cache = PrefixCache(
            schema,
            num_blocks,
            guess(schema, args.chunked_prefill_size),
            enabled=not args.disable_radix_cache,
            audit_rate=args.audit_rate,
            digest=worker.checksums,
            events=self.events,
            policy=args.eviction_policy,
            bounded_replay=args.bounded_replay,
        )
        self._shapes_of: ShapesOf | None = None
        self._recoveries = Recoveries(self.counters, self.events)
        admission = Admission(schema, num_blocks, args.watermark, args.chunked_prefill_size)
        self.max_sequence_len = min(
            limits.max_context_len, admission.capacity_tokens() - schema.page_size
        )
        self._limiting_pool = admission.limiting_pool()
        config = SchedulerConfig(
            token_budget=args.chunked_prefill_size,
            max_running=args.max_running_requests,
            max_wait_s=args.max_wait_s,
            policy=args.schedule_policy,
            deterministic=args.deterministic,
            eos_ids=limits.eos_token_ids,
            num_layers=schema.num_layers,
            checkpoints=checkpoint_policy(args.checkpoint_policy, args.checkpoint_interval),
        )
        self.scheduler = Scheduler(config, schema, self.cache, admission)
        self._requests: dict[str, Request] = {}
        self._outbox: list[TokenDelta] = []
        self._num_added = 0
        self.is_stalled = False  # the last step had nothing to run and nothing to say
        self.weights_epoch = 0
        self.weight_version = args.weight_version

    def use_device(self, places: Sequence[GroupEnv]) -> None:
        """Validate hits against the device's addresses and the layouts that its kernels read.

        One place for each group; ValueError where the kernels could not read a group's blocks.
        """
        self.cache.validity.place(places)

    def use_tiers(self, tiers: Tiers, shapes_of: ShapesOf) -> None:
        """Keep cached state in slower tiers too, from before the first request on.

        They are closed with the core. `shapes_of` names their pages under a schema.
        """
        self._shapes_of = shapes_of
        self.cache.use_tiers(tiers, self.clock)

    def use_cost(self, cost: CostModel) -> None:
        """Plan with measured figures instead of the guess; serving refines them."""
        self.cache.use_cost(cost)

    # ---------------------------------------------------------------- requests in

    def add_request(self, message: TokenizedRequest) -> None:
        """Queue a request. One that cannot run gets its terminal delta from the next `step`."""
        try:
            request = self._checked(message)
        except OperatingError as error:
            self._refuse(message.rid, error)
            return
        self._requests[request.rid] = request
        grammar = message.sampling.grammar
        if grammar is None:
            self.scheduler.add(request)
            return
        assert self.grammar is not None  # `_checked` refused it otherwise
        request.status = RequestStatus.COMPILING
        self.grammar.submit(request.rid, *grammar)

    def _checked(self, message: TokenizedRequest) -> Request:
        if message.rid in self._requests:
            raise InvalidRequestError(f"request id {message.rid!r} is in use")
        if len(message.input_ids) % 4 or not message.input_ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        ids = np.frombuffer(message.input_ids, dtype="<i4")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.limits.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"token id {bad} is outside the vocabulary (0 to {self.limits.vocab_size - 1})"
            )
        if len(ids) >= self.max_sequence_len:
            raise PromptTooLongError(self._too_long(len(ids)))
        if message.sampling.grammar is not None and self.grammar is None:
            raise InvalidRequestError(
                "structured output needs a grammar backend: pip install 'statewise[grammar]'"
            )
        if len(self._requests) >= self.args.max_queued_requests + self.args.max_running_requests:
            raise RefusedError(
                f"{len(self._requests)} requests are open; retry, or raise --max-queued-requests"
            )
        room = self.max_sequence_len - len(ids)
        self._num_added += 1
        return Request(
            message,
            max_new_tokens=min(message.sampling.max_new_tokens, room),
            seed=self._seed(message),
            arrival=self.clock.monotonic(),
            send_interval=self._send_interval(message),
        )

    def _send_interval(self, message: TokenizedRequest) -> int:
        """Tokens between two deltas; a stop in the text must be looked for in every token."""
        if message.sampling.stop or message.sampling.stop_regex:
            return 1
        return self.args.stream_interval if message.stream else QUIET_INTERVAL

    def _too_long(self, length: int) -> str:
        if self.max_sequence_len < self.limits.max_context_len:
            return (
                f"the prompt has {length} tokens; at most {self.max_sequence_len - 1} fit into the "
                f"pool of group {self._limiting_pool!r} (raise --max-total-tokens)"
            )
        return (
            f"the prompt has {length} tokens; the context holds {self.max_sequence_len} "
            "and one is needed for the answer"
        )

    def _seed(self, message: TokenizedRequest) -> int:
        if message.sampling.sampling_seed is not None:
            return message.sampling.sampling_seed
        text = f"{self.args.random_seed}/{self._num_added}/{message.rid}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def _refuse(self, rid: str, error: OperatingError) -> None:
        reason = FinishReason(
            "error", message=str(error), code=error.code, http_status=error.http_status
        )
        self.counters.finished[error.code] += 1
        self.counters.admissions_refused.add(error.code)
        self.events.emit("admission_refused", rid=rid, code=error.code, message=str(error))
        self._outbox.append(TokenDelta(rid, finish=reason))

    # ---------------------------------------------------------------- requests out

    def abort(self, rid: str, message: str = "aborted by the client") -> None:
        """End a request (empty rid: all) at once; unknown ids are ignored (already ended)."""
        for request in list(self._requests.values()) if rid == "" else [self._requests.get(rid)]:
            if request is not None:
                reason = FinishReason("abort", message=message, code="aborted", http_status=499)
                self._finish(request, reason, keep_state=True)

    def stop_matched(self, rid: str, matched: str, num_tokens: int) -> None:
        """The detokenizer found a stop string after `num_tokens` generated tokens."""
        request = self._requests.get(rid)
        if request is not None:
            del request.output_ids[num_tokens:]
            self._finish(request, FinishReason("stop", matched), keep_state=True)

    def _finish(self, request: Request, reason: FinishReason, *, keep_state: bool) -> None:
        if request.status is RequestStatus.COMPILING and self.grammar is not None:
            self.grammar.cancel(request.rid)
        self._count(request)
        self.scheduler.remove(request, keep_state=keep_state)
        self._recoveries.abandoned(request.rid)
        request.become(RequestStatus.FINISHED)
        self.worker.release(request.rid)
        del self._requests[request.rid]
        self.counters.ended(request, reason, self.clock.monotonic())
        self._emit(request, reason)

    def _emit(self, request: Request, finish: FinishReason | None) -> None:
        """Queue what is new about `request` for the detokenizer, if it is due."""
        if finish is None and not request.is_due:
            return
        token_ids = tuple(request.output_ids[request.num_sent :])
        prompt_logprobs: tuple[LogprobEntry, ...] = ()
        if request.prompt_logprobs_done and request.prompt_logprobs:
            prompt_logprobs = tuple(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        first = not request.announced
        request.announced = True
        self._outbox.append(
            TokenDelta(
                request.rid,
                token_ids,
                logprobs=tuple(request.logprobs),
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                usage=request.usage(self.weight_version),
                report=request.report if finish is not None or first else None,
                sampling=request.message.sampling if first else None,
                stream=request.message.stream,
            )
        )
        request.num_sent = len(request.output_ids)
        request.logprobs.clear()

    # ---------------------------------------------------------------- idle moments

    def idle(self) -> bool:
        """Use a moment without work for a bounded piece of background work.

        True: there is more to do soon. Compares a few cached blocks with their checksums; goes on
        with copies to slower tiers.
        """
        copies = False
        if self.cache.tiering is not None:
            self.cache.tiering.set_decoding(False)
            self.cache.tiering.poll()
            copies = self.cache.tiering.is_busy or self.cache.tiering.demotion.has_more
        limit = self.args.patrol_blocks
        return (limit > 0 and self.cache.patrol.step(limit) > 0) or copies

    def abandon(self, drain_s: float = 0.0, *, between_steps: bool = False) -> None:
        """The process ends, with requests open or not: let copies that are queued end.

        Between two steps, what is due to be copied is copied as well; amid one, nothing else is
        touched.
        """
        if self.cache.tiering is None:
            return
        if between_steps:
            self.cache.tiering.close(drain_s)
        else:
            self.cache.tiering.tiers.close(drain_s, deliver=False)

    def close(self, drain_s: float = 0.0) -> None:
        """Stop using slower tiers; copies that are queued may take `drain_s` seconds. Idempotent.

        No request may be open.
        """
        if self.cache.tiering is not None:
            self.cache.tiering.close(drain_s)

    # ---------------------------------------------------------------- the step

    def has_work(self) -> bool:
        """Whether `step` may do something: requests are open or deltas wait."""
        return bool(self._requests) or bool(self._outbox)

    def step(self) -> list[TokenDelta]:
        """Run one step; returns all deltas since the last, maybe none while grammars compile."""
        self._poll_grammars()
        if self.cache.tiering is not None:
            self.cache.tiering.poll()
        started = self.clock.monotonic()
        batch = self.scheduler.schedule(started)
        for request in self.scheduler.newly_admitted:
            if request.admitted_at < 0:
                request.admitted_at = started
                self.counters.queue.add(started - request.arrival)
            if request.meeting is None:
                self._count(request)
            if request.lookup is not None:
                num_loaded = request.report.loaded if request.report is not None else 0
                self._recoveries.begun(request.rid, request.lookup, started, num_loaded)
                if request.lookup.is_hit:
                    self.cache.validity.admitted(request.lookup.verdicts)
        if self.cache.tiering is not None:
            rows = () if batch is None else batch.rows
            self.cache.tiering.set_decoding(any(row.kind is RowKind.DECODE for row in rows))
        if batch is not None:
            self._run(batch)
            self.counters.num_steps += 1
            self.counters.step_seconds += self.clock.monotonic() - started
            if self.args.audit:
                self.audit()
        out, self._outbox = self._outbox, []
        self.is_stalled = batch is None and not out
        return out

    def _count(self, request: Request) -> None:
        """Count what a request's report says, once: when nothing more is loaded for it."""
        if request.report is not None and not request.is_counted:
            request.is_counted = True
            self.counters.admitted(request, request.report)

    def _run(self, batch: ScheduledBatch) -> None:
        self.cache.open_epoch(batch.step_id)
        self.cache.verify_leases()
        before = self.clock.monotonic()
        result = self.worker.execute(batch)
        self.cache.close_epoch(batch.step_id)
        assert result.step_id == batch.step_id
        now = self.clock.monotonic()
        self.counters.worker_seconds += now - before
        self._learn_cost(batch, now - before)
        for row, row_result in zip(batch.rows, result.rows, strict=True):
            request = self._requests[row.request_id]
            self._complete(request, row, row_result, now)

    def _learn_cost(self, batch: ScheduledBatch, seconds: float) -> None:
        """Refine the cost model by a step whose only row was a prefill or a replay."""
        row = batch.rows[0]
        if len(batch.rows) == 1 and row.kind is not RowKind.DECODE:
            self.cache.cost.observe_prefill(row.start, row.end, row.num_layers, seconds)

    def _complete(self, request: Request, row: BatchRow, result: RowResult, now: float) -> None:
        if result.error:
            code, status = ("invalid_grammar", 400) if result.is_invalid else ("worker_error", 500)
            reason = FinishReason("error", message=result.error, code=code, http_status=status)
            self._finish(request, reason, keep_state=False)
            return
        self.scheduler.advance(request, row)
        if row.kind is RowKind.REPLAY and not request.replays:
            self._recoveries.completed(request.rid, now)
        self._collect_prompt_logprobs(request, row, result)
        finish: FinishReason | None = None
        if result.token_id >= 0:
            finish = self._accept_token(request, result, now)
        elif request.max_new_tokens == 0 and request.num_uncomputed == 0:
            request.first_token_at = now
            finish = FinishReason("length")
        if finish is not None:
            self._finish(request, finish, keep_state=True)
        else:
            self._emit(request, None)

    def _accept_token(self, request: Request, result: RowResult, now: float) -> FinishReason | None:
        """Append the sampled token and those its grammar forces, up to one that ends the output."""
        self._time_token(request, now)
        if request.message.logprob.enabled:
            assert result.logprob is not None
            request.logprobs.append(_entry(result.logprob))
        for token_id in (result.token_id, *result.forced_ids):
            request.append(token_id)
            self.counters.generation_tokens += 1
            finish = request.finish_reason_after(token_id, self.limits.eos_token_ids)
            if finish is not None:
                return finish
        return None

    def _time_token(self, request: Request, now: float) -> None:
        self._count(request)
        if request.first_token_at < 0:
            request.first_token_at = now
            self.counters.ttft.add(now - request.arrival)
        else:
            self.counters.inter_token.add(now - request.last_token_at)
        request.last_token_at = now

    def _collect_prompt_logprobs(self, request: Request, row: BatchRow, result: RowResult) -> None:
        if row.prompt_logprobs_from < 0:
            return
        if not request.prompt_logprobs:
            first = int(request.tokens[request.message.logprob.start])
            request.prompt_logprobs.append(LogprobEntry(None, first))
        request.prompt_logprobs.extend(_entry(e) for e in result.prompt_logprobs)
        if row.end >= request.prompt_len:
            request.prompt_logprobs_done = True

    def _poll_grammars(self) -> None:
        if self.grammar is None:
            return
        for rid, error in self.grammar.poll():
            request = self._requests.get(rid)
            if request is None or request.status is not RequestStatus.COMPILING:
                continue
            if error:
                reason = FinishReason(
                    "error", message=error, code="invalid_grammar", http_status=400
                )
                self._finish(request, reason, keep_state=False)
            else:
                request.become(RequestStatus.WAITING)
                self.scheduler.add(request)

    # ---------------------------------------------------------------- weights

    def update_weights(self, model_path: str = "", weight_version: str = "") -> dict[str, Any]:
        """Go on with other weights of the same architecture; `model_path` empty: read them again.

        Cached state of the old weights is unusable at once, without a flush and without a scan.
        Running requests keep their tokens and compute their state again. `weight_version` names the
        weights in answers. Raises OperatingError where they cannot be loaded or do not fit; nothing
        has changed then.
        """
        schema = self.worker.update_weights(model_path or self.args.model_path)
        num_paused = self.scheduler.restart_running()
        self.weights_epoch += 1
        shapes = self._shapes_of(schema) if self._shapes_of is not None else ()
        self.cache.expect(schema, self.weights_epoch, shapes)
        self.weight_version = weight_version or self.weight_version
        self.events.emit(
            "weights_updated",
            weights_epoch=self.weights_epoch,
            model_fingerprint=schema.model_fingerprint,
            num_paused=num_paused,
        )
        return {
            "num_paused_requests": num_paused,
            "weights_epoch": self.weights_epoch,
            "weight_version": self.weight_version,
            "model_fingerprint": schema.model_fingerprint,
        }

    # ---------------------------------------------------------------- questions

    def match(self, input_ids: Int32, cache: CacheOptions) -> dict[str, Any]:
        """What a request with this prompt would reuse now, without running it."""
        limit = max(len(input_ids) - 1, 0)
        lookup = self.cache.lookup(cache, input_ids, limit, self.scheduler.granularity)
        report = lookup.report()
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        fields["groups"] = [
            {"name": g.name, "resident": g.resident, "resumable": g.resumable}
            for g in report.groups
        ]
        return fields

    def flush(self) -> dict[str, Any]:
        """Drop all cached state no request is using; returns blocks freed per group."""
        freed = self.cache.flush()
        return {"freed_blocks": freed, "open_requests": len(self._requests)}

    def audit(self) -> None:
        """Assert that every block is in exactly one place."""
        self.cache.audit()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as JSON-able data."""
        waiting = self.scheduler.waiting
        return {
            "num_running": len(self.scheduler.running),
            "num_waiting": len(waiting),
            "num_open": len(self._requests),
            "num_preemptions": self.scheduler.num_preemptions,
            "max_sequence_len": self.max_sequence_len,
            "weights_epoch": self.weights_epoch,
            "weight_version": self.weight_version,
            "pools": self.cache.pool_stats(),
            "counters": self.counters.as_dict(),
            "state_inconsistency_rate": self.cache.counters.inconsistency_rate,
            **self._labelled(),
            "cost_model": {
                **describe(self.cache.cost.model),
                "num_observed": self.cache.cost.num_observed,
            },
            **self._tier_stats(),
            "blocked": {r.rid: r.blocked_reason for r in list(waiting.values())[:32]},
        }

    def _tier_stats(self) -> dict[str, Any]:
        """What slower tiers hold and gave; nothing where there are none."""
        tiering = self.cache.tiering
        if tiering is None:
            return {}
        return {"tiers": tiering.status(), "transfers": tiering.tiers.engine.counters.as_dict()}

    def _labelled(self) -> dict[str, Any]:
        """Counters and histograms with labels, of every part."""
        owners: tuple[object, ...] = (self.counters, self.cache.counters, self.scheduler)
        if self.cache.tiering is not None:
            tiering = self.cache.tiering
            owners = (*owners, tiering.told, tiering.promotions, tiering.meetings, tiering.probes)
        labelled = {n: d for owner in owners for n, d in labelled_of(owner).items()}
        return {
            "labelled": labelled | {"state_transitions": self.cache.transitions()},
            "histograms": {n: d for owner in owners for n, d in histograms_of(owner).items()},
        }

    def cache_dump(self, form: str = "json") -> dict[str, Any]:
        """The tree as data, or as a picture in `text`: ascii, svg."""
        if form not in ("json", "ascii", "svg"):
            raise InvalidRequestError(f"'format' is {form!r}; it must be json, ascii or svg")
        return self.cache.dump(form)


def _entry(logprob: TokenLogprob) -> LogprobEntry:
    return LogprobEntry(logprob.logprob, logprob.token_id, logprob.top, logprob.chosen)
