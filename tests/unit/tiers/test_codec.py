"""Codecs and sealing: payloads come back, nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from statewise.runtime.tiers import codec as codecs
from statewise.runtime.tiers.body import Bodies, Keys, read_key_file
from statewise.runtime.tiers.buffers import Arena
from statewise.runtime.tiers.codec import CODECS, choose_codec, measure_codecs
from statewise.runtime.tiers.record import RecordError
from statewise.runtime.tiers.store import TierError
from support.tier_pages import FULL, ManualClock, addresses, record_of

KEYS = Keys(bytes(range(32)))


def like_bf16(size: int, seed: int = 0) -> NDArray[np.uint8]:
    """Normal numbers, as bfloat16 bytes."""
    numbers = np.random.default_rng(seed).standard_normal(size // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("keys", [None, KEYS])
def test_payloads_come_back(name: str, keys: Keys | None) -> None:
    bodies = Bodies(name, keys)
    payload = like_bf16(FULL.block_bytes)
    (address,) = addresses(1, secret=bodies.secret)
    page = record_of(address, FULL, payload, bodies.secret)
    header, body = bodies.encode(FULL, page, payload)
    (row,) = Arena(FULL.block_bytes, 1).take(1)
    back = bodies.decode(header, body.data, row)
    assert (row.data == payload).all()
    assert (back.digests == page.digests).all()
    assert header.body_bytes == body.size
    if keys is not None:
        assert payload.tobytes()[:64] not in body.tobytes()


@pytest.mark.parametrize("name", ["shuffle-zstd", "shuffle-lz4", "zstd"])
def test_alike_bytes_get_smaller(name: str) -> None:
    payload = like_bf16(100_000)
    body = codecs.encode(CODECS[name], payload, 2)
    assert body is not None
    assert len(body) < 0.9 * payload.size


@pytest.mark.parametrize("name", [n for n in CODECS if n != "none"])
def test_noise_is_stored_as_it_is(name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    assert codecs.encode(CODECS[name], noise, 2) is None


@pytest.mark.parametrize("name", [n for n in CODECS if n != "none"])
def test_damaged_bodies_decode_to_an_error_or_to_something_of_the_right_size(name: str) -> None:
    payload = like_bf16(3000)
    payload[1000:2000] = 7  # something for every codec
    body = codecs.encode(CODECS[name], payload, 2)
    assert body is not None
    out = np.zeros(3000, dtype=np.uint8)
    for cut in (0, 1, len(body) // 2, len(body) - 1):
        with pytest.raises(ValueError, match="decode"):
            codecs.decode(CODECS[name], memoryview(body)[:cut], 2, out)
    with pytest.raises(ValueError, match="decode"):
        codecs.decode(CODECS[name], memoryview(body), 2, out[:-2])


def test_a_wrong_key_or_any_changed_field_opens_nothing() -> None:
    bodies = Bodies("none", KEYS)
    payload = like_bf16(FULL.block_bytes)
    (address,) = addresses(1, secret=bodies.secret)
    header, body = bodies.encode(FULL, record_of(address, FULL, payload, bodies.secret), payload)
    (row,) = Arena(FULL.block_bytes, 1).take(1)
    other = Bodies("none", Keys(bytes(32)))
    page = header.page
    for reader, forged in [
        (other, header),
        (bodies, replace(header, nonce=bytes(12))),
        (bodies, replace(header, page=replace(page, num_tokens=3))),
        (bodies, replace(header, page=replace(page, content=3))),
        (bodies, replace(header, stamp=replace(header.stamp, version="v2"))),
    ]:
        with pytest.raises(RecordError) as caught:
            reader.decode(forged, body.data, row)
        assert caught.value.kind == "sealing"


def test_a_decoder_that_is_not_here_is_no_corruption() -> None:
    bodies = Bodies()
    payload = like_bf16(FULL.block_bytes)
    header, body = bodies.encode(FULL, record_of(addresses(1)[0], FULL, payload), payload)
    (row,) = Arena(FULL.block_bytes, 1).take(1)
    for changes in ({"codec": 77}, {"sealing": 1}, {"sealing": 9}):
        assert not bodies.can_decode(changes.get("codec", 0), changes.get("sealing", 0))
        with pytest.raises(RecordError) as caught:
            bodies.decode(replace(header, **changes), body.data, row)
        assert caught.value.kind == "codec"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(TierError, match="known: none, zstd"):
        Bodies("gzip")


def test_key_files_are_private_and_of_the_right_length(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(TierError, match="No such file"):
        read_key_file(path)
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    with pytest.raises(TierError, match="chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    assert read_key_file(path).secret != KEYS.secret
    path.write_bytes(bytes(31))
    with pytest.raises(TierError, match="has 31 bytes, not 32; make one"):
        read_key_file(path)


class TickingClock(ManualClock):
    """Each reading is a millisecond after the one before."""

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now


def test_the_codec_is_chosen_by_what_loading_takes() -> None:
    samples = [like_bf16(100_000, seed) for seed in range(3)]
    figures = measure_codecs(samples, 2, 1e9, TickingClock())
    assert {f.name for f in figures} == set(CODECS)
    assert [f.load_s_per_byte for f in figures] == sorted(f.load_s_per_byte for f in figures)
    assert choose_codec(samples, 2, 1e12, TickingClock()) == "none", "nothing beats a fast disk"
    slow = choose_codec(samples, 2, 1e3, TickingClock())
    assert slow.startswith("shuffle"), "a slow medium wants the smallest"
