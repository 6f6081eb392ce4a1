"""What slower tiers are found to have of a prompt, and under which names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from statewise.radix import Match, Namespace, Tier, TokenKey
from statewise.radix.validation import Condition, Verdict
from statewise.runtime.cache.stored import MAX_REMEMBERED, Findings
from support.tier_scene import PROMPT, Scene

PAGES = 10


def match_of(scene: Scene, prompt: list[int] = PROMPT, salt: str = "", adapter: str = "") -> Match:
    key = TokenKey(np.array(prompt[:-1], dtype=np.int32))
    return scene.cache.tree.match(Namespace(salt, adapter), key)


def look(scene: Scene, prompt: list[int] = PROMPT, salt: str = "") -> Findings:
    return scene.tiering.stored.look(match_of(scene, prompt, salt), (), 1)


def lose(scene: Scene, group: str, page: int, prompt: list[int] = PROMPT) -> None:
    """Take one page out of the host tier."""
    stored = scene.tiering.stored
    match = match_of(scene, prompt)
    address = stored.page_address(
        stored.names(match.namespace, match.key), scene.schema.index_of(group), page
    )
    handles = scene.store().find([address.key])
    assert handles != [-1]
    scene.store().free(handles)


def test_names_differ_by_whatever_decides_the_bytes() -> None:
    """F33, F35: tokens up to the page's end, salt, adapter, group, weights."""
    scene = Scene("FWR")
    stored = scene.tiering.stored

    def keys(prompt: list[int] = PROMPT, salt: str = "", adapter: str = "") -> list[bytes]:
        match = match_of(scene, prompt, salt, adapter)
        names = stored.names(match.namespace, match.key)
        pages = [stored.page_address(names, g, p).key for g in (0, 1) for p in range(3)]
        return pages + [stored.snapshot_address(names, 2, b).key for b in (1, 2, 3)]

    first = keys()
    assert len(set(first)) == len(first)
    others = [
        keys(salt="a"),
        keys(adapter="a"),
        keys(salt="aa"),
        keys([PROMPT[0] + 1, *PROMPT[1:]]),
    ]
    every = first + [key for some in others for key in some]
    assert len(set(every)) == len(every)
    assert keys([*PROMPT[:12], 8, 8, 8]) == first, "what comes after does not matter"
    scene.epoch += 1
    scene.core.update_weights("other")
    assert not set(keys()) & set(every), "nor were the old names remembered"


def test_another_salt_finds_nothing() -> None:
    scene = Scene("FW")
    scene.keep(salt="mine")
    scene.forget_device()
    assert look(scene, salt="mine").stored.num_pages == PAGES
    for salt in ("", "yours", "min", "mine "):
        assert not look(scene, salt=salt).stored
    other = scene.serve("other", PROMPT, salt="yours")
    assert other.report is not None
    assert other.report.loaded == 0


def test_history_counts_up_to_the_first_gap_of_any_group() -> None:
    """F2, F14: groups are intersected, and what lies beyond a gap is not offered."""
    scene = Scene("CF")
    scene.keep()
    scene.forget_device()
    assert look(scene).stored.num_pages == PAGES
    lose(scene, "full", 8)
    assert look(scene).stored.num_pages == 8
    lose(scene, "entries", 5)
    found = look(scene).stored
    assert found.num_pages == 5
    for group in ("full", "entries", "index"):
        pages = found.pages[scene.schema.index_of(group)]
        assert sorted(pages) == list(range(5)), group
    lose(scene, "full", 0)
    assert look(scene).stored.num_pages == 0


def test_an_index_is_found_only_over_the_entries_it_was_made_of() -> None:
    """F24: entries that went and came back with other content are not what it routes into."""
    scene = Scene("C")
    scene.keep()
    scene.forget_device()
    assert look(scene).stored.num_pages == PAGES
    lose(scene, "entries", 4)
    assert look(scene).stored.num_pages == 4


def test_an_index_whose_entries_are_on_the_device_alone_is_not_found() -> None:
    """F24: nobody can say that they are the ones it was made of."""
    scene = Scene("C")
    scene.keep()
    index = scene.schema.index_of("index")
    scene.lose(PROMPT, "index", [4])
    assert sorted(look(scene).stored.pages[index]) == [4]
    lose(scene, "entries", 4)
    assert not look(scene).stored.pages.get(index)
    assert scene.tiering.tiers.counters["dependency_mismatch"] > 0


def test_what_the_device_has_is_not_looked_for() -> None:
    scene = Scene("F")
    scene.keep()
    found = look(scene).stored
    assert not found
    assert found.num_pages == PAGES
    scene.lose(PROMPT, "full", [3, 4])
    assert sorted(look(scene).stored.pages[0]) == [3, 4]


def test_what_failed_on_the_device_is_looked_for() -> None:
    scene = Scene("F")
    scene.keep()
    failed = Verdict(0, Condition.CHECKSUM, (2,), detail="damaged")
    found = scene.tiering.stored.look(match_of(scene), (failed,), 1).stored
    assert sorted(found.pages[0]) == [2]


def test_trailing_state_is_looked_for_where_the_history_ends() -> None:
    scene = Scene("FWR")
    scene.keep()
    scene.forget_device()
    found = look(scene).stored
    window, state = scene.schema.index_of("window"), scene.schema.index_of("state")
    assert set(found.pages[window]) >= {8, 9}, "a window of 6 tokens before the end"
    assert (state, PAGES) in found.snapshots
    lose(scene, "full", 7)
    shallow = look(scene).stored
    assert shallow.num_pages == 7
    assert all(page < 7 for page in shallow.pages[window])
    assert all(boundary <= 7 for _, boundary in shallow.snapshots)


def test_the_fastest_tier_that_has_a_page_is_named(tmp_path: Path) -> None:
    scene = Scene("F", disk=tmp_path)
    scene.keep()
    scene.forget_device()
    lose(scene, "full", 6)
    tiers = {page: tier for page, (tier, _) in look(scene).stored.pages[0].items()}
    expected = {page: Tier.DISK if page == 6 else Tier.HOST for page in range(PAGES)}
    assert tiers == expected


def test_a_cold_prompt_costs_one_question() -> None:
    scene = Scene("F")
    scene.keep()
    scene.forget_device()
    asked: list[int] = []
    find = scene.tiering.tiers.find
    scene.tiering.tiers.find = lambda a: (asked.append(len(a)), find(a))[1]  # type: ignore[func-returns-value,method-assign]
    assert not look(scene, [77] * 41).stored
    assert sum(asked) == 1


def test_names_are_remembered_for_some_prompts() -> None:
    scene = Scene("F")
    stored = scene.tiering.stored
    match = match_of(scene)
    names = stored.names(match.namespace, match.key)
    assert stored.names(match.namespace, match.key) is names
    for i in range(MAX_REMEMBERED):
        other = match_of(scene, [i + 1] * 9)
        stored.names(other.namespace, other.key)
    assert stored.names(match.namespace, match.key) is not names, "F27: a bound"
