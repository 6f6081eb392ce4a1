"""F21: any flipped bit of any cached block is found at use, and the bad copy replaced.

Audit mode over the digest model: every page's checksum is compared when a request is admitted.
"""

from __future__ import annotations

import random

import pytest

from statewise.radix import GroupKind
from statewise.radix.need import trailing_pages
from statewise.radix.validation import Condition
from support.digest import U64, Int32
from support.engine import VOCAB, Driver, make_schema
from support.sim_world import SimWorker

SHAPES = ("FF", "FWF", "FWV", "SFS", "KFK", "C", "WCH", "FRR", "FWfw")
PROMPT = [3 + i * 7 % (VOCAB - 3) for i in range(75)]
NUM_BLOCKS = 64
PAGE = 8


def driver(shape: str, **args: object) -> Driver:
    schema = make_schema(shape, PAGE, 12)
    settings: dict[str, object] = {"audit_rate": 1.0, "chunked_prefill_size": 32, **args}
    return Driver(schema, (NUM_BLOCKS,) * schema.num_groups, **settings)


def block_of(d: Driver, group: int, page: int) -> int:
    """The block now at a place; -1: none."""
    match = d.match(PROMPT[:-1])
    if page >= 0:
        return int(match.blocks(group)[page])
    snapshot = match.snapshot_at(match.logical_tokens)
    held = snapshot.block_of(group) if snapshot is not None else None
    return held.block if held is not None else -1


def cached_places(d: Driver) -> list[tuple[int, int]]:
    """(group, page) of everything that a resume at the end of `PROMPT` reads; -1: its snapshot."""
    match = d.match(PROMPT[:-1])
    places = []
    for g, spec in enumerate(d.schema.groups):
        if spec.kind.is_snapshot:
            places += [(g, -1)] if block_of(d, g, -1) >= 0 else []
            continue
        page = match.logical_pages
        first = trailing_pages(spec, match.logical_tokens, PAGE)[0] if spec.kind.is_window else 0
        places += [(g, p) for p in range(min(first, page), page)]
    return places


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_flipped_bit_is_found_and_the_copy_replaced(shape: str) -> None:
    rng = random.Random(shape)
    d = driver(shape)
    d.serve("first", PROMPT, 3)
    assert cached_places(d)
    for i, (g, page) in enumerate(cached_places(d)):
        layers, _, slots = d.worker.blocks(g).shape
        block = block_of(d, g, page)
        assert block >= 0
        d.worker.flip(g, rng.randrange(layers), block, rng.randrange(slots), rng.randrange(64))
        before = d.cache.counters.failures(Condition.CHECKSUM)
        hurt = d.serve(f"hurt{i}", PROMPT, 3)
        assert d.cache.counters.failures(Condition.CHECKSUM) == before + 1, (g, page)
        assert hurt.report is not None
        assert hurt.report.verdicts, "the report says what failed"
        assert block_of(d, g, page) not in (-1, block), "the bad copy is gone"
        d.serve(f"dependents{i}", PROMPT, 3)  # an index over a rebuilt page is rebuilt after it
        healed = d.serve(f"healed{i}", PROMPT, 3)
        assert d.cache.counters.failures(Condition.CHECKSUM) == before + 1
        assert healed.report is not None
        assert healed.report.level == "direct"
    d.quiesce()


def test_one_bad_layer_of_the_history_is_rebuilt_and_nothing_else() -> None:
    """A deep model: rebuilding the first layer of a page is cheaper than computing the rest."""
    d = driver("F" * 12)
    d.serve("first", PROMPT, 1)
    block = int(d.match(PROMPT).blocks(0)[4])
    d.worker.flip(0, 1, block, 0, 5)
    computed = d.worker.tokens_computed
    hurt = d.serve("hurt", PROMPT, 1)
    assert hurt.report is not None
    assert hurt.report.level == "rebuild"
    assert hurt.report.limiting_group == "full"
    assert hurt.report.repaired == 8, "one page, and none of its neighbours"
    assert d.worker.tokens_computed - computed == 8 + len(PROMPT) - 72
    replays = [r for b in d.batches for r in b.rows if r.kind.value == "replay"]
    assert {r.num_layers for r in replays} == {2}, "no deeper than the damage"
    assert block not in d.match(PROMPT).blocks(0).tolist()


def test_without_audit_nothing_is_digested() -> None:
    d = driver("FWF", audit_rate=0.0)
    d.serve("first", PROMPT, 3)
    d.serve("second", PROMPT, 3)
    assert all(s.aside.checksums is None for s in d.match(PROMPT).segments[0])


def test_a_share_of_pages_is_enough_to_find_lasting_damage_in_time() -> None:
    d = driver("FF", audit_rate=0.2)
    d.serve("first", PROMPT, 1)
    block = int(d.match(PROMPT).blocks(0)[2])
    d.worker.flip(0, 1, block, 3, 40)
    for i in range(60):
        d.add(f"r{i}", PROMPT, 1)
        d.run()
        if d.cache.counters.failures(Condition.CHECKSUM):
            break
    else:
        raise AssertionError("never looked at in 60 hits at a rate of 0.2")
    d.serve("last", PROMPT, 1)


def test_a_waiting_request_is_not_audited_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who is about to be admitted is: the order of a queue needs no checksums."""
    calls: list[int] = []
    real = SimWorker.checksums

    def counted(worker: SimWorker, group: int, blocks: Int32) -> U64:
        calls.append(group)
        return real(worker, group, blocks)

    monkeypatch.setattr(SimWorker, "checksums", counted)
    d = driver("FF", max_running_requests=1)
    d.serve("first", PROMPT, 1)
    d.add("runs", [5, 6, 7], 60)
    d.step()
    d.add("waits", PROMPT, 1)
    calls.clear()
    while d.outcomes["runs"].finish is None:
        d.step()
    published = 60 // 8 + 1
    assert len(calls) <= published
    d.run()
    d.check()


@pytest.mark.parametrize("kind", [GroupKind.WINDOW, GroupKind.RECURRENT])
def test_damage_beside_what_is_needed_stays_unnoticed_until_it_is(kind: GroupKind) -> None:
    """The chain looks at what a resume relies on: old window pages and snapshots do not count."""
    d = driver("FWF" if kind is GroupKind.WINDOW else "FRR")
    d.serve("first", PROMPT, 3)
    group = next(g for g, s in enumerate(d.schema.groups) if s.kind is kind)
    match = d.match(PROMPT[:-1])
    if kind is GroupKind.WINDOW:
        block = int(match.blocks(group)[0])
        assert block >= 0
    else:
        held = match.snapshots[0].block_of(group)
        assert held is not None
        block = held.block
    d.worker.flip(group, 0, block, 0, 1)
    same = d.serve("same", PROMPT, 3)
    if len(match.snapshots) != 1:
        assert same.report is not None
        assert same.report.level == "direct"
    d.serve("shorter", PROMPT[:12], 3)
