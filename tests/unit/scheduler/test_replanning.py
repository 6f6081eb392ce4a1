"""A waiting request is looked up and planned again only where that can change something."""

from __future__ import annotations

import pytest

from statewise.runtime.cache import prefix_cache
from support.engine import Driver, make_schema

PAGE = 4


class Counted(Driver):
    """Counts lookups and plans, by request."""

    def __init__(self, blocks: int, shape: str = "FW", **args: object) -> None:
        schema = make_schema(shape, PAGE, 8)
        super().__init__(schema, (blocks, blocks), chunked_prefill_size=16, **args)
        self.looked_up: list[int] = []  # length of the prompt
        real = self.cache.lookup

        def lookup(options, tokens, limit, *rest, **more):  # type: ignore[no-untyped-def]
            self.looked_up.append(limit)
            return real(options, tokens, limit, *rest, **more)

        self.cache.lookup = lookup  # type: ignore[method-assign]

    def count(self, prompt: list[int]) -> int:
        """Lookups of a prompt so far."""
        return self.looked_up.count(len(prompt) - 1)


def tokens(first: int, count: int) -> list[int]:
    return [1 + (first + 3 * i) % 90 for i in range(count)]


def steps(d: Driver, count: int) -> None:
    for _ in range(count):
        d.step()


@pytest.mark.parametrize("audit_rate", [0.0, 1.0])
def test_a_request_that_lacks_blocks_is_planned_once_until_blocks_come(
    audit_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = Counted(40, audit_rate=audit_rate)
    long, waiting = tokens(0, 50), tokens(40, 90)
    d.add("runs", long, 100)
    steps(d, 6)  # it decodes
    d.add("waits", waiting, 4)
    steps(d, 2)
    before, version = d.count(waiting), d.cache.version
    plans: list[int] = []
    real = prefix_cache.plan
    monkeypatch.setattr(prefix_cache, "plan", lambda *args: (plans.append(1), real(*args))[1])
    steps(d, 60)  # several times as often as the order of waiting requests is looked at anew
    assert d.cache.version != version, "the tree has changed meanwhile"
    assert d.core.scheduler.waiting["waits"].delayed_by == "blocks"
    assert d.count(waiting) == before >= 1
    assert not plans
    d.run()
    d.check("runs")
    d.check("waits")
    assert d.count(waiting) > before


def test_it_is_tried_again_when_another_ends_though_its_group_has_no_more_blocks() -> None:
    d = Counted(40)
    d.add("runs", tokens(0, 30), 100)
    d.add("short", tokens(7, 20), 12)
    steps(d, 6)
    d.add("waits", tokens(40, 90), 4)
    steps(d, 2)
    seen = d.count(tokens(40, 90))
    while "short" in {r.rid for r in d.core.scheduler.running}:
        d.step()
    d.step()
    assert d.count(tokens(40, 90)) > seen
    d.run()
    for rid in ("runs", "short", "waits"):
        d.check(rid)


def test_who_waits_for_a_prefix_being_computed_is_looked_up_when_it_is_there() -> None:
    d = Counted(200, "FR", checkpoint_interval=8)  # half of a step's tokens are left
    shared = tokens(0, 96)
    d.add("first", [*shared, 5, 6], 4)
    d.step()
    second = [*shared, 7, 8, 9]
    d.add("second", second, 4)
    d.step()
    seen = d.count(second)
    waited = 0
    while d.core.scheduler.waiting["second"].delayed_by == "prefix":
        assert d.count(second) == seen
        waited += 1
        d.step()
        if "second" not in d.core.scheduler.waiting:
            break
    assert waited >= 3
    d.run()
    d.check("first")
    d.check("second")
    report = d.outcomes["second"].report
    assert report is not None
    assert report.reused == 96


def test_a_request_that_fits_at_last_was_never_kept_longer_than_before() -> None:
    """Every step, whatever is held back would not have fitted."""
    d = Counted(48)
    for i in range(12):
        d.add(f"r{i}", tokens(13 * i, 20 + 9 * (i % 7)), 10 + 7 * (i % 5))
    scheduler = d.core.scheduler
    held = 0
    while d.core.has_work():
        d.step()
        for request in scheduler.waiting.values():
            if scheduler._is_still_blocked(request):
                held += 1
                lookup = d.cache.lookup(
                    request.message.cache,
                    request.tokens[: request.num_tokens],
                    request.reuse_limit,
                )
                request.sequence = d.cache.begin(lookup, len(request.tokens))
                available = d.cache.available()
                assert scheduler.admission.shortage(request, scheduler.running, available)
                d.cache.cancel(request.sequence)
                request.sequence = None
    assert held
    for i in range(12):
        d.check(f"r{i}")
