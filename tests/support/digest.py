"""The digest model: what a simulated model computes, exact and order-sensitive, in integers.

A stack of layers, each reading the state groups that own it (or share their owner's state), works
over 64-bit words with wrap-around:

    hidden[0, t]     = mix(token, t, owner)            owner: weights epoch and cache salt
    hidden[l+1, t]   = mix(hidden[l, t], readout of each group of layer l, l)
    next token       = mix(hidden[L, t]) % vocab

    group           state                                      readout at t
    FULL            e[t] = mix(hidden, t, key)                 sum of e[i] * odd(i), i <= t
    WINDOW, CHUNKED the same                                   ... i in the window, sinks
    TAIL(m, o)      raw[t] = mix(hidden, t, key), open window  nothing
    COMPRESSED(m)   c[j] = mix(sum of raw[i] * odd(i),         sum of c[j] * odd(j) over the
                    mj - o <= i < m(j+1); key)                 complete ones that are routed
    INDEX(m)        x[j] = mix(the same sum, key)              routes: bit (hidden & 1) of x[j]
    RECURRENT       s = s * STEP + mix(hidden, t, key)         mix(s)

The dependency structure is that of the real models: a missing, stale, misplaced, half-written or
foreign block changes the output at once, and a window layer is exact only W-1 tokens after its
inputs are. Wrapping sums make every chunking bit-equal.

This module holds the words' arithmetic; `digest_cold` runs it token by token without any cache,
`digest_worker` runs it over block pools.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from statewise.radix.schema import CacheSchema, GroupKind

U64 = NDArray[np.uint64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MASK = (1 << 64) - 1
POISON = 0xDEADBEEFDEADBEEF
STEP = 0x9FB21C651E98DF25  # odd: multiplying can be undone
STEP_INVERSE = pow(STEP, -1, 1 << 64)
WEIGHTS = (
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3,
)
FINAL = 0xFF51AFD7ED558CCD
SEED = 0x9E3779B97F4A7C15
_W = [np.uint64(w) for w in WEIGHTS]
_FINAL, _SEED = np.uint64(FINAL), np.uint64(SEED)
_32, _29 = np.uint64(32), np.uint64(29)
MAX_TOKENS = 8192


def mix_int(*parts: int) -> int:
    """A 64-bit word that depends on every part and its place."""
    x = SEED
    for part, weight in zip(parts, WEIGHTS, strict=False):
        x += (part & MASK) * weight
    x &= MASK
    x = ((x ^ (x >> 32)) * FINAL) & MASK
    x = ((x ^ (x >> 29)) * WEIGHTS[0]) & MASK
    return x ^ (x >> 32)


def mix(first: U64, *parts: U64 | int) -> U64:
    """`mix_int`, elementwise."""
    x = first * _W[0]
    constant = SEED
    for part, weight in zip(parts, _W[1:], strict=False):
        if isinstance(part, int):
            constant += (part & MASK) * int(weight)
        else:
            x = x + part * weight
    x = x + np.uint64(constant & MASK)
    x ^= x >> _32
    x *= _FINAL
    x ^= x >> _29
    x *= _W[0]
    x ^= x >> _32
    return x


def odd_int(position: int) -> int:
    """An odd multiplier per position: a sum of entries depends on where each stands."""
    return mix_int(position, 77) | 1


POSITIONS: U64 = np.arange(MAX_TOKENS, dtype=np.uint64)
ODD: U64 = mix(POSITIONS, 77) | np.uint64(1)


def _powers(base: int) -> U64:
    out, power = np.empty(MAX_TOKENS + 1, dtype=np.uint64), 1
    for i in range(MAX_TOKENS + 1):
        out[i] = power
        power = power * base & MASK
    return out


STEPS, INVERSE_STEPS = _powers(STEP), _powers(STEP_INVERSE)


def key_of(group: int, layer: int) -> int:
    """What tells one layer's state of one group from all others."""
    return 1000 + 64 * layer + group


def owner_of(salt: str, epoch: int) -> int:
    """Whose state it is: no two salts or weights compute the same digests."""
    return zlib.crc32(salt.encode()) * 65536 + epoch


def next_token(hidden: int, vocab: int) -> int:
    """Greedy choice from the last hidden digest."""
    return mix_int(hidden, 5) % vocab


@dataclass(frozen=True)
class Compressor:
    """Groups that make and route compressed entries of one layer; -1: none."""

    entries: int
    index: int
    tail: int


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does, in order: group indices, paired with the layer whose state it is."""

    paged: tuple[tuple[int, int, bool], ...]  # (group, owning layer, is the owner)
    compressors: tuple[Compressor, ...]
    recurrent: tuple[int, ...]

    @property
    def groups(self) -> set[int]:
        """Every group that the layer reads or writes."""
        made = {g for c in self.compressors for g in (c.entries, c.index, c.tail) if g >= 0}
        return made | {g for g, _, _ in self.paged} | set(self.recurrent)


@lru_cache(maxsize=64)
def layer_plans(schema: CacheSchema) -> tuple[LayerPlan, ...]:
    """One plan per layer."""
    plans = []
    for layer in range(schema.num_layers):
        paged, compressors, recurrent = [], [], []
        for g, spec in enumerate(schema.groups):
            mine = layer in spec.layers
            if spec.kind is GroupKind.RECURRENT and mine:
                recurrent.append(g)
            elif spec.kind is GroupKind.COMPRESSED and mine:
                compressors.append(_compressor(schema, g, layer))
            elif spec.kind is GroupKind.FULL or spec.kind.is_window:
                owner = layer if mine else dict(spec.shared_layers).get(layer, -1)
                if owner >= 0:
                    paged.append((g, owner, mine))
        plans.append(LayerPlan(tuple(paged), tuple(compressors), tuple(recurrent)))
    return tuple(plans)


def _compressor(schema: CacheSchema, entries: int, layer: int) -> Compressor:
    index, tail = -1, -1
    for g, spec in enumerate(schema.groups):
        if layer not in spec.layers or spec.ratio != schema.groups[entries].ratio:
            continue
        if spec.kind is GroupKind.INDEX and spec.depends_on == schema.groups[entries].name:
            index = g
        elif spec.kind is GroupKind.TAIL:
            tail = g
    assert tail >= 0, "a compressor keeps its open window in a tail"
    return Compressor(entries, index, tail)
