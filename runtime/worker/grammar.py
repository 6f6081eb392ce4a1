"""Structured output: which tokens a grammar allows next.

`GrammarBackend` compiles a grammar (json_schema, regex or ebnf) once and hands out matchers, one
per request. The only backend is llguidance, an optional dependency that is imported on first use;
where it is missing, a request that asks for a grammar ends with an error that says what to
install. JSON may contain whitespace between tokens, but at most `MAX_WHITESPACE` characters in a
row: small models otherwise indent until their tokens run out.

A request's matcher follows the request's own output: before each mask it accepts the tokens it
has not seen, so preemption and retries need no extra calls.

This module does not choose tokens and knows nothing of a server.

Shapes: V model vocabulary.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.scheduler.batch import SampleSpec

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CACHED_GRAMMARS = 128
MAX_WHITESPACE = 40
MAX_ERROR_CHARS = 500


class GrammarVocabulary(Protocol):
    """What a backend must know of the tokenizer."""

    @property
    def tokens(self) -> Sequence[bytes]:
        """Bytes of each token id."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of tokens that are not text."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a prompt."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end an output; at least one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no special tokens added."""
        ...


class VocabularySource(Protocol):
    """What `TokenizerVocabulary` needs of a tokenizer (runtime/tokenizer has it)."""

    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of control tokens."""
        ...

    def all_token_bytes(self) -> list[bytes]:
        """Bytes of every token by id."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...


class TokenizerVocabulary:
    """A tokenizer as a `GrammarVocabulary`; `eos_ids` are the model's."""

    def __init__(self, tokenizer: VocabularySource, eos_ids: Sequence[int]) -> None:
        self.tokens = tokenizer.all_token_bytes()
        self.special_ids = sorted(tokenizer.special_ids)
        self.bos_id = tokenizer.bos_token_id
        own = tokenizer.eos_token_id
        self.eos_ids = tuple(eos_ids) or (() if own is None else (own,))
        self._tokenizer = tokenizer
        if not self.eos_ids:
            raise InvalidRequestError("structured output needs an end token; the model has none")

    def encode(self, text: str) -> list[int]:
        """See `GrammarVocabulary`."""
        return self._tokenizer.encode_plain(text)


class GrammarMatcher(Protocol):
    """The state of one grammar along one output."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Consume tokens; False where the grammar does not allow one or a limit was hit."""
        ...

    def allowed(self) -> Tensor:
        """[V] bool of the tokens allowed next; only EOS where the text is complete."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens accepted."""
        ...

    def is_terminated(self) -> bool:
        """Whether nothing but EOS may follow."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in order; empty where there is a choice."""
        ...

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        ...


class GrammarBackend(Protocol):
    """Turns grammars into matchers."""

    def compile(self, kind: str, text: str) -> GrammarMatcher:
        """Return a matcher at the start; InvalidRequestError where the grammar is not valid."""
        ...


