"""F23, F35: state written under other weights, types, layouts or positions is never reused.

Tiny checkpoints with equal shapes and different contents, through the real engine.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from statewise.radix import CostModel, Namespace, TokenKey
from statewise.radix.schema import CacheSchema
from statewise.runtime.cache.prefix_cache import PrefixCache
from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.engine.build import build_runtime
from statewise.runtime.engine.core import EngineCore
from statewise.runtime.errors import InvalidRequestError, ModelLoadError, OperatingError
from statewise.runtime.messages import CacheOptions, CacheReport, TokenizedRequest, pack_ids
from statewise.runtime.models.tiny import TinySize, make_tiny_model
from statewise.runtime.sampling_params import SamplingParams

SIZE = TinySize(layers=4, window=16)
RNG = random.Random(3)
PROMPT = [RNG.randrange(256) for _ in range(60)]
ARCHITECTURES = ("llama", "gemma3")


def core_of(path: Path, **args: object) -> EngineCore:
    settings: dict[str, object] = {
        "model_path": str(path), "dtype": "float32", "skip_tokenizer_init": True,
        "page_size": 8, "num_threads": 1, "max_total_tokens": 1024, "audit": True,
        "chunked_prefill_size": 32, **args,
    }  # fmt: skip
    return build_runtime(ServerArgs(**settings)).core(SystemClock())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories "<arch>-a" and "<arch>-b": one shape, two random seeds."""
    root = tmp_path_factory.mktemp("models")
    for arch in ARCHITECTURES:
        for seed, letter in enumerate("ab"):
            make_tiny_model(arch, root / f"{arch}-{letter}", seed=seed, size=SIZE)
    return root


