"""The alert rules, the dashboard and the documentation name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from statewise.runtime.server.metrics import Metrics
from support.engine import Driver, make_schema

DOCS = Path(__file__).parents[3] / "docs"
NAME = re.compile(r"statewise:([a-z0-9_]+)")
SUFFIX = re.compile(r"_(bucket|count|sum)$")


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of all metric families, counters with `_total`."""
    d = Driver(make_schema("FWF", 8, 12), (32, 32), audit_rate=1.0)
    for i in range(2):
        d.serve(f"r{i}", list(range(1, 40)), 2)
    metrics = Metrics("m", with_sglang_names=False)
    metrics.engine_stats = d.core.stats
    kinds = re.findall(r"# TYPE statewise:(\S+) (\S+)", metrics.render().decode())
    return {name for name, _ in kinds}


def used_in(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in NAME.findall(text)}


@pytest.mark.parametrize("file", ["observability/alerts.yml", "observability/grafana.json"])
def test_names_exist(file: str, known: set[str]) -> None:
    used = used_in((DOCS / file).read_text())
    assert len(used) > 8
    assert used - known == set()


def test_documented_names_exist(known: set[str]) -> None:
    text = (DOCS / "observability.md").read_text()
    table = text[text.index("## Metrics") : text.index("## Audit")]
    names = {n for line in table.splitlines() if line.startswith("| `") for n in
             re.findall(r"`([a-z_]+)`", line.split("|")[1])}  # fmt: skip
    assert names - known == set()


def test_rules_are_complete() -> None:
    rules = yaml.safe_load((DOCS / "observability/alerts.yml").read_text())["groups"][0]["rules"]
    text = (DOCS / "observability.md").read_text()
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert f"`{rule['alert']}`" in text


def test_the_dashboard_has_panels_that_ask_something() -> None:
    board = json.loads((DOCS / "observability/grafana.json").read_text())
    graphs = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"] for panel in graphs for target in panel["targets"])
