"""From settings to everything an engine core needs: model, pools, worker, limits, start log.

    settings -> config -> dtype -> kernels -> weights -> pool sizes -> pools -> ModelRunner

The scheduler process and the in-process engine both start here. Whatever makes the settings
unusable (a missing file, too little memory, a kernel that cannot run here) is an operating error
whose message says what to change.

This module starts no loop, no thread and no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from statewise.kernels import native
from statewise.kernels.interface import AttentionBackend, Ops
from statewise.kernels.select import BackendUnavailableError, select_backend
from statewise.radix.lossy import lossy_schema
from statewise.radix.schema import CacheSchema
from statewise.runtime import machine
from statewise.runtime.clock import Clock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.calibrate import BUDGET_S, TIERS_BUDGET_S, calibrate
from statewise.runtime.engine.core import EngineCore, EngineLimits
from statewise.runtime.engine.slower import SlowerTiers
from statewise.runtime.engine.trial import Trials
from statewise.runtime.errors import InvalidRequestError, ModelLoadError
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.memory.sizing import PoolPlan, SizingRequest, plan_pools
from statewise.runtime.models.base import CausalLM, LoadOptions
from statewise.runtime.models.config import ModelInfo
from statewise.runtime.models.loader import inspect_model, load_model
from statewise.runtime.tiers.places import check_places
from statewise.runtime.tiers.quantise import is_available
from statewise.runtime.tokenizer.load import load_tokenizer
from statewise.runtime.tokenizer.tokenizer import Tokenizer
from statewise.runtime.worker.grammar import (
    GrammarCache,
    GrammarVocabulary,
    LlguidanceBackend,
    ThreadedGrammarCompiler,
    TokenizerVocabulary,
    has_llguidance,
)
from statewise.runtime.worker.model_runner import ModelRunner

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WARM_UP_TOKENS = 8

# (bytes read, bytes in all, tensor name)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BuiltRuntime:
    """Everything `EngineCore` takes, and what to tell people about it."""

    args: ServerArgs
    model: CausalLM
    schema: CacheSchema
    worker: ModelRunner
    pools: PoolPlan
    limits: EngineLimits
    grammar: ThreadedGrammarCompiler | None
    facts: dict[str, Any]  # JSON-able: what is served
    headline: str  # first line of the start log
    slower: SlowerTiers | None = None

    def info(self, core: EngineCore) -> dict[str, Any]:
        """Describe what is served, JSON-able: for the ready message and server info."""
        return {**self.facts, "max_sequence_len": core.max_sequence_len}

    def start_log(self, core: EngineCore) -> list[str]:
        """Return lines for a person: model, groups with bytes per token, pools, longest context."""
        size = self.schema.page_size
        pages = f"pages of {size} tokens" + ("" if self.args.page_size else " (chosen)")
        fits = f"longest context that fits: {core.max_sequence_len} tokens"
        slower = self.slower.lines if self.slower is not None else []
        return [self.headline, pages, *self.pools.lines, *slower, fits]

    def core(self, clock: Clock) -> EngineCore:
        """Make an engine core over these parts; one core for one `BuiltRuntime`.

        Measures what a forward costs first (about two seconds, four
        with slower tiers), unless the settings say not to.
        """
        core = EngineCore(
            self.args,
            self.schema,
            self.worker,
            self.pools.num_blocks,
            self.limits,
            clock=clock,
            grammar=self.grammar,
        )
        slower, store = self.slower, self.worker.store
        core.use_device(slower.places() if slower is not None else store.environments())
        tiers = self.slower.open(clock) if self.slower is not None else None
        if self.slower is not None and tiers is not None:
            core.use_tiers(tiers, self.slower.shapes)
        if self.args.calibrate:
            sizes = (self.pools.num_blocks, self.args.chunked_prefill_size)
            longest = self.limits.max_context_len
            budget_s = BUDGET_S if tiers is None else TIERS_BUDGET_S
            cost = calibrate(self.worker, self.schema, *sizes, clock, budget_s, longest=longest)
            if self.slower is not None and tiers is not None:
                cost = replace(cost, tiers=self.slower.measure(tiers, clock))
            core.use_cost(cost)
            self.worker.store.clear()
        return core


def build_runtime(
    args: ServerArgs,
    progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
) -> BuiltRuntime:
    """Load the model and allocate its pools.

    `progress` is called while weights load. `tokenizer` is what grammars are compiled against;
    None: the model's own is opened with the first grammar. Raises ModelLoadError,
    InvalidRequestError, PoolSizeError or TierError.
    """
    check_places(args.disk_cache_dir, args.remote_cache, args.cache_key_file)
    set_threads(args)
    _check_lossy(args)
    info = inspect_model(args.model_path, args.context_length)
    _check_format(args, info)
    dtype = _dtype(args.dtype, info.dtype, "dtype")
    kv_dtype = (
        dtype
        if args.kv_cache_dtype == "auto"
        else _dtype(args.kv_cache_dtype, "", "kv_cache_dtype")
    )
    backend, ops = _kernels(args, kv_dtype)
    options = LoadOptions(
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=args.page_size or info.page_size,
        backend_layout_id=backend.layout_id,
        context_length=args.context_length,
        ops=ops,
    )

    def load(path: str) -> CausalLM:
        loaded = load_model(path, options, progress)
        if args.lossy_tiers != "none":
            loaded.schema = lossy_schema(loaded.schema, args.lossy_tiers)
        return loaded

    model = load(args.model_path)
    pools = plan_pools(model.schema, _sizing(args, model))
    store = DeviceStore(
        model.schema, model.geometries(), backend, pools.num_blocks, poison=args.audit
    )
    cache = _grammar_cache(args, model, tokenizer)
    worker = ModelRunner(model, store, backend, cache, load)
    warm_up(worker, model)
    return _built(args, info, worker, pools, cache, ops.packed_bytes)


def set_threads(args: ServerArgs) -> int:
    """Give torch and the native kernels one thread for each physical core, or what was asked."""
    num = args.num_threads or machine.num_physical_cores()
    torch.set_num_threads(num)
    if native.is_available():
        native.set_num_threads(num)
    return num


def _check_lossy(args: ServerArgs) -> None:
    if args.lossy_tiers != "none" and not is_available(args.lossy_tiers):
        raise InvalidRequestError(
            f"--lossy-tiers {args.lossy_tiers}: this torch has no such numbers; int8 works with any"
        )


def _check_format(args: ServerArgs, info: ModelInfo) -> None:
    if args.load_format not in ("auto", info.format):
        raise ModelLoadError(
            f"{info.path} is in format {info.format!r}, and --load-format is {args.load_format!r}"
        )


def _dtype(asked: str, suggested: str, what: str) -> torch.dtype:
    """Resolve a dtype by name; "auto" is what the files suggest, if this CPU is fast at it."""
    if asked == "auto":
        fast = machine.has_fast_bfloat16()
        return torch.bfloat16 if suggested != "float32" and fast else torch.float32
    if asked not in DTYPES:
        raise InvalidRequestError(f"{what}: {asked!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[asked]


def _kernels(args: ServerArgs, kv_dtype: torch.dtype) -> tuple[AttentionBackend, Ops]:
    try:
        return select_backend(args.attention_backend, kv_dtype)
    except (ValueError, BackendUnavailableError) as error:
        raise InvalidRequestError(f"attention backend: {error}") from error


def _sizing(args: ServerArgs, model: CausalLM) -> SizingRequest:
    return SizingRequest(
        budget_bytes=int(machine.available_memory_bytes() * args.mem_fraction_static),
        max_total_tokens=args.max_total_tokens,
        max_window_tokens=args.max_window_tokens,
        max_running_requests=args.max_running_requests,
        chunk_tokens=args.chunked_prefill_size,
        context_length=model.max_context_len,
    )


def _grammar_cache(
    args: ServerArgs, model: CausalLM, tokenizer: Tokenizer | None
) -> GrammarCache | None:
    if args.skip_tokenizer_init or args.grammar_backend == "none" or not has_llguidance():
        return None

    def vocabulary() -> GrammarVocabulary:
        source = tokenizer or load_tokenizer(args.tokenizer_path or args.model_path)
        return TokenizerVocabulary(source, model.eos_token_ids)

    return GrammarCache(LlguidanceBackend(vocabulary, model.vocab_size))


def warm_up(worker: ModelRunner, model: CausalLM) -> None:
    """Run one small prefill and one decode on blocks nobody owns yet, so that lazy set-up is done.

    What the trials wrote is forgotten.
    """
    trials = Trials(worker, model.schema, tuple(pool.num_blocks for pool in worker.store.groups))
    if trials.room > WARM_UP_TOKENS:
        trials.run(0, WARM_UP_TOKENS)
        trials.run(WARM_UP_TOKENS, 1, decode=True)
    worker.store.clear()


def _built(
    args: ServerArgs,
    info: ModelInfo,
    worker: ModelRunner,
    pools: PoolPlan,
    grammars: GrammarCache | None,
    packed_bytes: int,
) -> BuiltRuntime:
    model = worker.model
    limits = EngineLimits(
        vocab_size=model.vocab_size,
        max_context_len=model.max_context_len,
        eos_token_ids=model.eos_token_ids,
    )
    facts: dict[str, Any] = {
        "model_name": info.name,
        "architecture": model.architecture,
        "vocab_size": model.vocab_size,
        "context_length": model.max_context_len,
        "bos_token_id": model.bos_token_id,
        "eos_token_ids": list(model.eos_token_ids),
        "weight_bytes": info.weight_bytes,
        "packed_weight_bytes": packed_bytes,
        "attention_backend": worker.backend.name,
        "num_threads": torch.get_num_threads(),
        "page_size": model.schema.page_size,
        "model_fingerprint": model.schema.model_fingerprint,
        "groups": _group_facts(model.schema, pools),
        "structured_output": grammars is not None,
        "exact": args.lossy_tiers == "none" and not args.bounded_replay,
    }
    head = (
        f"model {info.name}: {model.architecture}, {info.num_layers} layers, "
        f"{info.weight_bytes >> 20} MiB of weights on disk, kernels {worker.backend.name}, "
        f"{torch.get_num_threads()} threads"
    )
    compiler = None if grammars is None else ThreadedGrammarCompiler(grammars.compile)
    slower = SlowerTiers(args, worker.store) if SlowerTiers.are_asked_for(args) else None
    parts = (args, model, model.schema, worker, pools, limits, compiler, facts, head, slower)
    return BuiltRuntime(*parts)


def _group_facts(schema: CacheSchema, pools: PoolPlan) -> list[dict[str, Any]]:
    return [
        {
            "name": group.name,
            "kind": group.kind.value,
            "window": group.window,
            "num_layers": len(group.layers),
            "bytes_per_token": group.block_bytes(schema.page_size) / schema.page_size,
            "num_blocks": num_blocks,
            "pool_bytes": size,
        }
        for group, num_blocks, size in zip(
            schema.groups, pools.num_blocks, pools.group_bytes, strict=True
        )
    ]
