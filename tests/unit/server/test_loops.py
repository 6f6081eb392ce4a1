"""The loops of the child processes: which message leads to which, and what outruns what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from statewise.runtime.detokenizer import DetokenizerCore
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    LogprobOptions,
    StopMatched,
    TextDelta,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
    unpack_ids,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.server import scheduler_process
from statewise.runtime.server.child import Child, Leaving
from statewise.runtime.server.detokenizer_process import DetokenizerLoop
from statewise.runtime.server.scheduler_process import STALLED_POLL_MS, SchedulerLoop
from statewise.runtime.server.tokenizer_process import TokenizerLoop
from support.byte_vocab import ByteVocabulary
from support.echo import ByteTokenizer, EchoEngine


class FakeChild:
    """Stands for `Child`: frames in by hand, frames out kept."""

    def __init__(self) -> None:
        self.arriving: list[AnyMessage] = []
        self.sent: dict[str, list[AnyMessage]] = defaultdict(list)
        self.timeouts: list[int] = []

    def receive(self, timeout_ms: int) -> list[AnyMessage]:
        self.timeouts.append(timeout_ms)
        arrived, self.arriving = self.arriving, []
        return arrived

    def send(self, peer: str, messages: Sequence[AnyMessage]) -> None:
        self.sent[peer] += messages

    def beat(self, load: Callable[[], dict[str, Any]] = dict) -> None:
        load()


@pytest.fixture
def child() -> FakeChild:
    return FakeChild()


def tokenized(rid: str, text: str = "ab", **params: Any) -> TokenizedRequest:
    return TokenizedRequest(rid, pack_ids(list(text.encode())), SamplingParams(**params))


def ends(messages: Sequence[AnyMessage]) -> list[tuple[str, str]]:
    deltas = [m for m in messages if isinstance(m, TokenDelta | TextDelta)]
    return [(d.rid, d.finish.kind) for d in deltas if d.finish is not None]


# ------------------------------------------------------------------ scheduler


def scheduler(child: FakeChild) -> SchedulerLoop:
    return SchedulerLoop(cast(Child, child), EchoEngine())


def test_scheduler_runs_requests_and_sleeps_only_when_idle(child: FakeChild) -> None:
    loop = scheduler(child)
    loop.turn()
    child.arriving = [tokenized("a", max_new_tokens=2)]
    for _ in range(3):
        loop.turn()
    tokens = [m.token_ids for m in child.sent["detokenizer"] if isinstance(m, TokenDelta)]
    assert tokens == [(97,), (98,)]
    assert ends(child.sent["detokenizer"]) == [("a", "length")]
    assert [t > 0 for t in child.timeouts] == [True, True, False, True]


def test_scheduler_waits_a_little_where_open_work_is_stalled(child: FakeChild) -> None:
    engine = EchoEngine()
    loop = SchedulerLoop(cast(Child, child), engine)
    child.arriving = [tokenized("a", max_new_tokens=9)]
    loop.turn()
    engine.is_stalled = True
    loop.turn()
    loop.turn()
    assert child.timeouts[1:] == [0, STALLED_POLL_MS]


@pytest.mark.parametrize("where", ["receive", "step", "send"])
def test_scheduler_told_to_end_says_whether_a_step_was_under_way(
    child: FakeChild, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = EchoEngine()
    told: list[bool] = []

    def end(*_args: object) -> list[AnyMessage]:
        raise SystemExit(0)

    def abandon(_drain_s: float, *, between_steps: bool) -> None:
        told.append(between_steps)

    child.arriving = [tokenized("a", max_new_tokens=9)]
    monkeypatch.setattr(engine if where == "step" else child, where, end)
    monkeypatch.setattr(engine, "abandon", abandon)
    with pytest.raises(SystemExit):
        SchedulerLoop(cast(Child, child), engine).run()
    assert told == [where != "step"]


def test_scheduler_told_to_end_in_an_idle_moment_finishes_it_first(
    child: FakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, leaving = EchoEngine(), Leaving()
    events: list[object] = []

    def idle() -> bool:
        leaving(15, None)
        events.append("idle ended")
        return False

    def abandon(_drain_s: float, *, between_steps: bool) -> None:
        events.append(between_steps)

    monkeypatch.setattr(scheduler_process, "LEAVING", leaving)
    monkeypatch.setattr(engine, "idle", idle)
    monkeypatch.setattr(engine, "abandon", abandon)
    with pytest.raises(SystemExit):
        SchedulerLoop(cast(Child, child), engine).run()
    assert events == ["idle ended", True]


def test_scheduler_an_abort_that_outran_its_request_still_ends_it(child: FakeChild) -> None:
    loop = scheduler(child)
    child.arriving = [AbortRequest("late", "gone"), tokenized("late"), tokenized("other")]
    loop.turn()
    deltas = [m for m in child.sent["detokenizer"] if isinstance(m, TokenDelta)]
    assert ends(deltas) == [("late", "abort")]
    assert deltas[0].sampling is not None
    assert {d.rid for d in deltas} == {"late", "other"}


def test_scheduler_aborts_one_or_all_and_ignores_the_ended(child: FakeChild) -> None:
    loop = scheduler(child)
    child.arriving = [tokenized(rid, max_new_tokens=100) for rid in "abc"]
    loop.turn()
    child.arriving = [AbortRequest("a", "x"), StopMatched("b", "b", 1), StopMatched("gone", "", 1)]
    loop.turn()
    child.arriving = [AbortRequest("", "all")]
    loop.turn()
    loop.turn()
    assert ends(child.sent["detokenizer"]) == [("a", "abort"), ("b", "stop"), ("c", "abort")]


@pytest.mark.parametrize(
    ("op", "args", "error"),
    [
        ("ping", {}, ""),
        ("flush", {}, ""),
        ("stats", {}, ""),
        ("cache_dump", {}, ""),
        ("match", {"input_ids": [1, 2]}, ""),
        ("match", {}, "input_ids"),
        ("update_weights", {"model_path": "there", "weight_version": "v2"}, ""),
        ("update_weights", {"model_path": "missing"}, "no such directory"),
        ("update_weights", {}, "model_path"),
        ("cache_dump", {"format": "svg"}, ""),
        ("explode", {}, "unknown operation"),
    ],
)
def test_scheduler_answers_questions(
    child: FakeChild, op: str, args: dict[str, Any], error: str
) -> None:
    child.arriving = [ControlRequest("q", op, msgspec.json.encode(args))]
    scheduler(child).turn()
    (reply,) = child.sent["server"]
    assert isinstance(reply, ControlReply)
    assert reply.call_id == "q"
    assert (error in reply.error) if error else reply.error == ""


# ------------------------------------------------------------------ tokenizer


def tokenizer(child: FakeChild) -> TokenizerLoop:
    return TokenizerLoop(cast(Child, child), ByteTokenizer())


def test_tokenizer_turns_text_ids_and_chat_into_requests(child: FakeChild) -> None:
    loop = tokenizer(child)
    chat = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]})
    params = SamplingParams()
    child.arriving = [
        GenerateRequest("t", params, text="ab"),
        GenerateRequest("i", params, input_ids=pack_ids([5])),
        GenerateRequest("c", params, chat=chat),
    ]
    for _ in range(3):
        loop.turn()
    out = [m for m in child.sent["scheduler"] if isinstance(m, TokenizedRequest)]
    assert [(m.rid, unpack_ids(m.input_ids).tolist()) for m in out] == [
        ("t", [97, 98]), ("i", [5]), ("c", [104, 105]),
    ]  # fmt: skip


def test_tokenizer_ends_what_is_aborted_before_its_turn(child: FakeChild) -> None:
    loop = tokenizer(child)
    params = SamplingParams()
    child.arriving = [
        GenerateRequest("a", params, text="x"),
        GenerateRequest("b", params, text="y"),
        AbortRequest("b", "gone"),
        AbortRequest("unknown", "gone"),
    ]
    for _ in range(3):
        loop.turn()
    assert ends(child.sent["server"]) == [("b", "abort")]
    assert [m.rid for m in child.sent["scheduler"] if isinstance(m, TokenizedRequest)] == ["a"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("r", SamplingParams(), text=""), "empty"),
        (
            GenerateRequest("r", SamplingParams(), text="ab", logprob=LogprobOptions(True, 2)),
            "logprob_start_len",
        ),
        (
            GenerateRequest(
                "r", SamplingParams(), text="a" * 100_000, logprob=LogprobOptions(True, 0, 128)
            ),
            "log probabilities",
        ),
    ],
)
def test_tokenizer_refuses_what_cannot_run(
    child: FakeChild, request_: GenerateRequest, message: str
) -> None:
    child.arriving = [request_]
    tokenizer(child).turn()
    (delta,) = child.sent["server"]
    assert isinstance(delta, TextDelta)
    assert delta.finish is not None
    assert (delta.finish.kind, delta.finish.http_status) == ("error", 400)
    assert message in delta.finish.message
    assert child.sent["scheduler"] == []


def test_tokenizer_a_prompt_it_fails_on_ends_that_request_alone(
    child: FakeChild, caplog: pytest.LogCaptureFixture
) -> None:
    child.arriving = [
        GenerateRequest("bad", SamplingParams(), chat=b'{"messages": [5]}'),
        GenerateRequest("good", SamplingParams(), text="x"),
    ]
    loop = tokenizer(child)
    loop.turn()
    loop.turn()
    assert ends(child.sent["server"]) == [("bad", "error")]
    assert [m.rid for m in child.sent["scheduler"] if isinstance(m, TokenizedRequest)] == ["good"]
    assert "TypeError" in caplog.text


def test_without_a_tokenizer_only_ids_are_taken(child: FakeChild) -> None:
    loop = TokenizerLoop(cast(Child, child), None)
    params = SamplingParams()
    child.arriving = [
        GenerateRequest("t", params, text="x"),
        GenerateRequest("i", params, input_ids=pack_ids([1])),
        ControlRequest("q", "tokenize", b'{"texts": ["a"]}'),
    ]
    loop.turn()
    loop.turn()
    assert ("t", "error") in ends(child.sent["server"])
    assert [m.rid for m in child.sent["scheduler"] if isinstance(m, TokenizedRequest)] == ["i"]
    (reply,) = [m for m in child.sent["server"] if isinstance(m, ControlReply)]
    assert "skip-tokenizer-init" in reply.error


# ------------------------------------------------------------------ detokenizer


def test_detokenizer_sends_text_and_stops_and_forgets_the_given_up(child: FakeChild) -> None:
    core = DetokenizerCore(ByteVocabulary())
    loop = DetokenizerLoop(cast(Child, child), core)
    params = SamplingParams(stop=("b",))
    child.arriving = [
        TokenDelta("a", (97,), sampling=params),
        TokenDelta("a", (98,)),
        TokenDelta("lost", (97,), sampling=SamplingParams()),
        AbortRequest("lost", "the scheduler died"),
        AbortRequest("never seen", "the scheduler died"),
        ControlRequest("q", "ping"),
    ]
    loop.turn()
    assert child.sent["scheduler"] == [StopMatched("a", "b", 2)]
    texts = [m.text for m in child.sent["server"] if isinstance(m, TextDelta) and m.rid == "a"]
    assert "".join(texts) == "a"
    assert ends(child.sent["server"]) == []
    num_sent = len(child.sent["server"])
    child.arriving = [TokenDelta("lost", (98,))]
    loop.turn()
    assert len(child.sent["server"]) == num_sent
