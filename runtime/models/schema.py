"""From a model's config to its cache groups: FULL for full attention, WINDOW for sliding layers.

Each layer's own window decides its group; layers with different windows never share one. The
version of a group digests everything in the config that shapes its K/V or what may be read of it,
so state written under another window, rope or scale has another version.

This module does not know how blocks are laid out: the attention backend names its layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from statewise.kernels.interface import AttentionGeometry
from statewise.kernels.layout import block_layout_id
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.runtime.models.base import LoadOptions
from statewise.runtime.models.config import DenseConfig

VERSION_BYTES = 8


def group_windows(config: DenseConfig) -> dict[str, int]:
    """Window of each group by name, full attention (0) first."""
    windows = sorted({layer.window for layer in config.layers})
    num_sliding = sum(w > 0 for w in windows)
    return {_group_name(w, num_sliding): w for w in windows}


def group_geometries(config: DenseConfig, options: LoadOptions) -> dict[str, AttentionGeometry]:
    """Attention geometry of each group by name."""
    return {
        name: AttentionGeometry(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=options.page_size,
            dtype=options.kv_dtype,
            scale=config.attention_scale,
            window=window,
            soft_cap=config.attention_soft_cap,
            has_sinks=config.attention_sinks,
        )
        for name, window in group_windows(config).items()
    }


def build_schema(config: DenseConfig, options: LoadOptions, weights_digest: str) -> CacheSchema:
    """State groups of a dense decoder; `weights_digest` identifies the weights' bytes."""
    layout_id: Callable[[AttentionGeometry], str] = options.backend_layout_id or block_layout_id
    geometries = group_geometries(config, options)
    groups = tuple(
        StateGroupSpec(
            name=name,
            kind=GroupKind.WINDOW if window else GroupKind.FULL,
            layers=tuple(i for i, layer in enumerate(config.layers) if layer.window == window),
            layout_id=layout_id(geometries[name]),
            version=group_version(config, window, options.context_length),
            entry_bytes=2 * config.num_kv_heads * config.head_dim * options.kv_dtype.itemsize,
            window=window,
        )
        for name, window in group_windows(config).items()
    )
    return CacheSchema(
        page_size=options.page_size,
        num_layers=config.num_layers,
        groups=groups,
        model_fingerprint=model_fingerprint(config, options, weights_digest),
    )


def group_version(config: DenseConfig, window: int, context_len: int) -> str:
    """Digest of the attention configuration that writes and reads one group's state."""
    layers = [layer for layer in config.layers if layer.window == window]
    uses_context = any(layer.rope.kind == "dynamic" for layer in layers)
    return digest(
        {
            "layers": [asdict(layer) for layer in layers],
            "head_dim": config.head_dim,
            "num_kv_heads": config.num_kv_heads,
            "scale": config.attention_scale,
            "soft_cap": config.attention_soft_cap,
            "qk_norm": config.qk_norm,
            "context_len": context_len if uses_context else 0,
        }
    )


def model_fingerprint(config: Any, options: LoadOptions, weights_digest: str) -> str:
    """Digest of config, compute dtype and weights."""
    return digest(
        {"config": asdict(config), "dtype": str(options.dtype), "weights": weights_digest}
    )


def _group_name(window: int, num_sliding: int) -> str:
    if window == 0:
        return "full"
    return "window" if num_sliding == 1 else f"window{window}"


def digest(value: dict[str, object]) -> str:
    """Short digest of a JSON-able object."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=VERSION_BYTES).hexdigest()
