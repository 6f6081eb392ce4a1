"""Lossless codecs for pages: zstd and lz4, with bytes shuffled so that alike ones are neighbours.

    none            as it is                             shuffle-zstd, shuffle-lz4
    zstd, lz4       compressed                             all first bytes of the numbers, then
                                                           all second bytes, ..., compressed

Whether a codec pays depends on the medium: cached state is nearly random in its low bytes, and a
fast disk outruns decoding. `choose_codec` measures instead of guessing. A page that does not get
smaller is stored as it is.

Decoders are looked up by the number in the record: a number without a decoder here is a page that
cannot be used, never a page read as another. Lossy forms are other layouts (other stamps), and are
not made here.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statewise.runtime.clock import Clock
from statewise.runtime.tiers.store import TierError

Bytes = NDArray[np.uint8]
NONE, ZSTD, LZ4, SHUFFLE_ZSTD, SHUFFLE_LZ4 = range(5)
CODECS = {
    "none": NONE,
    "zstd": ZSTD,
    "lz4": LZ4,
    "shuffle-zstd": SHUFFLE_ZSTD,
    "shuffle-lz4": SHUFFLE_LZ4,
}
_PACKAGES = {ZSTD: "zstandard", LZ4: "lz4", SHUFFLE_ZSTD: "zstandard", SHUFFLE_LZ4: "lz4"}
_SHUFFLED = (SHUFFLE_ZSTD, SHUFFLE_LZ4)
ZSTD_LEVEL = 1


def can_decode(codec: int) -> bool:
    """Whether this process has the decoder."""
    if codec == NONE:
        return True
    package = _PACKAGES.get(codec)
    return package is not None and importlib.util.find_spec(package) is not None


def codec_number(name: str) -> int:
    """Number of a codec by name; TierError for an unknown one, or one whose package is missing."""
    if name not in CODECS:
        raise TierError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
    number = CODECS[name]
    if not can_decode(number):
        raise TierError(
            f"codec {name!r} needs the package {_PACKAGES[number]}: pip install 'statewise[tiers]'"
        )
    return number


def shuffle(data: Bytes, item_bytes: int) -> Bytes:
    """All first bytes of the numbers, then all second bytes, and so on."""
    return np.ascontiguousarray(data.reshape(-1, item_bytes).T).reshape(-1)


def unshuffle(data: Bytes, item_bytes: int, out: Bytes) -> None:
    """Invert `shuffle` into `out`."""
    out.reshape(-1, item_bytes)[:] = data.reshape(item_bytes, -1).T


class _Engines(threading.local):
    """Compressor objects: made once for each thread, they keep large tables."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the thread's object of this name."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


_engines = _Engines()


def _zstd_compress(data: Bytes) -> bytes:
    import zstandard

    engine = _engines.get("compress", lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL))
    packed: bytes = engine.compress(data.data)
    return packed


def _zstd_decompress(body: memoryview, size: int) -> bytes:
    import zstandard

    engine = _engines.get("decompress", zstandard.ZstdDecompressor)
    raw: bytes = engine.decompress(body, max_output_size=size)
    return raw


def _lz4_compress(data: Bytes) -> bytes:
    packed: bytes = importlib.import_module("lz4.block").compress(data.data, store_size=False)
    return packed


def _lz4_decompress(body: memoryview, size: int) -> bytes:
    raw: bytes = importlib.import_module("lz4.block").decompress(body, uncompressed_size=size)
    return raw


def encode(codec: int, data: Bytes, item_bytes: int) -> bytes | None:
    """Body of a payload; None where it would not be smaller."""
    if codec in _SHUFFLED:
        if data.size % item_bytes:
            return None
        data = shuffle(data, item_bytes)
    body = _zstd_compress(data) if codec in (ZSTD, SHUFFLE_ZSTD) else _lz4_compress(data)
    return body if len(body) < data.size else None


def decode(codec: int, body: memoryview, item_bytes: int, out: Bytes) -> None:
    """Payload of a body, into `out`; ValueError where the body does not decode to its size."""
    try:
        unpack = _zstd_decompress if codec in (ZSTD, SHUFFLE_ZSTD) else _lz4_decompress
        raw = np.frombuffer(unpack(body, out.size), dtype=np.uint8)
    except Exception as error:  # the packages' own errors, which are not importable everywhere
        raise ValueError(f"the body does not decode: {error}") from error
    if raw.size != out.size:
        raise ValueError(f"the body decodes to {raw.size} bytes, not {out.size}")
    if codec in _SHUFFLED:
        unshuffle(raw, item_bytes, out)
    else:
        out[:] = raw


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """One codec measured on a sample. `load_s_per_byte` is reading plus decoding."""

    name: str
    ratio: float  # stored bytes per payload byte
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    load_s_per_byte: float


def measure_codecs(
    samples: Sequence[Bytes], item_bytes: int, read_bytes_per_s: float, clock: Clock
) -> list[CodecFigures]:
    """Figures of every codec that is installed, on payloads of the real kind, best first."""
    total = sum(sample.size for sample in samples)
    figures = [CodecFigures("none", 1.0, float("inf"), float("inf"), 1.0 / read_bytes_per_s)]
    for name, number in CODECS.items():
        if number == NONE or not can_decode(number):
            continue
        encode(number, samples[0], item_bytes)  # the thread's tables are made
        start = clock.monotonic()
        bodies = [encode(number, sample, item_bytes) for sample in samples]
        encode_s = max(clock.monotonic() - start, 1e-9)
        out = np.empty(max(sample.size for sample in samples), dtype=np.uint8)
        start = clock.monotonic()
        for sample, body in zip(samples, bodies, strict=True):
            if body is not None:
                decode(number, memoryview(body), item_bytes, out[: sample.size])
        decode_s = max(clock.monotonic() - start, 1e-9)
        stored = sum(
            sample.size if body is None else len(body)
            for sample, body in zip(samples, bodies, strict=True)
        )
        ratio = stored / total
        load = ratio / read_bytes_per_s + decode_s / total
        figures.append(CodecFigures(name, ratio, total / encode_s, total / decode_s, load))
    return sorted(figures, key=lambda f: f.load_s_per_byte)


def choose_codec(
    samples: Sequence[Bytes], item_bytes: int, read_bytes_per_s: float, clock: Clock
) -> str:
    """Name of the codec that loads these payloads soonest from a medium of this bandwidth."""
    return measure_codecs(samples, item_bytes, read_bytes_per_s, clock)[0].name
