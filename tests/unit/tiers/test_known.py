"""What is known of a remote store: bounded, and not for ever."""

from __future__ import annotations

import pytest

from statewise.runtime.tiers import known
from statewise.runtime.tiers.known import ABSENT_S, KNOWN_S, KnownPages
from statewise.runtime.tiers.store import NO_HANDLE, Loss
from support.tier_pages import ManualClock


def keys(count: int) -> list[bytes]:
    return [i.to_bytes(16, "little") for i in range(count)]


def test_knowledge_grows_old_and_is_confirmed() -> None:
    clock = ManualClock()
    pages = KnownPages(clock)
    a, b = keys(2)
    first, second = pages.learn(a, "full"), pages.learn(b, "full", 7, 8)
    clock.now += KNOWN_S / 2
    assert pages.learn(a, "full", 5) == first, "confirmed, with its content"
    clock.now += KNOWN_S / 2
    assert pages.find([a, b]) == [first, NO_HANDLE]
    page = pages.by_handle(first)
    assert page is not None
    assert page.content == 5
    assert pages.by_handle(second) is None
    assert pages.pop_dropped() == [], "nobody says that it is gone"
    assert pages.learn(b, "full") not in (first, second), "handles are not given twice"


def test_what_is_forgotten_is_told_where_that_matters() -> None:
    pages = KnownPages(ManualClock())
    handles = [pages.learn(key, "full") for key in keys(3)]
    pages.forget(handles[0], Loss.GONE)
    pages.forget(handles[1])
    pages.forget(handles[1], Loss.GONE)
    assert pages.pop_dropped() == [(handles[0], keys(1)[0], Loss.GONE)]
    assert pages.pop_dropped() == []
    assert pages.counts() == {"full": 1}
    assert pages.handles() == [handles[2]]


def test_absence_ends_by_time_and_by_news() -> None:
    clock = ManualClock()
    pages = KnownPages(clock)
    a, b = keys(2)
    pages.note_absent(a)
    pages.note_absent(b)
    assert pages.is_absent(a)
    pages.learn(a, "full")
    assert not pages.is_absent(a)
    clock.now += ABSENT_S
    assert not pages.is_absent(b)


def test_both_memories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 5)
    monkeypatch.setattr(known, "MAX_ABSENT", 5)
    pages = KnownPages(ManualClock())
    some = keys(8)
    for key in some:
        pages.learn(key, "full")
    pages.learn(some[3], "full")
    pages.learn(keys(9)[8], "full")
    found = [handle != NO_HANDLE for handle in pages.find(some)]
    assert found == [False, False, False, True, False, True, True, True]
    for key in some:
        pages.note_absent(key)
    assert [pages.is_absent(key) for key in some] == [False] * 3 + [True] * 5
