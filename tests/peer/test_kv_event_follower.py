"""Following the KV events of a server over real sockets: late, behind, across gaps, and through garbage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.messages.kv_events import BlockRemoved, KvEventBatch
from headrace.peer.kv_event_follower import KvEventFollower
from tests.server.event_server import EventServer
from tests.server.fakes import in_loop


class Followed(EventServer):
    """A server, and what a follower has learnt from it: numbers, "forget"."""

    def __init__(self, *, replay: bool = True, buffer: int = 100) -> None:
        super().__init__(replay=replay, buffer=buffer)
        self.learnt: list[int | str] = []
        self.changed = asyncio.Event()

    def number(self, number: int) -> None:
        """Publish an event with this number."""
        self.publish(BlockRemoved(block_hashes=(number,)))

    def apply(self, batch: KvEventBatch) -> None:
        for event in batch.events:
            assert isinstance(event, BlockRemoved)
            self.learnt += event.block_hashes
        self.changed.set()

    def forget(self) -> None:
        self.learnt.append("forget")
        self.changed.set()

    async def until(self, last: int | str) -> None:
        """Wait until this was learnt last."""
        while not self.learnt or self.learnt[-1] != last:
            self.changed.clear()
            await self.changed.wait()

    async def until_live(self) -> None:
        """Publish until something arrives live."""
        number = 1000
        while self.learnt[-1] != number:
            number += 1
            self.number(number)
            await asyncio.sleep(0.01)

    def follower(self) -> KvEventFollower:
        return KvEventFollower("127.0.0.1", self.source, self.apply, self.forget)


@asynccontextmanager
async def following(server: Followed) -> AsyncIterator[KvEventFollower]:
    follower = server.follower()
    tasks = [asyncio.create_task(server.loop()), asyncio.create_task(follower.run())]
    try:
        yield follower
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()


@in_loop
async def test_what_was_published_before_is_replayed_and_nothing_comes_twice() -> None:
    server = Followed()
    for number in range(50):
        server.number(number)
    async with following(server):
        await server.until(49)
        await server.until_live()
        assert server.learnt[:51] == ["forget", *range(50)]
        live = [number for number in server.learnt[51:] if isinstance(number, int)]
        assert live == list(range(1001, 1001 + len(live))), "in order, each once, the first ones from the replay"
        assert server.learnt.count("forget") == 1


@in_loop
async def test_without_replay_a_server_is_followed_from_now_on() -> None:
    server = Followed(replay=False)
    server.number(1)
    async with following(server):
        while not server.learnt:
            await asyncio.sleep(0)
        await server.until_live()
        assert 1 not in server.learnt
        server.number(7)
        await server.until(7)


@in_loop
async def test_a_gap_that_cannot_be_filled_makes_it_forget() -> None:
    """The buffer has the last ten batches. One comes with a number far ahead, as after a long pause."""
    server = Followed(buffer=10)
    for number in range(50):
        server.number(number)
    async with following(server) as follower:
        await server.until(49)
        assert server.learnt == ["forget", *range(40, 50)]
        del server.learnt[:]
        follower._accept(100, b"")
        assert server.learnt == ["forget", "forget"], "the batches between are lost, and this one is no batch"
        follower._accept(99, b"")
        assert server.learnt == ["forget", "forget"], "an old one"