class Client:
    """Runs greedy requests on a core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.reports: dict[str, CacheReport] = {}
        self.versions: dict[str, str] = {}

    def add(self, rid: str, prompt: list[int], max_new: int) -> None:
        params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
        self.core.add_request(TokenizedRequest(rid, pack_ids(prompt), params, stream=True))

    def step(self) -> None:
        for delta in self.core.step():
            self.tokens.setdefault(delta.rid, []).extend(delta.token_ids)
            if delta.report is not None:
                self.reports[delta.rid] = delta.report
            self.versions[delta.rid] = delta.usage.weight_version

    def run(self, rid: str, prompt: list[int], max_new: int = 6) -> list[int]:
        self.add(rid, prompt, max_new)
        while self.core.has_work():
            self.step()
        return self.tokens[rid]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_f23_old_state_is_a_miss_after_an_update(arch: str, root: Path) -> None:
    client = Client(core_of(root / f"{arch}-a"))
    cold_b = Client(core_of(root / f"{arch}-b", disable_radix_cache=True)).run("cold", PROMPT)
    first = client.run("first", PROMPT)
    assert client.run("again", PROMPT) == first
    assert client.reports["again"].reused > 0
    pools = client.core.stats()["pools"]

    told = client.core.update_weights(str(root / f"{arch}-b"), "v2")

    assert told["weights_epoch"] == 1
    assert client.core.stats()["pools"] == pools, "no flush"
    assert client.run("new", PROMPT) == cold_b
    assert client.reports["new"].reused == 0
    assert client.versions["again"] == "default"
    assert client.versions["new"] == "v2"
    assert client.run("hit", PROMPT) == cold_b
    assert client.reports["hit"].level == "direct"
    client.core.flush()
    assert all(p.num_free == p.num_blocks for p in client.core.cache.pools)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_f23_an_update_amid_running_requests(arch: str, root: Path) -> None:
    """They keep what they have said and go on as a cold run of it under the new weights."""
    client = Client(core_of(root / f"{arch}-a"))
    oracle = Client(core_of(root / f"{arch}-b", disable_radix_cache=True))
    prompts = {f"r{i}": PROMPT[: 20 + 13 * i] for i in range(3)}
    for rid, prompt in prompts.items():
        client.add(rid, prompt, 24)
    for _ in range(8):
        client.step()
    said = {rid: list(client.tokens.get(rid, [])) for rid in prompts}
    assert any(said.values())
    told = client.core.update_weights(str(root / f"{arch}-b"))
    assert told["num_paused_requests"] == 3
    while client.core.has_work():
        client.step()
    for rid, prompt in prompts.items():
        rest = oracle.run(rid, prompt + said[rid], 24 - len(said[rid]))
        assert client.tokens[rid] == said[rid] + rest, rid


def test_weights_that_do_not_fit_change_nothing(root: Path, tmp_path: Path) -> None:
    client = Client(core_of(root / "llama-a"))
    first = client.run("first", PROMPT)
    make_tiny_model("llama", tmp_path / "deep", size=TinySize(layers=6, window=16))
    broken = tmp_path / "broken"
    shutil.copytree(root / "llama-b", broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:2000])
    for path, error, said in (
        (root / "gemma3-a", InvalidRequestError, "architecture"),
        (tmp_path / "deep", InvalidRequestError, "layers"),
        (tmp_path / "nowhere", ModelLoadError, "nowhere"),
        (broken, ModelLoadError, "safetensors"),
    ):
        with pytest.raises(error, match=said):
            client.core.update_weights(str(path))
    assert isinstance(ModelLoadError(""), OperatingError)
    assert client.run("again", PROMPT) == first
    assert client.reports["again"].level == "direct"
    assert client.core.weights_epoch == 0


# ------------------------------------------------------------------------- F35


def schema_of(path: Path, **args: object) -> CacheSchema:
    return core_of(path, **args).schema


def changed_rope(path: Path, target: Path) -> Path:
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text())
    found = False
    for holder in (config, config.get("rope_parameters") or {}):
        if isinstance(holder.get("rope_theta"), (int, float)):
            holder["rope_theta"] = holder["rope_theta"] * 2
            found = True
    assert found
    (target / "config.json").write_text(json.dumps(config))
    return target


def reused_pages(schema: CacheSchema, then: CacheSchema, epoch: int, adapter: str) -> int:
    """Pages that a prompt written under `schema` finds after the cache expects `then`."""
    cost = CostModel.uniform(schema.num_layers, 1000.0)
    cache = PrefixCache(schema, (64,) * schema.num_groups, cost)
    tokens = np.array(PROMPT, dtype=np.int32)
    size = schema.page_size
    end = len(tokens) // size * size
    sequence = cache.begin(cache.lookup(CacheOptions(), tokens, len(tokens)), len(tokens))
    cache.reserve(sequence, end)
    cache.commit(sequence, tokens, end, end, [])
    cache.finish(sequence, tokens, end)
    assert cache.lookup(CacheOptions(), tokens, end).position == end
    cache.expect(then, epoch)
    found = cache.lookup(CacheOptions(adapter=adapter), tokens, end)
    assert cache.tree.match(Namespace(), TokenKey(tokens)).logical_pages == end // size
    return found.position // size


@pytest.fixture(scope="module")
def base(root: Path) -> CacheSchema:
    return schema_of(root / "llama-a")


def test_f35_nothing_changed_is_a_hit(base: CacheSchema, root: Path) -> None:
    assert reused_pages(base, schema_of(root / "llama-a"), 0, "") == len(PROMPT) // 8


@pytest.mark.parametrize(
    "what", ["weights", "epoch", "dtype", "layout", "rope", "adapter", "kernel", "page geometry"]
)
def test_f35_exactly_one_change_is_a_miss(
    what: str, base: CacheSchema, root: Path, tmp_path: Path
) -> None:
    path = root / "llama-a"
    epoch, adapter, then = 0, "", base
    if what == "weights":
        then = schema_of(root / "llama-b")
    elif what == "epoch":
        epoch = 1
    elif what == "dtype":
        then = schema_of(path, kv_cache_dtype="bfloat16")
    elif what == "rope":
        then = schema_of(changed_rope(path, tmp_path / "rope"))
    elif what == "adapter":
        adapter = "french"
    else:
        word = {"layout": "NHD", "kernel": "other-backend", "page geometry": "P16"}[what]
        groups = (dataclasses.replace(g, layout_id=f"{g.layout_id}/{word}") for g in base.groups)
        then = dataclasses.replace(base, groups=tuple(groups))
    assert (then != base) == (what not in ("epoch", "adapter"))
    assert reused_pages(base, then, epoch, adapter) == 0


def test_f35_layouts_of_real_backends_name_type_geometry_and_page(root: Path) -> None:
    path = root / "llama-a"
    layouts = {
        schema_of(path, **args).groups[0].layout_id
        for args in ({}, {"kv_cache_dtype": "bfloat16"}, {"page_size": 16})  # type: ignore[arg-type]
    }
    assert len(layouts) == 3
