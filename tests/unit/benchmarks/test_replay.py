"""Trace replay: the bound against exhaustive search, malformed files, figures, the plot."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from statewise.radix import CheckpointPolicy, Tier

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
KEYS = {
    "logical_hit_rate", "effective_reuse_rate", "lru_effective_reuse_rate",
    "optimal_effective_reuse_rate", "recomputed_tokens", "bytes_by_group", "seconds",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    """The benchmark's package, without its folder on the path: others' names live there."""
    folder = BENCHMARKS / "replaying"
    spec = spec_from_file_location(
        "replaying", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["replaying"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "replaying"]:
        del sys.modules[name]


def part(name: str) -> ModuleType:
    return importlib.import_module(f"replaying.{name}")


def sample(tmp_path: Path, conversations: int = 40) -> Path:
    path = tmp_path / "sample.jsonl"
    part("sample").write_sample(path, conversations, seed=1)
    return path


def line(**changes: object) -> str:
    fields: dict[str, object] = {
        "timestamp": 5, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2],
    }  # fmt: skip
    return json.dumps({k: v for k, v in (fields | changes).items() if v != "absent"})


# ------------------------------------------------------------------ the bound


def closed_sets(parents: dict[int, int], capacity: int) -> list[frozenset[int]]:
    """Every set of at most `capacity` blocks that has the parent of each of its blocks."""
    found = []
    for size in range(capacity + 1):
        for chosen in combinations(sorted(parents), size):
            if all(parents[b] in (-1, *chosen) for b in chosen):
                found.append(frozenset(chosen))
    return found


def exhaustive_best(trace: list[Any], capacity: int) -> tuple[int, int]:
    """Most that any cache could hit, every content after every request being tried.

    (whole blocks in tokens, tokens saved although a prompt's last one is always computed)
    """
    worth = [
        lambda request, depth: 512 * depth,
        lambda request, depth: part("bound").usable_tokens(request, depth, 128),
    ]
    best = [_exhaustive_best(trace, capacity, of_hit) for of_hit in worth]
    return best[0], best[1]


def _exhaustive_best(trace: list[Any], capacity: int, worth: Callable[[Any, int], int]) -> int:
    parents: dict[int, int] = {}
    for request in trace:
        for before, now in zip((-1, *request.blocks), request.blocks, strict=False):
            parents[now] = before
    contents = closed_sets(parents, capacity)
    best = {frozenset[int](): 0}
    for request in trace:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            depth = 0
            while depth < len(request.blocks) and request.blocks[depth] in held:
                depth += 1
            total = hits + worth(request, depth)
            reachable = held | set(request.blocks)
            for content in contents:
                if content <= reachable and after.get(content, -1) < total:
                    after[content] = total
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_best_that_any_cache_of_history_could_do(seed: int) -> None:
    rng = random.Random(seed)
    tree = {0: -1}
    for block in range(1, 7):
        tree[block] = rng.choice(list(tree))
    trace = []
    for _ in range(7):
        path, at = [], rng.choice(list(tree))
        while at >= 0:
            path.append(at)
            at = tree[at]
        path.reverse()
        length = 512 * len(path) + rng.choice([0, 7])
        trace.append(part("trace").TraceRequest(length, tuple(path)))
    for capacity in range(5):
        found = part("bound").best_hits(trace, capacity)[-1]
        blocks, saved = exhaustive_best(trace, capacity)
        assert found == blocks >= saved


@pytest.mark.parametrize("policy", ["value", "recency", "lru"])
@pytest.mark.parametrize("schema_name", ["smollm2-135m", "gemma3-270m"])
def test_no_policy_exceeds_the_bound_and_every_token_is_accounted_for(
    policy: str, schema_name: str, tmp_path: Path
) -> None:
    trace = part("trace").read_trace(sample(tmp_path))
    schema = part("schemas").SCHEMAS[schema_name]()
    infinite = part("bound").infinite_cache(trace, schema.page_size)
    budget = part("pools").infinite_bytes(schema, infinite) // 8
    pools = part("pools").split(schema, budget, 0.25, 2048)
    assert sum(pools.group_bytes) <= budget
    world = part("world").World(schema, pools.num_blocks, policy, CheckpointPolicy(), 1e4)
    done: list[int] = []
    outcome = world.replay(trace, done.append)
    bound = part("bound").best_hits(trace, pools.history_blocks)
    assert 0 < outcome.reused <= min(bound[-1], infinite.hit_tokens)
    assert outcome.prompt == sum(request.prompt_len for request in trace)
    assert outcome.logical == outcome.reused + outcome.repaired + outcome.recomputed
    assert done == list(range(1, len(trace) + 1))


def test_a_cache_that_holds_everything_reuses_what_the_endless_one_does(tmp_path: Path) -> None:
    trace = part("trace").read_trace(sample(tmp_path))
    schema = part("schemas").smollm2_135m()
    infinite = part("bound").infinite_cache(trace, schema.page_size)
    pages = infinite.num_blocks * 512 // schema.page_size
    world = part("world").World(schema, (pages,), "value", CheckpointPolicy(), 1e4)
    assert world.replay(trace, lambda _: None).reused == infinite.hit_tokens


@pytest.mark.parametrize(("schema_name", "share"), [("smollm2_135m", 0.2), ("gemma3_270m", 0.05)])
def test_what_left_the_device_comes_back_from_a_disk_that_holds_everything(
    tmp_path: Path, schema_name: str, share: float
) -> None:
    trace = part("trace").read_trace(sample(tmp_path))
    schema = getattr(part("schemas"), schema_name)()
    infinite = part("bound").infinite_cache(trace, schema.page_size)
    whole = part("pools").infinite_bytes(schema, infinite)
    few, all_ = (
        part("pools").split(schema, int(whole * part_of_all), 0.125, 2048).num_blocks
        for part_of_all in (share, 1.0)
    )
    slow = {
        Tier.HOST: part("slower").SlowTier(few, 8e9),
        Tier.DISK: part("slower").SlowTier(all_, 2e9),
    }
    alone = part("world").World(schema, few, "value", CheckpointPolicy(), 1e4)
    alone.replay(trace, lambda _: None)
    world = part("world").World(schema, few, "value", CheckpointPolicy(), 1e4, slow)
    outcome = world.replay(trace, lambda _: None)
    assert outcome.used > alone.outcome.used
    assert set(outcome.loaded) == {"host", "disk"}
    assert outcome.logical == outcome.used + outcome.repaired + outcome.recomputed
    assert outcome.used + outcome.repaired == infinite.hit_tokens
    assert bool(outcome.repaired) == (schema.num_groups > 1), "a first branch lacks its window"


def test_v4_flash_history_costs_what_its_configuration_says() -> None:
    schema = part("schemas").deepseek_v4_flash()
    per_token = schema.bytes_per_token()
    assert sum(per_token[name] for name in ("csa", "idx", "hca")) == 6880
    assert per_token["swa"] == 43 * 1024
    assert [len(g.layers) for g in schema.groups] == [43, 21, 21, 20, 21, 20]


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("{", "line", "not JSON"),
        ("[1]", "line", "not a JSON object"),
        (line(timestamp="x"), "timestamp", "expected an integer"),
        (line(timestamp=1), "timestamp", "1 is less than 2"),
        (line(input_length=0), "input_length", "less than 1"),
        (line(input_length=True), "input_length", "expected an integer"),
        (line(output_length="absent"), "output_length", "found None"),
        (line(hash_ids="absent"), "hash_ids", "expected a list"),
        (line(hash_ids=[0, 1]), "hash_ids", "2 ids for 1100 tokens, which are 3 blocks"),
        (line(hash_ids=[0, -1, 2]), r"hash_ids\[1\]", "-1 is no id"),
        (line(hash_ids=[0, 2, 1]), "hash_ids", "2 follows 0 here and 1 on an earlier line"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(
    text: str, field: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{line(timestamp=2)}\n\n{text}\n", encoding="utf-8")
    with pytest.raises(part("trace").TraceError, match=rf"broken\.jsonl:3: {field}: .*{problem}"):
        part("trace").read_trace(path)


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(part("trace").TraceError, match="holds no request"):
        part("trace").read_trace(path)


def test_tokens_are_shared_exactly_where_ids_are() -> None:
    made = part("trace").TraceRequest(1100, (7, 9)).tokens()
    other = part("trace").TraceRequest(1024, (7, 8)).tokens()
    assert len(set(made.tolist())) == 1024
    assert (made[:512] == other[:512]).all()
    assert not set(made[512:].tolist()) & set(other[512:].tolist())


def test_the_plot_is_a_picture_with_every_curve(tmp_path: Path) -> None:
    curves = [part("plot").Curve("a < b", [0.1, 0.2]), part("plot").Curve("c", [0.05, 0.1])]
    path = tmp_path / "plot.svg"
    part("plot").write_plot(path, "title & more", curves)
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert "a < b 0.200" in texts
    assert "title & more" in texts
    assert sum(e.tag.endswith("polyline") for e in root.iter()) == 2


def test_the_command_writes_figures_and_a_plot(tmp_path: Path) -> None:
    command = [
        sys.executable, "-P", str(BENCHMARKS / "replay.py"), str(sample(tmp_path, 15)),
        "--schema", "gemma3-270m", "--budget", "0.2", "--policy", "value",
        "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert figures.keys() >= KEYS
    assert 0 < figures["effective_reuse_rate"] <= figures["optimal_effective_reuse_rate"]
    assert sum(figures["bytes_by_group"].values()) <= figures["budget_bytes"]
    assert "100 %" in done.stderr
    assert (tmp_path / "out.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_command_says_what_is_wrong_with_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(line(hash_ids=[3]) + "\n", encoding="utf-8")
    command = [sys.executable, "-P", str(BENCHMARKS / "replay.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "broken.jsonl:1: hash_ids: 1 ids for 1100 tokens" in done.stderr
    assert "Traceback" not in done.stderr