class LlguidanceMatcher:
    """`GrammarMatcher` over an `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token_ids: Sequence[int]) -> bool:
        """See `GrammarMatcher`."""
        return all(self._matcher.consume_token(token) for token in token_ids)

    def allowed(self) -> Tensor:
        """See `GrammarMatcher`; raises OperatingError where a resource limit was hit."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise OperatingError(f"grammar: {_short(self._matcher.get_error())}")
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits).bool()
        return mask

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher`."""
        assert self._matcher.rollback(num_tokens), self._matcher.get_error()

    def is_terminated(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._matcher.is_stopped())

    def forced_tokens(self) -> list[int]:
        """See `GrammarMatcher`."""
        return list(self._matcher.compute_ff_tokens())

    def copy(self) -> LlguidanceMatcher:
        """See `GrammarMatcher`."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocab_size)


class _TokenizerView:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _short(message: str) -> str:
    """Keep the part of a backend's message that a client can use."""
    text = message.split("<state>")[0].strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."


class LlguidanceBackend:
    """Compiles with llguidance.

    `vocabulary` is called, and the tokenizer's trie built, with the first grammar; both are kept.
    """

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def _trie(self, library: ModuleType) -> Any:
        with self._lock:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                wrapper = library.TokenizerWrapper(_TokenizerView(vocabulary))
                eos = list(vocabulary.eos_ids)
                self._tokenizer = library.LLTokenizer(wrapper, eos_token=eos)
            return self._tokenizer

    def compile(self, kind: str, text: str) -> LlguidanceMatcher:
        """See `GrammarBackend`."""
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{kind} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
            )
        library = _import_llguidance()
        matcher_type = library.LLMatcher
        try:
            if kind == "json_schema":
                space = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"}
                grammar = matcher_type.grammar_from_json_schema(text, defaults=space)
            else:
                grammar = library.grammar_from(kind, text)
            limits = library.LLParserLimits(verbose_errors=False)
            matcher = matcher_type(self._trie(library), grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise InvalidRequestError(f"invalid {kind}: {_short(str(error))}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's; not an Exception
                raise
            raise InvalidRequestError(f"invalid {kind}: the grammar library fails on it") from error
        if matcher.is_error():
            raise InvalidRequestError(f"invalid {kind}: {_short(matcher.get_error())}")
        return LlguidanceMatcher(matcher, self._vocab_size)


def has_llguidance() -> bool:
    """Whether the library is installed (it is not imported)."""
    return importlib.util.find_spec("llguidance") is not None


def _import_llguidance() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise InvalidRequestError(
            "structured output needs llguidance: pip install 'statewise[grammar]'"
        ) from error


class GrammarCache:
    """Compiled grammars by kind and text, least recently used out first. Thread safe."""

    def __init__(self, backend: GrammarBackend, max_entries: int = MAX_CACHED_GRAMMARS) -> None:
        self._backend = backend
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, str], GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str) -> None:
        """Make the grammar ready; raises InvalidRequestError where it is not valid."""
        self.matcher(kind, text)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """Return a fresh matcher for one request, compiled if it was not."""
        key = (kind, text)
        with self._lock:
            compiled = self._entries.get(key)
            if compiled is not None:
                self._entries.move_to_end(key)
                return compiled.copy()
        compiled = self._backend.compile(kind, text)
        with self._lock:
            self._entries[key] = compiled
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            return compiled.copy()


class GrammarStates:
    """The matchers of running requests, by `SampleSpec.grammar_key`."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._states: dict[str, tuple[GrammarMatcher, int]] = {}

    def mask(self, spec: SampleSpec) -> Tensor:
        """[V] bool of tokens allowed after the spec's output.

        Raises OperatingError where the output itself left the grammar or a limit was hit.
        """
        return self._after(spec, spec.output_ids).allowed()

    def forced(self, spec: SampleSpec, token_id: int) -> tuple[int, ...]:
        """Tokens that must follow `token_id`, at most `max_forced` of them.

        None of them where the grammar failed on `token_id`: the next mask says so and ends the
        request.
        """
        if spec.max_forced < 1:
            return ()
        try:
            matcher = self._after(spec, [*spec.output_ids, token_id])
        except OperatingError:
            return ()
        return tuple(matcher.forced_tokens()[: spec.max_forced])

    def _after(self, spec: SampleSpec, output_ids: Sequence[int]) -> GrammarMatcher:
        """Return the request's matcher after `output_ids`."""
        key, grammar = spec.grammar_key, spec.params.grammar
        assert key is not None
        assert grammar is not None
        matcher, seen = self._states.get(key, (None, 0))
        if matcher is None or seen > len(output_ids):
            matcher, seen = self._cache.matcher(*grammar), 0
        fresh = output_ids[seen:]
        if fresh and not matcher.accept(fresh):
            raise OperatingError(
                "the output left its grammar, or the grammar is too large to follow"
            )
        self._states[key] = (matcher, len(output_ids))
        return matcher

    def release(self, key: str) -> None:
        """Forget a request that ended; unknown keys are ignored (it never sampled)."""
        self._states.pop(key, None)

    def __len__(self) -> int:
        return len(self._states)


class ThreadedGrammarCompiler:
    """Compiles beside the engine loop in one daemon thread, started with the first grammar.

    `compile_grammar(kind, text)` raises InvalidRequestError for a bad grammar. `submit`, `poll`
    and `cancel` are the loop's side and never wait.
    """

    def __init__(self, compile_grammar: Callable[[str, str], None]) -> None:
        self._compile = compile_grammar
        self._jobs: queue.SimpleQueue[tuple[str, str, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._wanted: set[str] = set()  # touched by the loop's thread only
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def submit(self, rid: str, kind: str, text: str) -> None:
        """Begin to compile for request `rid`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            self._thread.start()
        self._wanted.add(rid)
        self._jobs.put((rid, kind, text))

    def poll(self) -> list[tuple[str, str]]:
        """(rid, error) of those done since the last poll; error empty on success.

        Raises what the compiling thread met where that was not an operating error.
        """
        if self._bug is not None:
            raise RuntimeError("the grammar thread failed") from self._bug
        out = []
        while not self._done.empty():
            rid, error = self._done.get()
            if rid in self._wanted:
                self._wanted.remove(rid)
                out.append((rid, error))
        return out

    def cancel(self, rid: str) -> None:
        """Forget a request that ended: its result is not wanted."""
        self._wanted.discard(rid)

    def close(self) -> None:
        """End the thread after the job it is at."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            rid, kind, text = job
            try:
                self._compile(kind, text)
                error = ""
            except OperatingError as failure:
                error = str(failure)
            except BaseException as bug:  # whatever ends the thread must not go unseen
                self._bug = bug
                return
            self._done.put((rid, error))
