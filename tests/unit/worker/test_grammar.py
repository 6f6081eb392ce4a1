"""Structured output: compiling, masks along an output, caching, and the compiling thread."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from statewise.runtime.errors import InvalidRequestError, OperatingError
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.worker import grammar
from statewise.runtime.worker.grammar import (
    GrammarCache,
    GrammarStates,
    LlguidanceBackend,
    ThreadedGrammarCompiler,
)
from support.byte_vocab import ByteVocabulary
from support.runner import Driver, spec
from support.toy_model import ToyModel

VOCAB = 300  # wider than the tokenizer, as padded embeddings are
EOS = 257
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteVocabulary, VOCAB)


def ids(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def random_output(states: GrammarStates, params: SamplingParams, seed: int) -> str:
    """A text drawn from the grammar, choosing evenly among allowed bytes."""
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    while len(output) < 400:
        mask = states.mask(spec(params, grammar_key="r", output_ids=output))
        assert mask.shape == (VOCAB,)
        assert not mask[259:].any()
        printable = mask & ((torch.arange(VOCAB) < 127) | (torch.arange(VOCAB) == EOS))
        if mask[EOS]:
            return bytes(output).decode()
        output.append(int(torch.multinomial(printable.float(), 1, generator=generator)))
    return bytes(output).decode()


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema_admits_only_its_documents(backend, seed):
    params = SamplingParams(json_schema=SCHEMA)
    text = random_output(GrammarStates(GrammarCache(backend)), params, seed)
    if len(text) < 400:
        document = json.loads(text)
        assert set(document) == {"name", "age"}
        assert isinstance(document["age"], int)


def test_regex_and_ebnf_masks(backend):
    regex, lark, gbnf = (
        backend.compile("regex", "(ab|ac)d"),
        backend.compile("ebnf", 'start: "x" ("y" | "z")'),
        backend.compile("ebnf", 'root ::= "x" ("y" | "z")'),
    )
    assert ids(regex.allowed()) == {ord("a")}
    assert regex.accept(b"a")
    assert ids(regex.allowed()) == {ord("b"), ord("c")}
    for matcher in (lark, gbnf):
        assert matcher.accept(b"x")
        assert ids(matcher.allowed()) == {ord("y"), ord("z")}
        assert matcher.accept(b"y")
        assert matcher.is_terminated()
        assert ids(matcher.allowed()) == {EOS}
        assert matcher.accept([EOS])
        assert ids(matcher.allowed()) == {EOS}


def test_a_copy_is_independent_and_rollback_returns(backend):
    matcher = backend.compile("regex", "a[bc]d")
    assert matcher.forced_tokens() == [ord("a")]
    assert matcher.accept(b"a")
    twin = matcher.copy()
    assert twin.accept(b"b")
    assert ids(matcher.allowed()) == {ord("b"), ord("c")}
    assert ids(twin.allowed()) == {ord("d")}
    twin.rollback(1)
    assert ids(twin.allowed()) == {ord("b"), ord("c")}
    assert not twin.accept(b"x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '{"type": "foo"}'),
        ("regex", "(a"),
        ("regex", "a{3,1}"),
        ("ebnf", "start: missing"),
        ("ebnf", 'root ::= "a" ('),
        ("regex", "a" * (grammar.MAX_GRAMMAR_CHARS + 1)),
    ],
)
def test_an_invalid_grammar_is_an_invalid_request(backend, kind, text):
    with pytest.raises(InvalidRequestError, match=kind) as caught:
        backend.compile(kind, text)
    assert len(str(caught.value)) < 700


def test_whitespace_between_tokens_is_bounded(backend):
    matcher = backend.compile("json_schema", '{"type": "array", "items": {"type": "integer"}}')
    assert matcher.accept(b"[" + b" " * grammar.MAX_WHITESPACE)
    assert ord(" ") not in ids(matcher.allowed())
    assert ord("1") in ids(matcher.allowed())


def test_the_library_missing_is_a_clear_error(backend, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'statewise\[grammar\]'"):
        backend.compile("regex", "a")


def test_states_follow_the_output_and_are_released(backend):
    states = GrammarStates(GrammarCache(backend))
    params = SamplingParams(regex="abcd")
    one = spec(params, grammar_key="one", output_ids=list(b"a"))
    assert ids(states.mask(one)) == {ord("b")}
    ahead = spec(params, grammar_key="one", output_ids=list(b"abc"))
    assert ids(states.mask(ahead)) == {ord("d")}
    assert ids(states.mask(one)) == {ord("b")}  # an output cut short starts again
    assert ids(states.mask(spec(params, grammar_key="two", output_ids=[]))) == {ord("a")}
    assert len(states) == 2
    states.release("one")
    states.release("never seen")
    assert len(states) == 1
    with pytest.raises(OperatingError, match="left its grammar"):
        states.mask(spec(params, grammar_key="two", output_ids=list(b"zz")))


def test_forced_tokens_follow_a_token_up_to_the_limit(backend):
    cache = GrammarCache(backend)
    params = SamplingParams(regex="a(bcd|xyz)e")

    def forced(output: bytes, token: str, limit: int) -> bytes:
        ask = spec(params, grammar_key="r", output_ids=list(output), max_forced=limit)
        return bytes(GrammarStates(cache).forced(ask, ord(token)))

    assert forced(b"", "a", 9) == b""
    assert forced(b"a", "b", 9) == b"cde"
    assert forced(b"a", "x", 2) == b"yz"
    assert forced(b"a", "x", 0) == b""
    assert forced(b"abc", "d", 9) == b"e"
    assert forced(b"abcd", "e", 9) == b""  # only an end token may follow: it is sampled


@pytest.mark.slow
def test_a_limit_hit_while_a_grammar_is_followed_ends_the_request_alone(backend):
    """A grammar may compile at once and exceed a limit at a later token."""
    model = ToyModel(("full",), vocab_size=VOCAB)
    driver = Driver(model, grammars=GrammarCache(backend))
    params = SamplingParams(temperature=0.0, regex="((a{1000}){1000}){1000}")
    fine = SamplingParams(temperature=0.0, regex="b+")
    tables, others = driver.tables(16), driver.tables(16)
    failed, output, other = "", [], []
    while not failed and len(output) < 50:
        ask = spec(params, grammar_key="r", output_ids=output, max_forced=9)
        row = driver.row("r", tables, [1, *output][-1:], len(output), sample=ask)
        ask = spec(fine, grammar_key="f", output_ids=other, max_forced=9)
        beside = driver.row("f", others, [1, *other][-1:], len(other), sample=ask)
        result, good = driver.step(row, beside)
        assert good.error == ""
        other.append(good.token_id)
        failed = result.error
        assert result.is_invalid == bool(failed)
        output.append(result.token_id)
    assert "grammar" in failed
    assert set(other) <= {ord("b"), EOS}


def test_a_panic_of_the_library_is_an_invalid_grammar(backend, monkeypatch):
    class PanicException(BaseException):
        """As Rust's is, by name and base."""

    def panics(*_args: object, **_kwargs: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(grammar._import_llguidance(), "grammar_from", panics)
    with pytest.raises(InvalidRequestError, match="the grammar library fails on it"):
        backend.compile("regex", "a")


class CountingBackend:
    """Counts compiles; fails on demand."""

    def __init__(self, inner: LlguidanceBackend) -> None:
        self.inner, self.calls = inner, []

    def compile(self, kind: str, text: str):
        self.calls.append((kind, text))
        return self.inner.compile(kind, text)


def test_the_cache_compiles_once_and_forgets_the_oldest(backend):
    counting = CountingBackend(backend)
    cache = GrammarCache(counting, max_entries=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert ids(cache.matcher("regex", text).allowed()) == {ord(text)}
    assert [t for _, t in counting.calls] == ["a", "b", "c", "b"]


def test_the_thread_answers_each_wanted_request_once():
    gate = threading.Event()

    def compile_grammar(_kind: str, text: str) -> None:
        gate.wait(10)
        if text == "bad":
            raise InvalidRequestError("invalid regex: bad")

    compiler = ThreadedGrammarCompiler(compile_grammar)
    assert compiler.poll() == []
    for rid, text in (("one", "a"), ("two", "bad"), ("three", "c")):
        compiler.submit(rid, "regex", text)
    compiler.cancel("three")
    assert compiler.poll() == []
    gate.set()
    compiler.close()
    assert compiler.poll() == [("one", ""), ("two", "invalid regex: bad")]
    assert compiler.poll() == []
    compiler.submit("four", "regex", "a")  # a closed compiler starts again
    compiler.close()
    assert compiler.poll() == [("four", "")]


def test_a_bug_in_the_thread_reaches_the_loop():
    def compile_grammar(_kind: str, _text: str) -> None:
        raise KeyError("bug")

    compiler = ThreadedGrammarCompiler(compile_grammar)
    compiler.submit("one", "regex", "a")
    compiler.close()
    with pytest.raises(RuntimeError, match="grammar thread"):
        compiler.poll()


def test_the_runner_masks_with_the_grammar_of_each_row():
    model = ToyModel(("full",), vocab_size=VOCAB)
    driver = Driver(model, grammars=GrammarCache(LlguidanceBackend(ByteVocabulary, VOCAB)))
    driver.runner.compile_grammar("regex", "yes|no")
    params = SamplingParams(temperature=0.0, regex="yes|no")
    tables, output = driver.tables(16), []
    tokens = list(b"ok? ")
    while not output or output[-1] != EOS:
        start = 0 if not output else len(tokens) + len(output) - 1
        part = (tokens + output)[start:]
        ask = spec(params, grammar_key="r", output_ids=output)
        (result,) = driver.step(driver.row("r", tables, part, start, sample=ask))
        assert result.error == ""
        output.append(result.token_id)
    assert bytes(output[:-1]) in (b"yes", b"no")
    driver.runner.release("r")
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        Driver(model).runner.compile_grammar("regex", "a")
