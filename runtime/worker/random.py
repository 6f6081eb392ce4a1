"""Random numbers by counter: the draw of a request depends on its seed and index alone.

A stateful generator would make a request's tokens depend on who else drew from it. Here draw
`index` of seed `seed` is a hash of the two (the finaliser of SplitMix64, applied twice), so the
same request repeats in any batch, after any preemption, and on any worker.

Not for secrets.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Permute the 64-bit integers so that every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """Draw `index` of `seed`: a multiple of 2**-53 in [0, 1)."""
    base = mix64((seed + _GOLDEN) & _MASK)
    return (mix64((base + _GOLDEN * (index + 1)) & _MASK) >> 11) * 2.0**-53
