"""Every class of message survives the wire; bytes from outside can only be refused."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.runtime import messages
from statewise.runtime.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    AnyMessage,
    Message,
    decode,
    decode_batch,
    encode,
    encode_batch,
    pack_ids,
    unpack_ids,
)

CLASSES: tuple[type[Message], ...] = typing.get_args(AnyMessage)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for an annotation used in messages: built from the types, so that a new field
    or class is covered the day it is written."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if origin is tuple:
        if len(args) == 2 and args[1] is ...:
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*(values(a) for a in args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if args:  # a union
        return st.one_of(*(values(a) for a in args))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = typing.get_type_hints(kind)
    names = kind.__struct_fields__
    return st.builds(kind, **{name: values(fields[name]) for name in names})


any_message = st.one_of(*(structs(kind) for kind in CLASSES))


def test_every_message_class_is_in_the_union() -> None:
    defined = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert defined == set(CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_round_trips(kind: type[Message]) -> None:
    @given(structs(kind))
    def check(message: Any) -> None:
        assert decode(encode(message)) == message

    check()


@pytest.mark.slow
@given(st.lists(any_message, max_size=4))
def test_batches_round_trip(batch: list[Any]) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    for decoder in (decode, decode_batch):
        try:
            decoder(data)
        except ValueError:
            continue


@given(any_message, st.data())
def test_damaged_messages_are_refused_or_well_typed(message: Any, data: st.DataObject) -> None:
    """Flip a byte or cut the end: the answer is ValueError, or a message that encodes again."""
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    cut = raw[: data.draw(st.integers(1, len(raw)))]
    for damaged in (bytes(raw), bytes(cut)):
        try:
            decoded = decode(damaged)
        except ValueError:
            continue
        assert decode(encode(decoded)) is not None


def test_foreign_versions_and_oversized_messages_are_refused() -> None:
    ping = messages.ControlRequest("a", "ping")
    foreign = msgspec.msgpack.encode((PROTOCOL_VERSION + 1, ping))
    with pytest.raises(ValueError, match="protocol version"):
        decode(foreign)
    with pytest.raises(ValueError, match="exceeds"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ValueError, match="malformed"):
        decode(b"\x92" * 5000)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_token_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_ids(pack_ids(np.asarray(ids, dtype=np.int32))).tolist() == ids
