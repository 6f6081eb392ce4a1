"""State groups of the models that a trace is replayed for: real geometry, no weights.

    smollm2-135m        30 layers of full attention, 3 KV heads of 64
    gemma3-270m         3 full layers and 15 with a window of 512; 1 KV head of 256
    deepseek-v4-flash   43 layers with a window of 128; 21 of them also compress by 4 and are
                        indexed, 20 compress by 128; raw tails of both compressors

All in bf16, tails in float32. A page is 128 tokens: the least common multiple of V4's ratios.

This module does not load models: `statewise.runtime.models` derives the same groups from a
checkpoint's configuration.
"""

from __future__ import annotations

from statewise.radix import CacheSchema, GroupKind, StateGroupSpec

PAGE_SIZE = 128
KIB = 1024


def _group(
    name: str, kind: GroupKind, layers: range | tuple[int, ...], **more: int
) -> StateGroupSpec:
    return StateGroupSpec(name, kind, tuple(layers), "bf16", "v1", **more)  # type: ignore[arg-type]


def smollm2_135m() -> CacheSchema:
    """SmolLM2-135M."""
    full = _group("full", GroupKind.FULL, range(30), entry_bytes=2 * 2 * 3 * 64)
    return CacheSchema(PAGE_SIZE, 30, (full,), "smollm2-135m")


def gemma3_270m() -> CacheSchema:
    """Gemma 3 270M: every sixth layer is full."""
    entry = 2 * 2 * 256
    wide = tuple(range(5, 18, 6))
    narrow = tuple(layer for layer in range(18) if layer not in wide)
    full = _group("full", GroupKind.FULL, wide, entry_bytes=entry)
    window = _group("window", GroupKind.WINDOW, narrow, entry_bytes=entry, window=512)
    return CacheSchema(PAGE_SIZE, 18, (full, window), "gemma3-270m")


def deepseek_v4_flash() -> CacheSchema:
    """DeepSeek-V4 Flash: two windowed layers, then compression by 4 and by 128 in turn."""
    sparse, dense = range(2, 43, 2), range(3, 43, 2)
    entry, index = 2 * 512, 2 * 128
    groups = (
        _group("swa", GroupKind.WINDOW, range(43), entry_bytes=entry, window=128),
        _group("csa", GroupKind.COMPRESSED, sparse, entry_bytes=entry, ratio=4),
        StateGroupSpec(
            "idx",
            GroupKind.INDEX,
            tuple(sparse),
            "bf16",
            "v1",
            entry_bytes=index,
            ratio=4,
            depends_on="csa",
            top_k=512,
        ),
        _group("hca", GroupKind.COMPRESSED, dense, entry_bytes=entry, ratio=128),
        _group("csa_state", GroupKind.TAIL, sparse, snapshot_bytes=80 * KIB, ratio=4, overlap=4),
        _group("hca_state", GroupKind.TAIL, dense, snapshot_bytes=512 * KIB, ratio=128),
    )
    return CacheSchema(PAGE_SIZE, 43, groups, "deepseek-v4-flash")


SCHEMAS = {
    "gemma3-270m": gemma3_270m,
    "deepseek-v4-flash": deepseek_v4_flash,
    "smollm2-135m": smollm2_135m,
}
