"""Keys and namespaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statewise.radix import Namespace, TokenKey
from statewise.radix.key import common_tokens

TEXT = st.text(alphabet=["a", "b", "\x00", ":", "é", "\ud800"], max_size=4)


@pytest.mark.slow
@given(TEXT, TEXT, TEXT, TEXT)
def test_f33_namespaces_never_alias(salt: str, adapter: str, salt2: str, adapter2: str) -> None:
    same = Namespace(salt, adapter).key == Namespace(salt2, adapter2).key
    assert same == ((salt, adapter) == (salt2, adapter2))


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [-1, 2**31 - 1, -(2**31)]])
def test_key_keeps_the_ids(ids: list[int]) -> None:
    key = TokenKey(ids)
    assert key.ids.tolist() == ids
    assert len(key) == len(ids)
    assert key == TokenKey(np.array(ids, dtype=np.int64)) == TokenKey.from_bytes(key.data)
    assert hash(key) == hash(TokenKey(ids))


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [1.5], [[1, 2]], np.zeros((2, 2), int)])
def test_key_refuses_what_is_no_row_of_int32(ids: object) -> None:
    with pytest.raises(ValueError, match="token id"):
        TokenKey(ids)  # type: ignore[arg-type]


def test_key_refuses_partial_tokens() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        TokenKey.from_bytes(b"12345")


@given(
    st.lists(st.integers(0, 1), max_size=6),
    st.lists(st.integers(0, 1), max_size=6),
    st.integers(0, 4),
)
def test_common_tokens_counts_to_the_first_difference(
    run: list[int], data: list[int], offset: int
) -> None:
    expected = 0
    for mine, theirs in zip(run, data[offset:], strict=False):
        if mine != theirs:
            break
        expected += 1
    assert common_tokens(TokenKey(run).data, TokenKey(data).data, offset * 4) == expected
