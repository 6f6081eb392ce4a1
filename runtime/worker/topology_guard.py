"""A fixed execution plan must not run over memory that has moved.

    capture   addresses, shapes, strides of everything the plan reads or writes, frozen
    check     before each run: the same memory is still there, or `TopologyChangedError`

Whatever is prepared once and run many times (the layer router here, a captured graph on a device)
holds addresses. Demoting a block, changing a form or growing a page table changes only contents
and passes; replacing, resizing or re-laying a pool does not. Who changes memory on purpose
captures again before the next run. Device-neutral: an address is an address.

This module does not own memory, and does not rebuild anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from statewise.runtime.memory.block_store import DeviceStore


class TopologyChangedError(AssertionError):
    """A plan was about to run over memory other than it was made for (a programmer error)."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies and how it is laid out; sizes in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class TopologyGuard:
    """Fingerprint of named tensors at the moment a plan was made."""

    places: Mapping[str, TensorPlace]

    @classmethod
    def capture(cls, tensors: Mapping[str, Tensor]) -> TopologyGuard:
        """Take the fingerprint; keeps no reference to the tensors."""
        return cls({name: place_of(tensor) for name, tensor in tensors.items()})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare with what is there now; raises `TopologyChangedError` naming what differs."""
        if len(tensors) == len(self.places) and all(
            _same(tensor, self.places.get(name)) for name, tensor in tensors.items()
        ):
            return
        raise TopologyChangedError(
            "memory has moved under a fixed plan; capture it again first: "
            + "; ".join(self._differences(tensors))
        )

    def _differences(self, tensors: Mapping[str, Tensor]) -> list[str]:
        found = [f"{name} is gone" for name in self.places if name not in tensors]
        for name, tensor in tensors.items():
            was, now = self.places.get(name), place_of(tensor)
            if was is None:
                found.append(f"{name} is new")
            elif was != now:
                parts = [p for p in TensorPlace.__slots__ if getattr(was, p) != getattr(now, p)]
                found.append(f"{name}: another {', '.join(parts)}")
        return found[:8]


def pool_tensors(store: DeviceStore) -> dict[str, Tensor]:
    """Every pool tensor of a store by "group/layer": what the router of a runner relies on."""
    return {
        f"{pool.spec.name}/{layer}": tensor
        for pool in store.groups
        for layer, tensor in zip(pool.spec.layers, pool.layers, strict=True)
    }


def place_of(tensor: Tensor) -> TensorPlace:
    """Return where a tensor lies now."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return TensorPlace(tensor.data_ptr(), shape, strides, str(tensor.dtype), str(tensor.device))


def _same(tensor: Tensor, place: TensorPlace | None) -> bool:
    """Whether a tensor is where and what it was."""
    return (
        place is not None
        and tensor.data_ptr() == place.address
        and tensor.shape == place.shape
        and tensor.stride() == place.strides
        and str(tensor.dtype) == place.dtype
    )
