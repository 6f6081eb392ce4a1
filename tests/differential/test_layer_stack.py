"""A dense model's layers in one native call give what its operations give one by one, bit for bit.

Two models are loaded from the same files; one of them is refused the call. Both take the same
steps: prompts, single tokens, several rows, a few layers only. Hidden states and every byte of the
pools are compared, on each instruction set that this machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from statewise.kernels import cpu_backend, layer_stack
from statewise.kernels.coded import CodedWeight
from statewise.kernels.cpu_backend import CpuAttention, CpuOps
from statewise.kernels.interface import LayerStack, LayerWeights, StackShape
from statewise.runtime.models.dense import DenseDecoder
from statewise.runtime.models.tiny import TinySize
from support.model_driver import ModelDriver
from support.native_kernels import INSTRUCTION_SETS, native_setting, needs_native
from support.tiny import ARCHS, load_tiny, tiny_model, write_gguf

pytestmark = needs_native
SIZE = TinySize(head_dim=32)
VOCAB = 256

ALL_SETS = [
    pytest.param(name, marks=() if name == "amx" else pytest.mark.slow) for name in INSTRUCTION_SETS
]


class SingleOps(CpuOps):
    """The operations, one by one."""

    def stack(
        self, shape: StackShape, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> LayerStack | None:
        return None


def load(path: Path, dtype: torch.dtype, ops: CpuOps) -> DenseDecoder:
    model = load_tiny(path, dtype, ops=ops)
    assert isinstance(model, DenseDecoder)
    return model


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class Pair:
    """The same model twice, over pools of its own each."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        models = [load(path, dtype, ops) for ops in (CpuOps(), SingleOps())]
        assert models[0].stack is not None
        assert models[1].stack is None
        self.model = models[0]
        self.drivers = [
            ModelDriver(model, num_rows=3, max_len=128, backend=CpuAttention()) for model in models
        ]

    def step(self, *tokens: Tensor, num_layers: int | None = None) -> None:
        """Both take a step; everything must be the same afterwards."""
        one, other = (d.hidden(*tokens, num_layers=num_layers) for d in self.drivers)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(bits(a), bits(b))
        for layer, pool in self.drivers[0].pools.items():
            assert torch.equal(bits(pool), bits(self.drivers[1].pools[layer])), f"layer {layer}"


def compare(path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Steps of many shapes; the calls that were made are counted."""
    calls = []
    run = layer_stack.CpuLayerStack.run

    def counted(self: layer_stack.CpuLayerStack, hidden: Tensor, *rest: object) -> object:
        calls.append(hidden.shape[0])
        return run(self, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_stack.CpuLayerStack, "run", counted)
    monkeypatch.setattr(layer_stack, "MAX_TOKENS", 48)
    pair = Pair(path, dtype)
    ids = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(0))
    none = ids[:0]
    pair.step(ids[:40], none, ids[40:47])
    pair.step(ids[47:48], ids[48:70], ids[70:71])
    for i in range(71, 74):
        pair.step(ids[i : i + 1], ids[i + 3 : i + 4], ids[i + 6 : i + 7])
    pair.step(ids[80:81], none, none, num_layers=1)
    pair.step(none, none, ids[81:82], num_layers=2)
    pair.step(ids[82:131], none, none)  # too long: operation by operation
    pair.step(ids[131:132], ids[132:133], ids[133:134])
    assert calls == [47, 24, 3, 3, 3, 1, 1, 3]
    return pair


@pytest.mark.parametrize("name", ALL_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_layers_of_each_architecture(
    arch: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "MIN_PACKED_BYTES", 0)
    with native_setting(name, num_threads=2):
        compare(tiny_model(arch, SIZE), dtype, monkeypatch)


@pytest.mark.parametrize("name", ALL_SETS)
def test_biases_and_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama", SIZE, attention_bias=True, mlp_bias=True)
    with native_setting(name, num_threads=2):
        compare(path, torch.float16, monkeypatch)


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_weights_kept_as_codes(
    arch: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "MIN_PACKED_BYTES", 0)
    file = write_gguf(tiny_model(arch, SIZE), tmp_path / "m.gguf", gguf.GGMLQuantizationType[quant])
    with native_setting("amx", num_threads=2):
        pair = compare(file, torch.bfloat16, monkeypatch)
        assert isinstance(pair.model.layers[0].weights().qkv.weight, CodedWeight)


def test_a_bad_block_or_position_is_named() -> None:
    with native_setting(""):
        pair = Pair(tiny_model("gemma3", SIZE), torch.float32)
        driver = pair.drivers[0]
        driver.page_table[0, 0] = 1000
        with pytest.raises(IndexError, match="block 1000, the pool has"):
            driver.hidden(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))


def test_a_layer_that_shares_keys_and_values_writes_none() -> None:
    with native_setting(""):
        driver = Pair(tiny_model("llama", SIZE), torch.float32).drivers[0]
        tokens = [torch.tensor([i]) for i in range(3)]
        for pool in driver.pools.values():
            pool.zero_()
        driver.layer_pools = replace(driver.layer_pools, writes=(True, False, True, True))
        before = [bits(pool).clone() for pool in driver.pools.values()]
        driver.hidden(*tokens)
        after = [bits(pool) for pool in driver.pools.values()]
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
            False,
            True,
            False,
            False,
        ]


def test_pools_that_have_moved_are_found_again() -> None:
    with native_setting(""):
        pair = Pair(tiny_model("gemma3", SIZE), torch.float32)
        tokens = [torch.tensor([i]) for i in range(3)]
        pair.step(*tokens)
        driver = pair.drivers[0]
        for layer, pool in driver.pools.items():
            driver.pools[layer] = pool.clone()
            pool.fill_(float("nan"))
        del driver.layer_pools
        pair.step(*tokens)
        wrong = driver.pools[0].to(torch.float16)
        driver.pools[0] = wrong
        del driver.layer_pools
        with pytest.raises(ValueError, match="the plan is for"):
            driver.hidden(*tokens)


def test_what_single_operations_leave_to_torch_has_no_stack() -> None:
    with native_setting(""):
        model = load(tiny_model("llama", SIZE), torch.float64, CpuOps())
        assert model.stack is None
        pair = Pair(tiny_model("llama", SIZE), torch.float32)
        stack = pair.model.stack
        assert stack is not None
        assert not stack.takes(torch.zeros(1, 64), ["a plan of another backend"])
        assert not stack.takes(torch.zeros(layer_stack.MAX_TOKENS + 1, 64), [])
        assert not stack.takes(torch.zeros(1, 64, dtype=torch.bfloat16), [])
