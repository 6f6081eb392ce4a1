"""From a payload to the body of a record and back: codec, then sealing.

    plain    body = encode(payload)                          digests in the header
    sealed   body = AES-256-GCM(digests | encode(payload))   nothing derived from the payload in
             with what the header says as associated data    the header but a keyed number

The cipher key and the secret that keys page names are derived from one key file. A wrong key makes
other names: pages of another key are simply not found.

This module does not know where records lie.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from statewise.runtime.tiers import codec as codecs
from statewise.runtime.tiers.buffers import Bytes, Row
from statewise.runtime.tiers.page import GroupShape, PageRecord, content_of, encode_stamp
from statewise.runtime.tiers.record import (
    NONCE_BYTES,
    Header,
    RecordError,
    body_sum,
    check_body,
)
from statewise.runtime.tiers.store import TierError

PLAIN, AES_GCM = 0, 1
KEY_FILE_BYTES = 32


class Keys:
    """What is derived from a key file's 32 bytes: the secret of page names, and the cipher."""

    def __init__(self, master: bytes) -> None:
        if len(master) != KEY_FILE_BYTES:
            raise TierError(f"a cache key has {KEY_FILE_BYTES} bytes, not {len(master)}")
        self.secret = blake2b(master, digest_size=32, person=b"sw-names").digest()
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise TierError(
                "encrypting the cache needs the package cryptography: "
                "pip install 'statewise[tiers]'"
            ) from error
        self.cipher: Any = AESGCM(blake2b(master, digest_size=32, person=b"sw-cipher").digest())


def read_key_file(path: Path) -> Keys:
    """Keys of a file of 32 random bytes that only its owner can read; TierError otherwise."""
    try:
        mode = path.stat().st_mode
        master = path.read_bytes()
    except OSError as error:
        raise TierError(f"cache key file: {error}") from error
    if mode & 0o077:
        raise TierError(f"cache key file {path} can be read by others: chmod 600 it")
    if len(master) != KEY_FILE_BYTES:
        raise TierError(
            f"cache key file {path} has {len(master)} bytes, not {KEY_FILE_BYTES}; "
            f"make one: head -c {KEY_FILE_BYTES} /dev/urandom > FILE && chmod 600 FILE"
        )
    return Keys(master)


def _associated(header: Header) -> bytes:
    """What a sealed body is bound to: every field of the header that does not depend on it."""
    page, address = header.page, header.page.address
    name = address.group.encode("utf-8", "surrogatepass")
    numbers = struct.pack(
        "<HH4Q2QdI",
        header.codec,
        header.item_bytes,
        header.payload_bytes,
        header.num_layers,
        address.position,
        page.num_tokens,
        page.content,
        page.dependency,
        page.created_s,
        len(name),
    )
    return address.key + address.base + numbers + name + encode_stamp(header.stamp)


class Bodies:
    """Makes and reads bodies for one tier."""

    def __init__(self, codec: str = "none", keys: Keys | None = None) -> None:
        self.use(codec)
        self.keys = keys

    def use(self, codec: str) -> None:
        """Encode with this codec from now on; what was encoded with others is still decoded."""
        self.codec = codecs.codec_number(codec)
        self.codec_name = codec

    @property
    def secret(self) -> bytes:
        """What keys page names; empty without a key."""
        return self.keys.secret if self.keys is not None else b""

    @property
    def is_plain(self) -> bool:
        """Bodies are payloads as they are: a row may be written, or read, in place."""
        return self.codec == codecs.NONE and self.keys is None

    def can_decode(self, codec: int, sealing: int) -> bool:
        """Whether `decode` has what these numbers need."""
        if sealing == AES_GCM:
            return self.keys is not None and codecs.can_decode(codec)
        return sealing == PLAIN and codecs.can_decode(codec)

    def encode(self, shape: GroupShape, page: PageRecord, payload: Bytes) -> tuple[Header, Bytes]:
        """(header without a place, body). A plain body is the payload itself, not a copy."""
        header = Header(
            page,
            shape.stamp,
            shape.num_layers,
            shape.page_size,
            payload.size,
            payload.size,
            0,
            item_bytes=shape.item_bytes,
        )
        body: Bytes | None = None
        if self.codec != codecs.NONE:
            packed = codecs.encode(self.codec, payload, shape.item_bytes)
            if packed is not None:
                body = np.frombuffer(packed, dtype=np.uint8)
                header = replace(header, codec=self.codec)
        if self.keys is not None:
            header, body = self._seal(header, payload if body is None else body)
        stored = payload if body is None else body
        checksum = body_sum(page.address.key, stored.data)
        return replace(header, body_bytes=stored.size, body_sum=checksum), stored

    def _seal(self, header: Header, encoded: Bytes) -> tuple[Header, Bytes]:
        assert self.keys is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        header = replace(header, sealing=AES_GCM, nonce=nonce)
        plain = np.ascontiguousarray(header.page.digests, dtype="<u8").tobytes()
        plain += encoded.tobytes()
        sealed = self.keys.cipher.encrypt(nonce, plain, _associated(header))
        return header, np.frombuffer(sealed, dtype=np.uint8)

    def decode(self, header: Header, body: memoryview, row: Row) -> PageRecord:
        """Payload into `row`; the page's record with its digests. Raises RecordError.

        The body's checksum has not been verified before: it is here, where the body is not the
        payload itself (a plain payload is verified by its digests, where it lands).
        """
        if header.payload_bytes != row.size:
            raise RecordError("layout", f"{header.payload_bytes} bytes for a row of {row.size}")
        if not self.can_decode(header.codec, header.sealing):
            raise RecordError("codec", f"no decoder for codec {header.codec}/{header.sealing}")
        page = header.page
        if header.codec != codecs.NONE or header.sealing:
            check_body(header, body)
        if header.sealing:
            page, body = self._unseal(header, body)
        if header.codec == codecs.NONE:
            if len(body) != row.size:
                raise RecordError("body", f"{len(body)} bytes for a payload of {row.size}")
            row.data[:] = np.frombuffer(body, dtype=np.uint8)
            return page
        try:
            codecs.decode(header.codec, body, header.item_bytes, row.data)
        except ValueError as error:
            raise RecordError("body", str(error)) from error
        return page

    def _unseal(self, header: Header, body: memoryview) -> tuple[PageRecord, memoryview]:
        assert self.keys is not None
        try:
            plain = self.keys.cipher.decrypt(header.nonce, bytes(body), _associated(header))
        except Exception as error:  # cryptography's InvalidTag
            raise RecordError("sealing", "the body was not sealed with this key") from error
        size = 8 * header.num_layers
        digests = np.frombuffer(plain[:size], dtype="<u8").astype(np.uint64)
        if len(digests) != header.num_layers:
            raise RecordError("sealing", "the sealed body is too short")
        return replace(header.page, digests=digests), memoryview(plain)[size:]


def check_content(page: PageRecord, secret: bytes) -> None:
    """Raise RecordError unless a record's content number is that of its digests."""
    if content_of(page.digests, secret) != page.content:
        raise RecordError("header", "the content number does not match the digests")
