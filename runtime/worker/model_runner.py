"""The worker: one step's rows through the model, over the device pools.

    guard checked -> copies before -> passes -> copies after -> StepResult

    a pass: rows of one depth, packed -> forward -> logits where needed -> tokens, logprobs

Rows of different depth (a partial rebuild runs fewer layers) go in separate passes, deepest last.
Under `deterministic` every row is its own pass: shapes then depend on the row alone, and so do
its logits, bit for bit. A row whose logits are not finite ends with an error of its own; anything
else that goes wrong here is a programmer error and propagates.

This module does not decide what runs, does not allocate blocks, and keeps no state of a request
except its grammar.

Shapes: T packed tokens, N positions with logits, V vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statewise.kernels.interface import AttentionBackend
from statewise.radix.schema import CacheSchema
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.models.base import CausalLM
from statewise.runtime.scheduler.batch import (
    BatchRow,
    BlockCopy,
    Int32,
    RowResult,
    SampleSpec,
    ScheduledBatch,
    StepResult,
    TokenLogprob,
)
from statewise.runtime.worker.forward import LayerRouter, PagedForwardContext
from statewise.runtime.worker.grammar import GrammarCache, GrammarStates
from statewise.runtime.worker.logprobs import token_logprobs
from statewise.runtime.worker.packing import PackedRows, pack_rows
from statewise.runtime.worker.sampler import Sampled, sample
from statewise.runtime.worker.topology_guard import TopologyGuard, pool_tensors

LOGIT_ROWS = 64  # positions whose logits exist at once: bounds N * V floats
NOT_FINITE = "the model's logits are not finite"


class ModelRunner:
    """`Worker` of one model on this process's device. Not thread safe."""

    def __init__(
        self,
        model: CausalLM,
        store: DeviceStore,
        backend: AttentionBackend,
        grammars: GrammarCache | None = None,
        load: Callable[[str], CausalLM] | None = None,
    ) -> None:
        """`load` reads a model from a path, under the same options as `model` was."""
        self.model = model
        self._load = load
        self.store = store
        self.backend = backend
        self._router = LayerRouter(store)
        self._guard = TopologyGuard.capture(pool_tensors(store))
        self._grammars = grammars
        self._grammar_states = GrammarStates(grammars) if grammars is not None else None

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step; returns when all its writes are complete.

        Raises `TopologyChangedError` where the pools are not those the router was made for.
        """
        self._guard.check(pool_tensors(self.store))
        self._copy(batch.copies_before)
        results: dict[int, RowResult] = {}
        for indices in _passes(batch):
            rows = [batch.rows[i] for i in indices]
            results.update(zip(indices, self._run(rows), strict=True))
        self._copy(batch.copies_after)
        return StepResult(batch.step_id, tuple(results[i] for i in range(len(batch.rows))))

    def recapture(self) -> None:
        """Make the fixed parts anew over the pools as they are now (after they were moved)."""
        self._router = LayerRouter(self.store)
        self._guard = TopologyGuard.capture(pool_tensors(self.store))

    def checksums(self, group: int, blocks: Int32) -> NDArray[np.uint64]:
        """[num_blocks, num_layers_of_group] digests of the blocks' bytes (audit)."""
        return self.store.digests(group, blocks)

    def update_weights(self, model_path: str) -> CacheSchema:
        """Run another checkpoint of the same architecture from now on; returns its schema.

        Raises ModelLoadError, or InvalidRequestError where its state would not fit the pools.
        Both models are in memory while the new one loads.
        """
        if self._load is None:
            raise InvalidRequestError("this worker does not know how to load weights")
        model = self._load(model_path)
        difference = _difference(self.model, model)
        if difference:
            raise InvalidRequestError(f"{model_path} cannot replace the weights: {difference}")
        self.model = model
        return model.schema

    def release(self, request_id: str) -> None:
        """Forget the request's grammar state."""
        if self._grammar_states is not None:
            self._grammar_states.release(request_id)

    def compile_grammar(self, kind: str, text: str) -> None:
        """Make a grammar ready; raises InvalidRequestError. Safe to call from another thread."""
        if self._grammars is None:
            raise InvalidRequestError("this worker has no tokenizer, so it cannot use grammars")
        self._grammars.compile(kind, text)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for group in sorted({c.group for c in copies}):
            mine = [c for c in copies if c.group == group]
            self.store.copy_blocks(group, [c.src for c in mine], [c.dst for c in mine])

    def _run(self, rows: Sequence[BatchRow]) -> list[RowResult]:
        """One pass over rows of equal depth."""
        packed = pack_rows(rows)
        context = PagedForwardContext(packed, self.store, self._router, self.backend)
        hidden = self.model.forward(packed.token_ids, context, rows[0].num_layers)
        sampled = self._sample(packed, hidden)
        prompts = self._prompt_logprobs(packed, hidden)
        results = []
        for i, row in enumerate(rows):
            token = sampled.get(i, Sampled())
            logprobs, failed = prompts.get(i, ((), ""))
            error = token.error or failed
            if error:
                results.append(RowResult(row.request_id, error=error, is_invalid=token.is_invalid))
                continue
            forced = self._forced(row.sample, token.token_id)
            results.append(
                RowResult(
                    row.request_id, token.token_id, token.logprob, logprobs, forced_ids=forced
                )
            )
        return results

    def _sample(self, packed: PackedRows, hidden: Tensor) -> dict[int, Sampled]:
        """Outcomes of the rows that sample, by row index."""
        chosen = [i for i, row in enumerate(packed.rows) if row.sample is not None]
        out: dict[int, Sampled] = {}
        for part in _slices(chosen, LOGIT_ROWS):
            specs = [spec for i in part if (spec := packed.rows[i].sample) is not None]
            outcomes = sample(
                self.model.logits(_last_of(packed, hidden, part)), specs, self._mask_of
            )
            out.update(zip(part, outcomes, strict=True))
        return out

    def _forced(self, spec: SampleSpec | None, token_id: int) -> tuple[int, ...]:
        if spec is None or spec.grammar_key is None or self._grammar_states is None:
            return ()
        return self._grammar_states.forced(spec, token_id)

    def _mask_of(self, spec: SampleSpec) -> Tensor:
        assert self._grammar_states is not None, "a grammar row reached a worker without grammars"
        return self._grammar_states.mask(spec)

    def _prompt_logprobs(
        self, packed: PackedRows, hidden: Tensor
    ) -> dict[int, tuple[tuple[TokenLogprob, ...], str]]:
        return {
            i: self._row_prompt_logprobs(row, hidden[packed.starts[i] : packed.starts[i + 1]])
            for i, row in enumerate(packed.rows)
            if row.prompt_logprobs_from >= 0
        }

    def _row_prompt_logprobs(
        self, row: BatchRow, hidden: Tensor
    ) -> tuple[tuple[TokenLogprob, ...], str]:
        """Logprobs of the tokens after positions [from, end) of one row, or an error."""
        first = row.prompt_logprobs_from - row.start
        assert first >= 0, "prompt logprobs were asked for positions before the row"
        targets = row.tokens[first + 1 :].tolist()
        if row.next_token >= 0:
            targets.append(row.next_token)
        out: list[TokenLogprob] = []
        for part in _slices(range(len(targets)), LOGIT_ROWS):
            logits = self.model.logits(hidden[first + part[0] : first + part[-1] + 1])
            if not bool(torch.isfinite(logits.amax(-1)).all()):
                return (), NOT_FINITE
            out += token_logprobs(
                logits,
                [targets[i] for i in part],
                top=row.prompt_top_logprobs,
                chosen=row.prompt_logprob_token_ids,
            )
        return tuple(out), ""


