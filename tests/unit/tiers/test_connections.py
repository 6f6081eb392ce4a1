"""Calls side by side, on threads that nobody has to wait for."""

from __future__ import annotations

import threading

import pytest

from statewise.runtime.tiers.connections import Connections


def test_results_come_in_order_and_side_by_side() -> None:
    connections, all_there = Connections(4, "test"), threading.Barrier(4)

    def call(number: int) -> int:
        all_there.wait(20)
        return number * number

    assert connections.each(call, range(4)) == [0, 1, 4, 9]
    assert connections.each(call, []) == []
    connections.close()


def test_an_error_is_raised_and_harms_nobody_else() -> None:
    connections = Connections(2, "test")
    with pytest.raises(ZeroDivisionError):
        connections.each(lambda number: 1 // number, [1, 0, 1])
    assert connections.each(str, range(9)) == [str(number) for number in range(9)]
    connections.close()


def test_closing_waits_for_nobody_and_later_calls_are_made_at_once() -> None:
    connections, answer, begun = Connections(1, "test"), threading.Event(), threading.Event()
    got: list[list[bool]] = []

    def call(_item: int) -> bool:
        begun.set()
        return answer.wait(20)

    caller = threading.Thread(target=lambda: got.append(connections.each(call, [1, 2])))
    caller.start()
    assert begun.wait(20)
    connections.close()
    connections.close()
    assert connections.each(lambda item: threading.current_thread().name, [1]) == ["MainThread"]
    assert not got
    answer.set()
    caller.join(20)
    assert got == [[True, True]], "what was queued is called all the same"


def test_without_a_call_there_are_no_threads() -> None:
    before = threading.active_count()
    Connections(8, "test").close()
    assert threading.active_count() == before
