"""The in-process engine over a tiny model: answers, streams, errors, threads, ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from statewise.runtime.engine.engine import Engine
from statewise.runtime.errors import (
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    RefusedError,
    WorkerDiedError,
)
from support.tiny import tiny_model

GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
PROMPT = "a prompt of some length, long enough for three windows of the tiny model"


def make(**settings: object) -> Engine:
    base: dict[str, object] = {
        "model_path": str(tiny_model("gemma3")),
        "dtype": "float32",
        "max_total_tokens": 4096,
        "page_size": 8,
        "chunked_prefill_size": 64,
        "num_threads": 1,
        "audit": True,
    }
    return Engine(**(base | settings))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make() as one:
        yield one


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["internal_states"][0]


def test_the_second_answer_reuses_the_first_and_is_the_same(engine):
    engine.flush_cache()
    first = engine.generate(PROMPT, GREEDY)
    assert engine.match(PROMPT)["reused"] > 0
    second = engine.generate(PROMPT, GREEDY)
    assert first["output_ids"] == second["output_ids"]
    assert first["text"] == second["text"] == engine.decode(first["output_ids"])
    assert len(first["output_ids"]) == 12
    cold, hit = first["meta_info"], second["meta_info"]
    assert cold["cached_tokens"] == 0
    assert hit["cached_tokens"] == hit["cache_report"]["reused"] > 0
    assert hit["prompt_tokens"] == len(engine.encode(PROMPT))
    assert hit["finish_reason"] == {"type": "length", "length": 12}
    assert engine.match(PROMPT, cache_salt="other")["matched"] == 0


def test_ids_in_give_the_same_answer_as_text(engine):
    ids = engine.encode(PROMPT)
    from_ids = engine.generate(input_ids=ids, sampling_params=GREEDY)
    assert from_ids["output_ids"] == engine.generate(PROMPT, GREEDY)["output_ids"]
    assert engine.match(input_ids=ids) == engine.match(PROMPT)


def test_a_stream_is_cumulative_and_ends_as_the_whole_answer(engine):
    whole = engine.generate(PROMPT, GREEDY)
    events = list(engine.generate(PROMPT, GREEDY, stream=True))
    assert len(events) > 3
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]


def test_a_stream_starts_at_once_and_an_abandoned_one_is_aborted(engine):
    streams = [
        engine.generate(p, {**GREEDY, "max_new_tokens": 2000}, stream=True) for p in ("a", "b")
    ]
    assert stats(engine)["num_open"] == 2
    next(streams[0])
    streams[0].close()
    assert stats(engine)["num_open"] == 1
    assert list(streams[0]) == []
    del streams
    assert stats(engine)["num_open"] == 0


def test_batches_and_samples_come_in_order(engine):
    prompts = ["one", "two", "three"]
    answers = engine.generate(prompts, [{**GREEDY, "max_new_tokens": i} for i in (1, 2, 3)])
    assert [len(a["output_ids"]) for a in answers] == [1, 2, 3]
    alone = [engine.generate(p, {**GREEDY, "max_new_tokens": 3})["output_ids"] for p in prompts]
    assert [a["output_ids"] for a in answers] == [o[: i + 1] for i, o in enumerate(alone)]
    seeded = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 7, "n": 3}
    samples = engine.generate("one", seeded)
    assert len(samples) == 3
    assert len({tuple(s["output_ids"]) for s in samples}) > 1
    assert len({s["meta_info"]["id"] for s in samples}) == 3
    streamed = list(engine.generate(prompts, GREEDY, stream=True))
    assert {e["index"] for e in streamed} == {0, 1, 2}


def test_a_stop_string_ends_the_text_and_the_count(engine):
    whole = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 40})
    stop = whole["text"][6:9]
    at = whole["text"].index(stop)
    answer = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 40, "stop": [stop]})
    assert answer["text"] == whole["text"][:at]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert answer["output_ids"] == whole["output_ids"][: meta["completion_tokens"]]


def test_logprobs_of_prompt_and_output(engine):
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answer = engine.generate(PROMPT, GREEDY, return_text_in_logprobs=True, **fields)
    meta, ids = answer["meta_info"], engine.encode(PROMPT)
    assert [e[1] for e in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    assert [e[1] for e in meta["output_token_logprobs"]] == answer["output_ids"]
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert entry[0] == top[0][0]  # greedy: the token is the most likely
        assert top[0][0] >= top[1][0]
    assert all(isinstance(e[2], str) for e in meta["input_token_logprobs"])
    scored = engine.generate(
        input_ids=ids + answer["output_ids"][:4],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(ids) - 1,
    )
    again = [e[0] for e in scored["meta_info"]["input_token_logprobs"][1:]]
    first = [e[0] for e in meta["output_token_logprobs"][:4]]
    assert again == pytest.approx(first, abs=1e-4)


def test_a_grammar_shapes_the_text(engine):
    schema = '{"type":"object","properties":{"a":{"enum":["x","y"]}},"required":["a"]}'
    params = {"max_new_tokens": 200, "temperature": 0.0, "json_schema": schema}
    answer = engine.generate(PROMPT, params)
    assert json.loads(answer["text"])["a"] in ("x", "y")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    with pytest.raises(InvalidRequestError, match="regex"):
        engine.generate(PROMPT, {"regex": "(a"})
    assert stats(engine)["num_open"] == 0


def test_forced_tokens_are_jumped_over(engine):
    params = {"max_new_tokens": 60, "temperature": 0.0, "regex": "(yes|no), and that is final"}
    before = stats(engine)["counters"]["num_steps"]
    jumped = engine.generate(PROMPT, params)
    steps = stats(engine)["counters"]["num_steps"] - before
    stepwise = engine.generate(PROMPT, params, return_logprob=True)
    assert jumped["text"] == stepwise["text"]
    assert jumped["text"].endswith("and that is final")
    count = stepwise["meta_info"]["completion_tokens"]
    assert len(stepwise["meta_info"]["output_token_logprobs"]) == count
    assert steps < count / 2
    cut = engine.generate(PROMPT, {**params, "max_new_tokens": 9})
    assert cut["output_ids"] == jumped["output_ids"][:9]
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of 'prompt' and 'input_ids'"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({"prompt": []}, "empty list"),
        ({"prompt": 3}, "prompt"),
        ({"input_ids": [5000]}, "outside the vocabulary"),
        ({"input_ids": []}, "empty"),
        ({"prompt": "a", "sampling_params": {"heat": 1}}, "unknown sampling parameter 'heat'"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 values for 2 prompts"),
        ({"prompt": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "lora_path": "x"}, "adapter"),
    ],
)
def test_bad_arguments_are_named(engine, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(**arguments)


def test_a_prompt_that_cannot_fit_is_refused_and_the_rest_of_its_batch_aborted(engine):
    with pytest.raises(PromptTooLongError, match="tokens"):
        engine.generate(["a", "b " * 4000], {**GREEDY, "max_new_tokens": 1500})
    assert stats(engine)["num_open"] == 0


def test_a_request_id_in_use_is_refused(engine):
    stream = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 500}, stream=True, rid="mine")
    next(stream)
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        engine.generate("x", GREEDY, rid="mine")
    engine.abort("mine")
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.slow
def test_async_calls_run_together_and_cancel(engine):
    async def main() -> None:
        prompts = [f"{i} {PROMPT}" for i in range(6)]
        answers = await asyncio.gather(*(engine.async_generate(p, GREEDY) for p in prompts))
        expected = [engine.generate(p, GREEDY)["output_ids"] for p in prompts]
        assert [a["output_ids"] for a in answers] == expected
        stream = await engine.async_generate(PROMPT, GREEDY, stream=True)
        await anext(stream)
        await stream.aclose()
        events = [e async for e in await engine.async_generate(PROMPT, GREEDY, stream=True)]
        assert events[-1]["text"] == engine.generate(PROMPT, GREEDY)["text"]
        task = asyncio.create_task(
            engine.async_generate(PROMPT, {**GREEDY, "max_new_tokens": 3000})
        )
        while stats(engine)["num_open"] == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stats(engine)["num_open"] == 0

    asyncio.run(main())


@pytest.mark.slow
def test_many_threads_get_their_own_answers(engine):
    prompts = [PROMPT[i:] for i in range(8)]
    expected = [engine.generate(p, GREEDY)["output_ids"] for p in prompts]
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = engine.generate(prompts[i], GREEDY)["output_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(8)] == expected


def test_info_names_the_model_and_hides_secrets():
    with make(api_key="very secret", served_model_name="tiny") as one:
        info = one.get_server_info()
        assert "very secret" not in json.dumps(info)
        model = one.model_info()
        assert model["served_model_name"] == "tiny"
        assert model["chat_template"]
        assert {g["name"] for g in model["groups"]} == {"full", "window"}
        assert model["max_sequence_len"] > 0
        assert any("longest context" in line for line in one.start_log)
        assert one.tokenize(["ab"]) == [one.encode("ab")]
        assert one.detokenize(one.encode("ab")).endswith("ab")
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert one.generate(input_ids=one.encode_chat(chat), sampling_params=GREEDY)["text"]


@pytest.mark.slow
def test_deterministic_answers_do_not_depend_on_batch_or_cache():
    sampled = {"max_new_tokens": 20, "temperature": 1.5, "sampling_seed": 3, "ignore_eos": True}
    fields = {"return_logprob": True}
    with make(deterministic=True, dtype="float32") as one:
        alone = one.generate(PROMPT, sampled, **fields)
        others = [PROMPT[i:] + "!" for i in range(5)]
        together = one.generate([*others[:3], PROMPT, *others[3:]], sampled, **fields)[3]
        one.flush_cache()
        cold = one.generate(PROMPT, sampled, **fields)
    for answer in (together, cold):
        assert answer["output_ids"] == alone["output_ids"]
        lists = [a["meta_info"]["output_token_logprobs"] for a in (answer, alone)]
        assert lists[0] == lists[1]  # bit-equal floats


def test_a_failing_worker_ends_open_requests_and_refuses_later_ones(caplog):
    with make() as one:
        stream = one.generate(PROMPT, {**GREEDY, "max_new_tokens": 3000}, stream=True)
        next(stream)

        def fail(_batch: object) -> None:
            raise RuntimeError("planted")

        one._loop.call(lambda core: setattr(core.worker, "execute", fail))
        with pytest.raises(WorkerDiedError, match="planted"):
            list(stream)
        with pytest.raises(WorkerDiedError, match="planted"):
            one.generate(PROMPT, GREEDY)
        with pytest.raises(WorkerDiedError, match="planted"):
            one.flush_cache()
        one.abort("")
    assert "planted" in caplog.text


def test_shutdown_aborts_what_is_open_and_can_be_repeated():
    one = make()
    stream = one.generate(PROMPT, {**GREEDY, "max_new_tokens": 3000}, stream=True)
    next(stream)
    before = threading.active_count()
    one.shutdown()
    one.shutdown()
    assert threading.active_count() < before
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "the engine was shut down",
    }
    with pytest.raises(WorkerDiedError, match="shut down"):
        one.generate(PROMPT, GREEDY)


def test_without_a_tokenizer_ids_only():
    with make(skip_tokenizer_init=True) as one:
        answer = one.generate(input_ids=[65, 66, 67], sampling_params=GREEDY)
        assert answer["text"] == ""
        assert len(answer["output_ids"]) == 12
        with pytest.raises(InvalidRequestError, match="token ids only"):
            one.generate("text", GREEDY)
        with pytest.raises(InvalidRequestError, match="grammar"):
            one.generate(input_ids=[65], sampling_params={"regex": "a"})


def test_a_full_queue_refuses():
    with make(max_queued_requests=1, max_running_requests=1) as one:
        streams = [
            one.generate("x", {**GREEDY, "max_new_tokens": 2000}, stream=True) for _ in range(2)
        ]
        with pytest.raises(RefusedError, match="open"):
            one.generate("y", GREEDY)
        one.abort("")
        kinds = [list(s)[-1]["meta_info"]["finish_reason"]["type"] for s in streams]
        assert kinds == ["abort", "abort"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model_path": "/nowhere"}, ModelLoadError, "no such directory"),
        ({"dtype": "int3"}, InvalidRequestError, "dtype"),
        ({"kv_cache_dtype": "int3"}, InvalidRequestError, "kv_cache_dtype"),
        ({"load_format": "gguf"}, ModelLoadError, "load-format"),
        ({"page_sise": 1}, InvalidRequestError, "'page_sise'; did you mean 'page_size'"),
        ({"page_size": -1}, InvalidRequestError, "page_size"),
    ],
)
def test_unusable_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_importing_the_engine_imports_no_torch():
    code = (
        "import sys, statewise.runtime.engine.engine as e\n"
        "assert e.Engine and 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