def _last_of(packed: PackedRows, hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Hidden states of the rows' last tokens; where all tokens are such, nothing is gathered.

    Between two passes over all weights the interpreter and torch are cold: a step of decoding
    saves a tenth of a millisecond.
    """
    if len(rows) == hidden.shape[0]:
        return hidden
    ends = packed.starts.tolist()
    return hidden[torch.tensor([ends[i + 1] - 1 for i in rows])]


def _difference(old: CausalLM, new: CausalLM) -> str:
    """Say why state of `new` does not fit the pools of `old`; empty where it does."""
    if new.architecture != old.architecture:
        return f"its architecture is {new.architecture}, not {old.architecture}"
    if new.vocab_size != old.vocab_size:
        return f"its vocabulary has {new.vocab_size} tokens, not {old.vocab_size}"
    if new.max_context_len < old.max_context_len:
        return f"its context is {new.max_context_len} tokens, not {old.max_context_len}"
    if _shape_of(new.schema) != _shape_of(old.schema) or new.geometries() != old.geometries():
        return "its layers or the layout of their state differ"
    return ""


def _shape_of(schema: CacheSchema) -> CacheSchema:
    """A schema without what names the weights and the attention's version."""
    groups = tuple(replace(group, version="") for group in schema.groups)
    return replace(schema, model_fingerprint="", groups=groups)


def _slices(items: Sequence[int], size: int) -> Iterable[list[int]]:
    return (list(items[i : i + size]) for i in range(0, len(items), size))


def _passes(batch: ScheduledBatch) -> list[list[int]]:
    """Row indices of each pass: alone under `deterministic`, else by depth."""
    order = sorted(range(len(batch.rows)), key=lambda i: batch.rows[i].num_layers)
    if batch.deterministic:
        return [[i] for i in order]
    passes: dict[int, list[int]] = {}
    for i in order:
        passes.setdefault(batch.rows[i].num_layers, []).append(i)
    return list(passes.values())
