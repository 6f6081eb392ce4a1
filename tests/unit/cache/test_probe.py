"""Questions to a remote store: what they find, and how few they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from statewise.radix import Namespace, RadixTree, TokenKey
from statewise.radix.need import needed_ranges, needs_snapshot
from statewise.radix.schema import CacheSchema
from statewise.runtime.cache.probe import FAN, MAX_OPEN, PATIENCE_S, Probe, Probes, spread
from statewise.runtime.cache.stored import StoredState
from statewise.runtime.tiers.copies import Copier, DevicePage
from statewise.runtime.tiers.page import PageAddress, shapes_of
from statewise.runtime.tiers.remote import RemoteTier
from statewise.runtime.tiers.store import NO_HANDLE
from statewise.runtime.tiers.tiers import Tiers
from statewise.runtime.tiers.transfer import EngineOptions, TransferEngine
from support.sim_schema import make_schema
from support.tier_blocks import ArrayBlocks
from support.tier_pages import ManualClock

obstore_store = pytest.importorskip("obstore.store")
PAGE = 8
NUM_PAGES = 40
KEY = TokenKey(np.arange(NUM_PAGES * PAGE, dtype=np.int32))


class World:
    """Two servers on one store in memory: one puts pages there, the other asks."""

    def __init__(self, shape: str, window: int = 20) -> None:
        self.schema: CacheSchema = make_schema(shape, PAGE, window)
        self.clock = ManualClock()
        self.objects = obstore_store.MemoryStore()
        shapes = shapes_of(self.schema, [64] * self.schema.num_groups)
        self.blocks = ArrayBlocks(shapes, 8)
        self.writer, self.reader = (self._server(shapes) for _ in range(2))
        self.state = StoredState(self.schema, self.reader)
        self.probes = Probes(self.state, self.reader, self.clock)
        self.tree = RadixTree(self.schema)

    def _server(self, shapes: Sequence[object]) -> Tiers:
        engine = TransferEngine(EngineOptions(num_threads=0), self.clock)
        copier = Copier(shapes, self.blocks, self.clock)  # type: ignore[arg-type]
        return Tiers([RemoteTier(self.objects, shapes, self.clock)], copier, engine)  # type: ignore[arg-type]

    def address(self, group: int, page: int) -> PageAddress:
        names = self.state.names(Namespace(), KEY)
        if self.schema.groups[group].kind.is_snapshot:
            return self.state.snapshot_address(names, group, page)
        return self.state.page_address(names, group, page)

    def put(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            one = DevicePage(group, page % 8, self.address(group, page), PAGE)
            transfer = self.writer.demote(next(iter(self.writer.stores)), [one])
            assert transfer is not None
            self.writer.engine.drain()
            assert transfer.num_ok == 1, transfer.results
        self.writer.poll()

    def put_prompt(self, num_pages: int) -> None:
        """What a request that ended after so many pages leaves behind."""
        position = num_pages * PAGE
        order = sorted(range(self.schema.num_groups), key=lambda g: self._depends(g))
        for group in order:
            spec = self.schema.groups[group]
            if spec.kind.is_snapshot:
                self.put(group, [num_pages] if needs_snapshot(spec, position) else [])
            else:
                for lo, hi in needed_ranges(spec, position, PAGE):
                    self.put(group, range(lo, hi))

    def _depends(self, group: int) -> bool:
        return self.schema.groups[group].depends_on is not None

    def begin(self) -> Probe | None:
        return self.probes.begin(self.tree.match(Namespace(), KEY), (), 1)

    def ask(self) -> int:
        """Ask about the prompt; returns the number of requests."""
        before = self.requests()
        probe = self.begin()
        while probe is not None and not probe.is_done:
            self.reader.engine.drain()
            self.reader.poll()
        return self.requests() - before

    def requests(self) -> int:
        return self.reader.status()[0].counters.get("requests_probe", 0)

    def counters(self) -> Mapping[str, int]:
        return self.reader.status()[0].counters

    def depth(self) -> int:
        """Pages whose history a lookup finds now."""
        return self.state.look(self.tree.match(Namespace(), KEY), (), 1).stored.num_pages


def test_pages_are_spread_evenly_and_end_with_the_last() -> None:
    assert spread(3, 5) == [3, 4]
    for lo, hi in [(0, 1), (5, 13), (0, 1000), (7, 700)]:
        pages = spread(lo, hi)
        assert pages[-1] == hi - 1
        assert len(pages) <= FAN
        assert all(a < b for a, b in zip([lo - 1, *pages], pages, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["F", "FWF", "FRR", "WCH"])
def test_the_end_of_what_is_there_is_found_wherever_it_lies(shape: str) -> None:
    for stored in (0, 1, 2, 7, 8, 9, 23, 39, 40):
        world = World(shape)
        world.put_prompt(stored)
        requests = world.ask()
        assert world.depth() == stored, shape
        bound = sum(g.kind in (g.kind.COMPRESSED, g.kind.INDEX) for g in world.schema.groups)
        assert requests <= 1 + 2 * FAN + 8 + bound * stored, (shape, stored)
        assert stored or requests == 1


def test_what_was_asked_is_not_asked_again_for_a_while() -> None:
    world = World("FF")
    assert world.ask() == 1
    assert world.ask() == 0
    world.put_prompt(12)
    assert world.ask() == 0, "absence is believed"
    world.clock.now += 31
    assert world.ask() > 0
    assert world.depth() == 12
    assert world.ask() <= 1, "one page further: there may be more"
    world.clock.now += 3601
    assert world.depth() == 0, "presence is believed for an hour"


def test_groups_that_end_at_different_depths_give_the_shorter() -> None:
    world = World("WHC", 9)
    long, entries, index = (world.schema.index_of(n) for n in ("long", "entries", "index"))
    world.put(long, range(30))
    world.put(entries, range(17))
    world.put(index, range(11))
    world.ask()
    assert world.depth() == 11


@pytest.mark.parametrize("shape", ["FWF", "FRR"])
def test_the_deepest_trailing_state_below_the_depth_is_found(shape: str) -> None:
    for deep, kept in [(40, 21), (33, 4), (9, 8)]:
        world = World(shape)
        world.put_prompt(kept)
        world.put(0, range(kept, deep))
        world.ask()
        look = world.state.look(world.tree.match(Namespace(), KEY), (), 1)
        assert look.stored.num_pages == deep
        if shape == "FRR":
            assert {boundary for _, boundary in look.stored.snapshots} == {kept}
        else:
            window = world.schema.index_of("window")
            ((lo, hi),) = needed_ranges(world.schema.groups[window], kept * PAGE, PAGE)
            assert set(range(lo, hi)) <= set(look.stored.pages[window]), (deep, kept)


def test_a_page_presumed_in_vain_is_found_missing_by_its_load() -> None:
    world = World("F")
    world.put(0, [p for p in range(20) if p != 13])
    world.ask()
    remote = world.reader.remote
    assert remote is not None
    presumed = remote.find([world.address(0, 13).key])
    assert presumed != [NO_HANDLE], "it was not asked for"
    (one,) = remote.fetch(presumed)
    assert one.row is None
    assert remote.find([world.address(0, 13).key]) == [NO_HANDLE]
    assert world.depth() == 13


def test_no_more_than_a_few_prompts_are_asked_about_at_a_time() -> None:
    world = World("F")
    begun = [world.begin() for _ in range(MAX_OPEN + 3)]
    assert len(world.reader.engine.open_transfers()) == MAX_OPEN
    world.reader.engine.drain()
    world.reader.poll()
    assert all(probe is not None and probe.is_done for probe in begun), "absence came for the rest"


def test_a_thousand_prompts_can_wait_for_one_answer() -> None:
    """All of them begin alike, and with the first answer none has anything left to ask."""
    world = World("F")
    begun = [world.begin() for _ in range(1000)]
    world.reader.engine.drain()
    world.reader.poll()
    assert all(probe is not None and probe.is_done for probe in begun)


def test_what_is_abandoned_has_ended_also_where_it_had_not_begun() -> None:
    """A flush, or other weights: nobody waits for an answer that will never come."""
    world = World("F")
    begun = [world.begin() for _ in range(MAX_OPEN + 3)]
    world.probes.abandon_all()
    assert all(probe is not None and probe.is_done for probe in begun)


def test_who_waits_does_not_wait_for_ever() -> None:
    world = World("F")
    for _ in range(4):
        probe = world.begin()
        assert probe is not None
        world.probes.give_up_late()
        assert not probe.is_done
        assert probe.transfer is not None
        probe.transfer.started_s = world.clock.now  # a thread has taken it, and hangs
        world.clock.now += PATIENCE_S
        world.probes.give_up_late()
        assert probe.is_done
    assert world.counters()["unanswered"] == 4
    assert world.begin() is None, "a store that does not answer is left alone"
    assert world.probes.probes.as_dict()["values"] == [[["unanswered"], 4]]
    world.clock.now += 61
    assert world.begin() is not None
    world.probes.abandon_all()
    world.reader.engine.drain()
    assert world.reader.poll(), "a question called off is still delivered"
