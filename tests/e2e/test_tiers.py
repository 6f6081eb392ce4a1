"""A server with a disk cache, from outside: stopped, killed, started again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.server_process import ServerProcess, model_server

pytestmark = pytest.mark.slow
IDS = [(7 * i) % 250 for i in range(400)]
SIZE = TinySize(layers=6, window=16)


def generate(server: ServerProcess) -> dict[str, Any]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": IDS, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def stored_pages(server: ServerProcess, name: str = "disk") -> int:
    """Pages in a tier, once no more are being written."""
    last = -1
    for _ in range(200):
        (state,) = server.get("/server_info").json()["internal_states"]
        (tier,) = [tier for tier in state["tiers"] if tier["tier"] == name]
        if tier["pages"] and tier["pages"] == last:
            return last
        last = tier["pages"]
        time.sleep(0.2)
    raise AssertionError("nothing was stored")


def test_a_second_server_finds_what_the_first_left_in_a_shared_folder(tmp_path: Path) -> None:
    make_tiny_model("gemma3", tmp_path / "m", size=SIZE)
    flags = ("--page-size", "8", "--max-total-tokens", "2048", "--dtype", "float32",
             "--num-threads", "1", "--no-calibrate",
             "--remote-cache", (tmp_path / "shared").as_uri())  # fmt: skip
    with model_server(tmp_path / "m", *flags) as server:
        cold = generate(server)
        wait_for_metric(server, 'statewise:probes_total{model_name="m",outcome="absent"} 1.0')
        stored_pages(server, "remote")
    with model_server(tmp_path / "m", *flags) as server:
        warm = generate(server)
        assert warm["output_ids"] == cold["output_ids"]
        assert warm["meta_info"]["cache_report"]["loaded_from"] == {"remote": 392}
        wait_for_metric(server, 'statewise:probes_total{model_name="m",outcome="found"} 1.0')
        assert server.post("/flush_cache", {}).status_code == 200
        again = generate(server)
        assert again["output_ids"] == cold["output_ids"]


def wait_for_metric(server: ServerProcess, text: str) -> None:
    """The scheduler's numbers come with its next sign of life."""
    for _ in range(50):
        if text in server.get("/metrics").text:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {text} in {server.get('/metrics').text}")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_restarted_server_is_warm(ending: signal.Signals, tmp_path: Path) -> None:
    make_tiny_model("gemma3", tmp_path / "m", size=SIZE)
    flags = ("--page-size", "8", "--max-total-tokens", "2048", "--dtype", "float32",
             "--num-threads", "1", "--disk-cache-dir", str(tmp_path / "cache"),
             "--disk-cache-gb", "0.1", "--host-cache-gb", "0.01", "--no-calibrate")  # fmt: skip
    with model_server(tmp_path / "m", *flags) as server:
        cold = generate(server)
        assert cold["meta_info"]["cache_report"]["matched"] == 0
        stored_pages(server)
        if ending is signal.SIGKILL:
            server.children()["scheduler"].kill()
            server.popen.kill()
        else:
            server.stop()
    with model_server(tmp_path / "m", *flags) as server:
        warm = generate(server)
        assert warm["output_ids"] == cold["output_ids"]
        meta = warm["meta_info"]
        report = meta["cache_report"]
        assert (report["level"], report["loaded"]) == ("load", 392)
        assert report["loaded_from"] == {"disk": 392}
        assert meta["cached_tokens"] == 392
        assert meta["cached_tokens_details"]["storage"] == 392
        wait_for_metric(server, 'statewise:tier_bytes{model_name="m",tier="disk"}')
        wait_for_metric(server, "statewise:loaded_pages_total{")
        assert server.post("/flush_cache", {}).status_code == 200
        again = generate(server)
        assert again["output_ids"] == cold["output_ids"]
        assert again["meta_info"]["cache_report"]["matched"] == 0, "a flush reaches every tier"
