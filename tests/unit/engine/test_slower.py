"""Slower tiers from settings: codecs chosen by measurement, and what cannot be measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from statewise.runtime.engine import slower
from statewise.runtime.engine.engine import Engine
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.tiers.codec import Bytes
from support.tiny import tiny_model

GREEDY = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
PROMPT = "a prompt of some length, long enough for three windows of the tiny model"


def settings(directory: Path, **more: object) -> dict[str, Any]:
    return {
        "model_path": str(tiny_model("gemma3")),
        "dtype": "float32",
        "max_total_tokens": 4096,
        "page_size": 8,
        "chunked_prefill_size": 64,
        "num_threads": 1,
        "disk_cache_dir": str(directory / "disk"),
        "disk_cache_gb": 0.01,
        "remote_cache": f"file://{directory / 'remote'}",
        **more,
    }


def tiers(engine: Engine) -> dict[str, dict[str, Any]]:
    state = engine.get_server_info()["internal_states"][0]
    return {tier["tier"]: tier for tier in state["tiers"]}


@pytest.mark.slow
def test_codecs_are_chosen_for_each_medium_on_state_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement sees real payloads and the medium's rate; what it says is what is stored."""
    asked: list[float] = []

    def choose(samples: Sequence[Bytes], item_bytes: int, rate: float, _clock: object) -> str:
        assert samples
        assert all(sample.any() for sample in samples)
        assert item_bytes == 4
        asked.append(rate)
        return ["zstd", "shuffle-lz4"][len(asked) - 1]

    monkeypatch.setattr(slower, "choose_codec", choose)
    monkeypatch.setattr(slower.SlowerTiers, "_medium_rate", lambda _self, _clock: 3e9)
    (tmp_path / "remote").mkdir()
    auto = {"disk_cache_codec": "auto", "remote_cache_codec": "auto"}
    with Engine(**settings(tmp_path, **auto)) as engine:
        assert asked == [3e9, 1e8]
        engine.generate(PROMPT, GREEDY)
        state = tiers(engine)
        assert (state["disk"]["codec"], state["remote"]["codec"]) == ("zstd", "shuffle-lz4")


def test_a_codec_is_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    with Engine(**settings(tmp_path, disk_cache_codec="lz4", calibrate=False)) as engine:
        state = tiers(engine)
        assert (state["disk"]["codec"], state["remote"]["codec"]) == ("lz4", "none")


def test_what_is_to_be_measured_must_be_allowed_to_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="name a codec"):
        Engine(**settings(tmp_path, disk_cache_codec="auto", calibrate=False))


def test_lossy_tiers_are_loud_and_a_request_may_decline(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    with Engine(**settings(tmp_path, lossy_tiers="int8", calibrate=False)) as engine:
        assert engine.get_server_info()["model"]["exact"] is False
        first = engine.generate(PROMPT, GREEDY)
        exact = engine.generate(PROMPT, GREEDY, exact=True)
        assert exact["output_ids"] == first["output_ids"]
        assert exact["meta_info"]["cache_report"]["matched"] == 0  # it shares with its like only
        again = engine.generate(PROMPT, GREEDY, exact=True)
        assert again["meta_info"]["cache_report"]["reused"] > 0
    with Engine(**settings(tmp_path, calibrate=False)) as engine:
        assert engine.get_server_info()["model"]["exact"] is True
        engine.generate(PROMPT, GREEDY)
        exact = engine.generate(PROMPT, GREEDY, exact=True)  # all state is: it shares with all
        assert exact["meta_info"]["cache_report"]["reused"] > 0


@pytest.mark.slow
def test_a_slow_medium_is_as_slow_as_its_records_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans count the device's bytes: a record has a header beside them, or fewer, if lossy."""
    monkeypatch.setattr(slower.SlowerTiers, "_medium_rate", lambda _self, _clock: 1e6)
    (tmp_path / "remote").mkdir()
    rates = []
    for lossy in ("none", "int8"):
        with Engine(**settings(tmp_path, lossy_tiers=lossy, page_size=64)) as engine:
            state = engine.get_server_info()["internal_states"][0]
            rates.append(state["cost_model"]["tiers"]["disk"]["bytes_per_s"])
    assert 0.5e6 < rates[0] < 0.95e6
    assert rates[1] > 1.5 * rates[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"deterministic": True}, "exclude each other"),
        ({"disk_cache_dir": "", "disk_cache_gb": 0.0, "remote_cache": ""}, "name one"),
        ({"lossy_tiers": "int4"}, "none, int8, fp8"),
    ],
)
def test_lossy_tiers_that_make_no_sense_are_refused(
    more: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Engine(**settings(tmp_path, **({"lossy_tiers": "int8"} | more)))
