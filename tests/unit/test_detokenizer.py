"""The detokenizer: the same text however tokens are cut, one last delta, honest counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime.detokenizer import MAX_HELD_TOKENS, DetokenizerCore
from statewise.runtime.messages import (
    CacheReport,
    FinishReason,
    LogprobEntry,
    StopMatched,
    TextDelta,
    TokenDelta,
    Usage,
)
from statewise.runtime.sampling_params import SamplingParams
from support.byte_vocab import ByteVocabulary

EOS = 257
LENGTH = FinishReason("length")


def entry(token_id: int) -> LogprobEntry:
    return LogprobEntry(-1.0, token_id, top=((-0.5, ord("T")),), chosen=((-9.0, ord("C")),))


def deltas(
    ids: list[int],
    sampling: SamplingParams,
    cuts: list[int],
    finish: FinishReason = LENGTH,
    *,
    stream: bool = True,
) -> list[TokenDelta]:
    """The output cut at `cuts`; only the first delta opens, only the last ends."""
    points = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    out = []
    for i, (low, high) in enumerate(pairwise(points)):
        last = i == len(points) - 2
        out.append(
            TokenDelta(
                "r",
                tuple(ids[low:high]),
                tuple(entry(t) for t in ids[low:high]),
                finish=finish if last else None,
                usage=Usage(prompt_tokens=5, completion_tokens=high),
                report=CacheReport(prompt=5) if last else None,
                sampling=sampling if i == 0 else None,
                stream=stream,
            )
        )
    return out


def run(
    items: list[TokenDelta], core: DetokenizerCore | None = None
) -> tuple[list[TextDelta], list[StopMatched]]:
    core = core or DetokenizerCore(ByteVocabulary())
    texts: list[TextDelta] = []
    stops: list[StopMatched] = []
    for item in items:
        more, found = core.feed(item)
        texts += more
        stops += found
    assert core.num_open == 0
    assert [t.finish is not None for t in texts] == [False] * (len(texts) - 1) + [True]
    return texts, stops


def joined(texts: list[TextDelta]) -> tuple[str, list[int]]:
    return "".join(t.text for t in texts), [i for t in texts for i in t.token_ids]


def reference(
    ids: list[int], sampling: SamplingParams, finish: FinishReason
) -> tuple[str, int, FinishReason]:
    """(text, tokens, finish) by decoding every prefix afresh."""

    def decoded(upto: int) -> str:
        kept = [i for i in ids[:upto] if i < 256 or not sampling.skip_special_tokens]
        assert all(i < 256 for i in kept)
        return bytes(kept).decode("utf-8", "replace")

    hidden = finish.kind == "stop" and not sampling.no_stop_trim
    usable = len(ids) - hidden
    for count in range(sampling.min_new_tokens + 1, usable + 1):
        text = decoded(count)
        if count < usable:  # a character that is not complete yet is not text yet
            text = text.removesuffix("\ufffd")
        before = decoded(sampling.min_new_tokens)
        assert "\ufffd" not in before
        tail = text[len(before) :]
        found = [(tail.find(s) + len(s), tail.find(s), s) for s in sampling.stop if s in tail]
        if found:
            end, start, stop = min(found)
            cut = end if sampling.no_stop_trim else start
            return before + tail[:cut], count, FinishReason("stop", stop)
    return decoded(usable), len(ids), finish


WORDS = st.lists(
    st.sampled_from(["a", "b", "ab", "#", "##", "é", "日本", "\n", "stop", "st", "op"]), max_size=12
).map("".join)


@given(
    text=WORDS,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stop=st.lists(st.sampled_from(["stop", "##", "ab\n", "é", "日本a", "b"]), max_size=3),
    no_stop_trim=st.booleans(),
    ends_with_eos=st.booleans(),
    stream=st.booleans(),
)
def test_any_cut_gives_the_reference_text(text, cuts, stop, no_stop_trim, ends_with_eos, stream):
    sampling = SamplingParams(stop=tuple(stop), no_stop_trim=no_stop_trim)
    ids = list(text.encode()) + ([EOS] if ends_with_eos else [])
    finish = FinishReason("stop", EOS) if ends_with_eos else LENGTH
    texts, stops = run(deltas(ids, sampling, cuts, finish, stream=stream))
    assert stream or len(texts) <= 2
    expected_text, expected_count, expected_finish = reference(ids, sampling, finish)
    shown, shown_ids = joined(texts)
    assert shown == expected_text
    assert shown_ids == ids[:expected_count]
    last = texts[-1]
    assert last.finish is not None
    assert last.finish.kind == expected_finish.kind
    assert last.usage == Usage(prompt_tokens=5, completion_tokens=expected_count)
    assert last.report == CacheReport(prompt=5)
    assert sum(len(t.logprobs) for t in texts) == expected_count
    for found in stops:
        assert found == StopMatched("r", last.finish.matched, expected_count)
    assert len(stops) <= 1


def test_min_new_tokens_delays_stops():
    ids = list(b"stop and stop here")
    sampling = SamplingParams(stop=("stop",), min_new_tokens=6)
    for cuts in ([], [3], [1, 2, 3, 9, 13]):
        texts, _ = run(deltas(ids, sampling, cuts))
        assert joined(texts) == ("stop and ", list(b"stop and stop"))


def test_what_is_not_streamed_comes_in_few_deltas_of_bounded_size():
    ids = list(b"x" * 1000)
    for cuts, sizes in (
        ([*range(1, 1000)], [1, MAX_HELD_TOKENS, MAX_HELD_TOKENS, MAX_HELD_TOKENS, 231]),
        ([700], [700, 300]),
        ([], [1000]),
    ):
        texts, _ = run(deltas(ids, SamplingParams(), cuts, stream=False))
        assert [len(t.token_ids) for t in texts] == sizes
        assert joined(texts) == ("x" * 1000, ids)
        assert all(dict(t.token_texts)[ord("x")] == "x" for t in texts)


def test_a_stop_is_reported_at_once_where_text_is_held():
    core = DetokenizerCore(ByteVocabulary())
    core.feed(TokenDelta("r", tuple(b"o"), sampling=SamplingParams(stop=("END",)), stream=False))
    assert core.feed(TokenDelta("r", tuple(b"ne E"))) == ([], [])
    assert core.feed(TokenDelta("r", tuple(b"ND x"))) == ([], [StopMatched("r", "END", 7)])
    (end,), stops = core.feed(TokenDelta("r", tuple(b"!"), finish=LENGTH, usage=Usage(3, 9)))
    assert (end.text, end.token_ids, stops) == ("ne ", tuple(b"ne END"), [])
    assert (end.finish, end.usage) == (FinishReason("stop", "END"), Usage(3, 7))


def test_a_streamed_stop_is_reported_once_and_the_rest_swallowed():
    core = DetokenizerCore(ByteVocabulary())
    sampling = SamplingParams(stop=("END",))
    first = TokenDelta("r", tuple(b"one EN"), sampling=sampling)
    assert core.feed(first) == (
        [TextDelta("r", "one ", tuple(b"one EN"), usage=Usage(completion_tokens=6))],
        [],
    )
    texts, stops = core.feed(TokenDelta("r", tuple(b"D x")))
    assert [(t.text, t.token_ids) for t in texts] == [("", tuple(b"D"))]
    assert stops == [StopMatched("r", "END", 7)]
    assert core.feed(TokenDelta("r", tuple(b"END again"))) == ([], [])
    end = TokenDelta("r", tuple(b"!"), finish=LENGTH, usage=Usage(3, 40), report=CacheReport(3))
    texts, stops = core.feed(end)
    expected = TextDelta(
        "r", finish=FinishReason("stop", "END"), usage=Usage(3, 7), report=CacheReport(3)
    )
    assert (texts, stops) == ([expected], [])


@pytest.mark.parametrize("kind", ["abort", "error"])
def test_text_held_back_is_shown_when_a_request_ends_early(kind):
    sampling = SamplingParams(stop=("END",))
    finish = FinishReason(kind, message="why")
    texts, stops = run(deltas(list(b"one EN"), sampling, [3], finish))
    assert joined(texts)[0] == "one EN"
    assert texts[-1].finish == finish
    assert stops == []


def test_an_abort_after_a_stop_stays_an_abort():
    finish = FinishReason("abort", message="gone")
    texts, _ = run(deltas(list(b"a END b"), SamplingParams(stop=("END",)), [5], finish))
    assert texts[-1].finish == finish


def test_stop_ids_are_counted_and_hidden_unless_asked_for():
    finish = FinishReason("stop", ord("!"))
    for no_trim, text in ((False, "hi"), (True, "hi!")):
        texts, _ = run(deltas(list(b"hi!"), SamplingParams(no_stop_trim=no_trim), [], finish))
        assert joined(texts) == (text, list(b"hi!"))
        assert texts[-1].usage.completion_tokens == 3


def test_special_tokens_are_shown_on_request():
    ids = [104, EOS, 105]
    for skip, text in ((True, "hi"), (False, "h<eos>i")):
        texts, _ = run(deltas(ids, SamplingParams(skip_special_tokens=skip), [1]))
        assert joined(texts)[0] == text


def test_a_broken_character_waits_and_ends_as_a_replacement():
    euro = list("€".encode())
    texts, _ = run(deltas([*euro, *euro[:2]], SamplingParams(), [1, 2, 3, 4]))
    assert [t.text for t in texts] == ["", "", "€", "", "\ufffd"]


def test_a_stop_that_only_more_text_could_deny_is_found_at_the_end():
    sampling = SamplingParams(stop_regex=(r"\bEND\b",))
    texts, stops = run(deltas(list(b"an END"), sampling, [2, 4]))
    assert joined(texts)[0] == "an "
    assert texts[-1].finish == FinishReason("stop", r"\bEND\b")
    assert stops == []
    texts, _ = run(deltas(list(b"an ENDING"), sampling, [2, 4]))
    assert joined(texts)[0] == "an ENDING"


def test_token_texts_cover_every_id_that_log_probabilities_name():
    texts, _ = run(deltas(list(b"ab"), SamplingParams(), []))
    assert dict(texts[0].token_texts) == {ord(c): c for c in "aTCb"}


def test_prompt_logprobs_travel_without_tokens():
    core = DetokenizerCore(ByteVocabulary())
    first = TokenDelta("r", prompt_logprobs=(entry(65),), sampling=SamplingParams())
    texts, _ = core.feed(first)
    assert texts[0].prompt_logprobs == (entry(65),)
    assert dict(texts[0].token_texts)[65] == "A"


def test_requests_do_not_mix_and_silence_is_not_sent():
    core = DetokenizerCore(ByteVocabulary())
    opening = SamplingParams(stop=("bb",))
    assert core.feed(TokenDelta("one", sampling=opening)) == ([], [])
    assert core.feed(TokenDelta("two", tuple(b"b"), sampling=opening))[0][0].text == ""
    (text,), stops = core.feed(TokenDelta("one", tuple(b"b"), finish=LENGTH))
    assert (text.text, stops) == ("b", [])
    (text,), _ = core.feed(TokenDelta("two", tuple(b"b"), finish=LENGTH))
    assert text.finish == FinishReason("stop", "bb")
    assert core.num_open == 0


def test_a_request_that_was_never_opened_passes_only_its_end():
    core = DetokenizerCore(ByteVocabulary())
    assert core.feed(TokenDelta("lost", (65,))) == ([], [])
    refused = FinishReason("error", message="too long", code="prompt_too_long", http_status=400)
    texts, stops = core.feed(TokenDelta("lost", (66,), finish=refused))
    assert texts == [TextDelta("lost", finish=refused)]
    assert stops == []
    core.feed(TokenDelta("open", (65,), sampling=SamplingParams()))
    core.clear()
    assert core.feed(TokenDelta("open", (65,))) == ([], [])


def test_without_a_tokenizer_ids_pass_without_text():
    core = DetokenizerCore(None)
    texts, stops = run(deltas([1, 2, 3], SamplingParams(stop=("x",)), [2]), core)
    assert joined(texts) == ("", [1, 2, 3])
    assert stops == []
