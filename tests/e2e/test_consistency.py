"""Audit, weights and observability of a running server, from outside; a tiny hybrid model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from statewise.frontend.cli import main
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from support.server_process import ServerProcess, model_server

pytestmark = pytest.mark.slow
IDS = [(7 * i) % 250 for i in range(120)]
SIZE = TinySize(layers=6, window=16)


def generate(server: ServerProcess) -> dict[str, Any]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": IDS, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def test_weights_audit_and_views(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, letter in enumerate("ab"):
        make_tiny_model("gemma3", tmp_path / letter, seed=seed, size=SIZE)
    events = tmp_path / "events.jsonl"
    flags = ("--page-size", "8", "--max-total-tokens", "1024", "--dtype", "float32",
             "--audit-rate", "1", "--log-events", str(events), "--num-threads", "1")  # fmt: skip
    with model_server(tmp_path / "b", *flags) as server:
        of_b = generate(server)["output_ids"]
    with model_server(tmp_path / "a", *flags) as server:
        of_a = generate(server)["output_ids"]
        hit = generate(server)
        assert hit["output_ids"] == of_a != of_b
        assert hit["meta_info"]["cache_report"]["level"] == "direct"

        # What is cached, as text and as a page.
        assert main(["cache", "dump", server.url]) == 0
        assert "window=" in capsys.readouterr().out
        assert server.get("/cache?format=svg").text.startswith("<svg")
        assert "<svg" not in server.get("/cache/ui").text
        assert server.get("/cache?format=jpeg").status_code == 400
        cost = server.get("/get_server_info").json()["internal_states"][0]["cost_model"]
        assert cost["tokens_per_s"][0][0] > 0

        # Weights that cannot be used change nothing; others make a miss.
        bad = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "none")})
        assert (bad.status_code, bad.json()["success"]) == (400, False)
        assert generate(server)["output_ids"] == of_a
        path = str(tmp_path / "b")
        good = server.post(
            "/update_weights_from_disk", {"model_path": path, "weight_version": "second"}
        )
        assert good.json()["success"] is True, good.text
        new = generate(server)
        assert new["output_ids"] == of_b
        assert new["meta_info"]["cache_report"]["reused"] == 0
        assert new["meta_info"]["weight_version"] == "second"
        assert server.get("/model_info").json()["model_path"] == path

        # A scheduler that is restarted loads the weights that were served last.
        server.children()["scheduler"].kill()
        while server.get("/health").status_code == 200:
            pass
        server.wait_healthy(60.0)
        again = generate(server)
        assert again["output_ids"] == of_b
        assert again["meta_info"]["weight_version"] == "second"
    told = [json.loads(line) for line in events.read_text().splitlines()]
    kinds = {event["event"] for event in told}
    assert {"transition", "recovery_planned", "weights_updated"} <= kinds
    assert "validation_failed" in kinds, "the state of the old weights, at the new ones' first hit"
