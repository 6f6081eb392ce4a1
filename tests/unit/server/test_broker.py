"""Open requests: ids, one terminal each, aborts, deaths, and addresses no old frame can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import zmq

from statewise.runtime.clock import SystemClock
from statewise.runtime.errors import InvalidRequestError, RefusedError, WorkerDiedError
from statewise.runtime.messages import (
    AbortRequest,
    AnyMessage,
    Connect,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    TextDelta,
)
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.server import links
from statewise.runtime.server.broker import Broker, Reply

WAIT_MS = 2000


class Watcher:
    """Implements `Observer`; counts."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.num_first = 0
        self.ends: list[str] = []

    def opened(self) -> None:
        self.num_opened += 1

    def first_token(self, wait_s: float) -> None:
        self.num_first += 1

    def ended(self, delta: TextDelta, duration_s: float) -> None:
        assert delta.finish is not None
        self.ends.append(delta.finish.kind)


class World:
    """A broker and the three inboxes its processes would read."""

    def __init__(self, max_open: int = 10) -> None:
        self.directory = links.SocketDirectory()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.watcher = Watcher()
        address = self.directory.address(links.SERVER, 0)
        self.broker = Broker(address, max_open, SystemClock(), self.watcher)
        self.broker.refusal = None
        self.back = links.Outbox(self.context, address)
        self.inboxes = {name: self.inbox(name, 0) for name in links.CHILDREN}
        for name in links.CHILDREN:
            self.broker.process_started(name, self.directory.address(name, 0))

    def inbox(self, name: str, incarnation: int) -> links.Inbox:
        return links.Inbox(self.context, self.directory.address(name, incarnation))

    def sent(self, name: str, at_least: int = 1) -> list[AnyMessage]:
        """What a process was sent; frames may arrive one by one."""
        messages: list[AnyMessage] = []
        while len(messages) < at_least and (more := self.inboxes[name].receive(WAIT_MS)):
            messages += more
        return messages

    def close(self) -> None:
        self.broker.close()
        self.back.close()
        for inbox in self.inboxes.values():
            inbox.close()
        self.context.destroy(linger=0)
        self.directory.remove()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def run(world: World, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        world.broker.start()
        async with asyncio.timeout(20):
            await body()

    asyncio.run(main())


def request(rid: str) -> GenerateRequest:
    return GenerateRequest(rid, SamplingParams(), text="x")


def done(rid: str, kind: str = "stop") -> TextDelta:
    return TextDelta(rid, finish=FinishReason(kind))


async def read_all(reply: Reply) -> list[tuple[int, TextDelta]]:
    out = []
    while news := await reply.next():
        out += news
    return out


def test_requests_that_share_a_client_id_are_told_apart(world: World) -> None:
    async def body() -> None:
        with world.broker.open([request("same"), request("same")]) as reply:
            sent = world.sent(links.TOKENIZER)
            rids = [m.rid for m in sent if isinstance(m, GenerateRequest)]
            assert len(set(rids)) == 2
            assert "same" not in rids
            world.back.send([TextDelta(rids[1], "b", (5,)), done(rids[1]), done(rids[0])])
            deltas = await read_all(reply)
        assert [(i, d.text) for i, d in deltas] == [(1, "b"), (1, ""), (0, "")]
        assert (world.watcher.num_opened, world.watcher.num_first) == (2, 1)
        assert world.watcher.ends == ["stop", "stop"]
        assert world.broker.num_open == 0

    run(world, body)


def test_leaving_early_aborts_and_waits_for_the_terminal_delta(world: World) -> None:
    async def body() -> None:
        with world.broker.open([request("a")]) as reply:
            (rid,) = reply.wire_rids
        for name, num in ((links.TOKENIZER, 2), (links.SCHEDULER, 1)):
            assert world.sent(name, num)[-1] == AbortRequest(rid, "the client went away")
        assert world.broker.num_open == 1
        world.back.send([done(rid, "abort")])
        while world.broker.num_open:
            await asyncio.sleep(0.01)

    run(world, body)


def test_a_finished_request_is_not_aborted(world: World) -> None:
    async def body() -> None:
        with world.broker.open([request("a")]) as reply:
            world.back.send([done(reply.wire_rids[0])])
            await read_all(reply)
        assert world.inboxes[links.SCHEDULER].receive(50) == []

    run(world, body)


def test_aborting_by_client_id_ends_all_of_that_id(world: World) -> None:
    async def body() -> None:
        with world.broker.open([request("a"), request("a"), request("b")]):
            assert world.broker.abort_client_rid("a", "no more") == 2
            assert len(world.sent(links.SCHEDULER, 2)) == 2
            assert world.broker.abort_client_rid("", "all") == 3

    run(world, body)


def test_refusals(world: World) -> None:
    async def body() -> None:
        requests = [request(str(i)) for i in range(11)]
        with pytest.raises(RefusedError, match="at most 10"), world.broker.open(requests):
            pass
        world.broker.refusal = "the server is starting"
        with pytest.raises(RefusedError, match="starting"), world.broker.open(requests[:1]):
            pass
        with pytest.raises(RefusedError, match="starting"):
            await world.broker.call(links.SCHEDULER, "stats", {})
        assert world.watcher.num_opened == 0

    run(world, body)


@pytest.mark.parametrize("victim", links.CHILDREN)
def test_a_death_ends_everything_once_and_aborts_in_the_living(world: World, victim: str) -> None:
    async def body() -> None:
        call = asyncio.create_task(world.broker.call(victim, "ping", {}))
        await asyncio.sleep(0)
        with world.broker.open([request("a"), request("b")]) as reply:
            world.broker.process_died(victim, "it fell over")
            world.broker.process_died(victim, "it fell over again")
            late = [done(rid) for rid in reply.wire_rids]
            world.back.send(late)
            deltas = await read_all(reply)
            await asyncio.sleep(0.05)
        assert [(i, d.finish.code if d.finish else "") for i, d in deltas] == [
            (0, "worker_died"), (1, "worker_died"),
        ]  # fmt: skip
        assert world.watcher.ends == ["error", "error"]
        for name in links.CHILDREN:
            aborted = [m.rid for m in world.sent(name) if isinstance(m, AbortRequest)]
            assert aborted == ([] if name == victim else reply.wire_rids)
        with pytest.raises(WorkerDiedError, match="fell over"):
            await call

    run(world, body)


def test_a_successor_gets_nothing_that_was_meant_for_the_dead(world: World) -> None:
    async def body() -> None:
        world.inboxes[links.TOKENIZER].close()
        with world.broker.open([request("lost")]):
            world.broker.process_died(links.TOKENIZER, "gone")
            world.inboxes[links.TOKENIZER] = world.inbox(links.TOKENIZER, 1)
            address = world.directory.address(links.TOKENIZER, 1)
            world.broker.process_started(links.TOKENIZER, address)
            with world.broker.open([request("new")]) as reply:
                sent = world.sent(links.TOKENIZER)
                assert [m.rid for m in sent if isinstance(m, GenerateRequest)] == reply.wire_rids

    run(world, body)


def test_peers_are_told_of_a_successor(world: World) -> None:
    async def body() -> None:
        address = world.directory.address(links.SCHEDULER, 1)
        world.broker.process_started(links.SCHEDULER, address)
        for name in (links.TOKENIZER, links.DETOKENIZER):
            assert world.sent(name) == [Connect(links.SCHEDULER, address)]
        world.inboxes[links.SCHEDULER].close()
        world.inboxes[links.SCHEDULER] = world.inbox(links.SCHEDULER, 1)
        world.broker.process_started(links.TOKENIZER, world.directory.address(links.TOKENIZER, 1))
        assert world.inboxes[links.SCHEDULER].receive(50) == []  # it sends nothing to tokenizers

    run(world, body)


def test_calls_are_answered_refused_or_time_out(world: World) -> None:
    async def body() -> None:
        async def answer(reply: Callable[[str], ControlReply]) -> None:
            sent: list[AnyMessage] = []
            while not sent:
                await asyncio.sleep(0.01)
                sent = world.inboxes[links.SCHEDULER].receive(0)
            assert isinstance(sent[0], ControlRequest)
            world.back.send([reply(sent[0].call_id)])

        good = asyncio.create_task(answer(lambda i: ControlReply(i, b'{"x": 1}')))
        assert await world.broker.call(links.SCHEDULER, "stats", {}) == {"x": 1}
        bad = asyncio.create_task(answer(lambda i: ControlReply(i, error="no such thing")))
        with pytest.raises(InvalidRequestError, match="no such thing"):
            await world.broker.call(links.SCHEDULER, "what", {})
        with pytest.raises(RefusedError, match="did not answer"):
            await world.broker.call(links.SCHEDULER, "stats", {}, timeout_s=0.05)
        world.back.send([ControlReply("nobody", b"1")])
        await asyncio.gather(good, bad)

    run(world, body)


def test_the_end_gives_everybody_a_refusal_and_tells_nobody_afterwards(world: World) -> None:
    async def body() -> None:
        call = asyncio.create_task(world.broker.call(links.SCHEDULER, "stats", {}))
        await asyncio.sleep(0)
        with world.broker.open([request("a"), request("b")]) as reply:
            world.broker.end_all("the server is stopping")
            ends = [delta.finish for _, delta in await reply.next()]
            assert [(end.code, end.http_status, end.message) for end in ends if end] == [
                ("refused", 503, "the server is stopping")
            ] * 2
            assert await reply.next() == []
            world.back.send([TextDelta(reply.wire_rids[0], finish=FinishReason("stop"))])
        with pytest.raises(RefusedError, match="stopping"):
            await call
        assert world.watcher.ends == ["error", "error"]
        with world.broker.open([request("late")]):
            asyncio.get_running_loop().call_soon(world.broker._drain)  # a look that was arranged
            world.broker.close()
            await asyncio.sleep(0)
        with pytest.raises(RefusedError):
            await world.broker.call(links.SCHEDULER, "stats", {})

    run(world, body)
