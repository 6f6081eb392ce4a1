"""Digests of a page's layers, as the kernels define them, without torch.

The digest of a layer's bytes is the one that device blocks have (kernels/blocks.py): the number
computed when a block was published, the one stored with the page, and the one computed over the
block it came back into are the same number. So a copy through any tier is confirmed by its two
ends, whatever lies between.

This module computes with numpy, at some hundred megabytes a second. It is for tools, tests and
simulations; a device computes the same digests by its kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Digests = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(x: Digests) -> Digests:
    x = (x ^ (x >> np.uint64(32))) * _MIX_A
    x = (x ^ (x >> np.uint64(29))) * _MIX_B
    return x ^ (x >> np.uint64(32))


def layer_digests(payload: Bytes, num_layers: int) -> Digests:
    """[num_layers] digests of a page's payload, whose layers follow each other in equal parts.

    ValueError where the payload is no whole number of layers.
    """
    if num_layers < 1 or payload.size % num_layers:
        raise ValueError(f"{payload.size} bytes are not {num_layers} equal layers")
    size = payload.size // num_layers
    num_words = -(-size // 8)
    words = np.zeros((num_layers, num_words * 8), dtype=np.uint8)
    words[:, :size] = payload.reshape(num_layers, size)
    keys = np.arange(1, num_words + 1, dtype=np.uint64) * _GOLDEN
    sums = _mix(words.view("<u8") ^ keys).sum(axis=1, dtype=np.uint64)
    return _mix(sums + np.uint64(size))


def differing_layers(expected: Digests, found: Digests) -> int:
    """Bit mask of the layers whose digests differ."""
    mask = 0
    for layer in np.flatnonzero(expected != found).tolist():
        mask |= 1 << layer
    return mask
