"""Keys: everything that decides a page's bytes decides its key (F13, F15, F33, F35)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.radix.key import Namespace
from statewise.radix.stamp import Stamp
from statewise.runtime.tiers.page import (
    GroupShape,
    PrefixChain,
    content_of,
    decode_stamp,
    encode_stamp,
)
from support.tier_pages import FULL, PAGE, WINDOW, addresses, tokens_of

STAMP = Stamp("model", "v1", "layout", 0, "b")


def key_of(
    shape: GroupShape = FULL, salt: str = "", adapter: str = "", secret: bytes = b""
) -> bytes:
    chain = PrefixChain(Namespace(salt, adapter), shape.page_size, secret)
    chain.extend(tokens_of(1, 3))
    return chain.address(shape, 2).key


@pytest.mark.parametrize(
    "other",
    [
        replace(FULL, name="full2"),
        replace(FULL, num_layers=4),
        replace(FULL, layer_bytes=1001),
        replace(FULL, stamp=replace(FULL.stamp, model_fingerprint="other weights")),
        replace(FULL, stamp=replace(FULL.stamp, version="other rope")),
        replace(FULL, stamp=replace(FULL.stamp, layout_id="other kernel")),
        replace(FULL, stamp=replace(FULL.stamp, weights_epoch=1)),
        replace(FULL, stamp=replace(FULL.stamp, boundary="other window")),
    ],
)
def test_any_part_of_what_bytes_mean_changes_the_key(other: GroupShape) -> None:
    assert key_of(other) != key_of()


def test_whose_state_it_is_changes_the_key() -> None:
    keys = {key_of(), key_of(salt="a"), key_of(adapter="a"), key_of(salt="b"), key_of(secret=b"s")}
    assert len(keys) == 5


@given(st.text(), st.text(), st.text(), st.text())
def test_namespaces_never_alias(a: str, b: str, c: str, d: str) -> None:
    same = (a, b) == (c, d)
    assert (key_of(salt=a, adapter=b) == key_of(salt=c, adapter=d)) == same


def test_every_earlier_token_changes_the_key() -> None:
    tokens = bytearray(tokens_of(1, 3))
    chain = PrefixChain(Namespace(), PAGE)
    chain.extend(bytes(tokens))
    wanted = chain.address(FULL, 2).key
    for position in range(len(tokens)):
        tokens[position] ^= 1
        other = PrefixChain(Namespace(), PAGE)
        other.extend(bytes(tokens))
        assert other.address(FULL, 2).key != wanted
        tokens[position] ^= 1


def test_a_chain_grows_page_by_page() -> None:
    tokens = tokens_of(2, 5)
    whole = PrefixChain(Namespace(), PAGE)
    whole.extend(tokens)
    grown = PrefixChain(Namespace(), PAGE)
    for size in range(0, len(tokens) + 1, 4):
        grown.extend(tokens[:size])
    assert [whole.address(FULL, i) for i in range(5)] == [grown.address(FULL, i) for i in range(5)]
    assert grown.num_pages == 5


def test_exact_positions_have_keys_of_their_own() -> None:
    tokens = tokens_of(3, 3)
    chain = PrefixChain(Namespace(), PAGE)
    places = [chain.address_at(FULL, tokens, position) for position in range(1, 3 * PAGE + 1)]
    assert len({place.key for place in places}) == 3 * PAGE
    assert places[PAGE - 1] == chain.address(FULL, 0), "a whole page is the page at its end"
    assert [place.position for place in places] == list(range(1, 3 * PAGE + 1))


def test_an_index_page_names_the_page_it_routes_into() -> None:
    chain = PrefixChain(Namespace(), PAGE)
    chain.extend(tokens_of(1, 2))
    address = chain.address(WINDOW, 1, FULL)
    assert address.base == chain.address(FULL, 1).key
    assert chain.address(FULL, 1).base == b""


@given(st.text(), st.text(), st.text(), st.text(), st.integers(-(2**63), 2**63 - 1))
def test_stamps_survive_encoding(a: str, b: str, c: str, d: str, epoch: int) -> None:
    stamp = Stamp(a, b, c, epoch, d)
    assert decode_stamp(encode_stamp(stamp)) == stamp


@given(st.binary(max_size=60))
def test_other_bytes_are_no_stamp(data: bytes) -> None:
    try:
        stamp = decode_stamp(data)
    except ValueError:
        return
    assert encode_stamp(stamp) == data


def test_content_depends_on_every_digest_and_on_the_secret() -> None:
    import numpy as np

    digests = np.array([1, 2, 3], dtype=np.uint64)
    contents = {content_of(digests), content_of(digests, b"s")}
    for layer in range(3):
        other = digests.copy()
        other[layer] += 1
        contents.add(content_of(other))
    assert len(contents) == 5
    assert 0 not in contents


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 16, 1, 1)])
def test_shapes_without_bytes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs layers"):
        GroupShape("g", STAMP, sizes[0], sizes[1], sizes[2])


def test_addresses_of_one_sequence_differ() -> None:
    assert len({address.key for address in addresses(50)}) == 50
