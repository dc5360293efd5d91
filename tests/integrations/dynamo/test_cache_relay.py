"""What is told to Dynamo's publishers of a server's KV events, over real sockets: exactly the pages that it has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.core.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventMessage,
    Medium,
    ReplicaKvEvent,
)
from headrace.integrations.dynamo.cache_relay import CacheRelay
from tests.server.event_server import EventServer
from tests.server.fakes import in_loop

HIGH = 1 << 63


@dataclass
class Router:
    """Blocks with their parents, as Dynamo's publishers are told; refuses what no publisher may be told."""

    blocks: dict[int, int | None] = field(default_factory=dict)

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None:
        assert len(token_ids) == sum(num_block_tokens) > 0
        for each in block_hashes:
            assert -HIGH <= each < HIGH
            assert each not in self.blocks
            assert parent_hash is None or parent_hash in self.blocks
            self.blocks[each], parent_hash = parent_hash, each

    def publish_removed(self, block_hashes: list[int]) -> None:
        assert block_hashes
        for each in block_hashes:
            assert each not in self.blocks.values(), "children go before their parents"
            del self.blocks[each]


def stored(*hashes: int, parent: int | None = None, medium: Medium = "GPU") -> BlockStored:
    tokens = tuple(range(4 * len(hashes))) if medium == "GPU" else ()
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=4, medium=medium)


@asynccontextmanager
async def relayed(server: EventServer, *routers: Router) -> AsyncIterator[None]:
    relay = CacheRelay("127.0.0.1", server.source, routers)
    tasks = [asyncio.create_task(server.loop()), asyncio.create_task(relay.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()


async def until(router: Router, *hashes: int) -> None:
    async with asyncio.timeout(10):
        while set(router.blocks) != set(hashes):
            await asyncio.sleep(0.001)


@in_loop
async def test_pages_of_before_and_of_every_rank() -> None:
    server, first, second = EventServer(), Router(), Router()
    events: list[KvEventMessage | ReplicaKvEvent] = [
        AllBlocksCleared(),
        stored(1, 2, HIGH + 5),
        ReplicaKvEvent(replica=1, event=stored(7)),
        ReplicaKvEvent(replica=2, event=stored(8)),  # of a rank that is not registered
        stored(3, parent=2),
        stored(1, 2, medium="CPU"),
        BlockRemoved(block_hashes=(1, 2), medium="CPU"),
        BlockRemoved(block_hashes=(3,)),
    ]
    for event in events:
        server.publish(event)
    async with relayed(server, first, second):
        await until(first, 1, 2, 5 - HIGH)
        await until(second, 7)
        assert first.blocks == {1: None, 2: 1, 5 - HIGH: 2}
        server.publish(AllBlocksCleared())
        await until(first)
        assert second.blocks == {7: None}


@in_loop
async def test_pages_behind_some_that_are_not_known_are_left_out() -> None:
    """The replay begins with the second event."""
    server, router = EventServer(buffer=4), Router()
    for event in (stored(1), stored(2, parent=1), stored(3, parent=2), stored(4), BlockRemoved(block_hashes=(3,))):
        server.publish(event)
    async with relayed(server, router):
        await until(router, 4)


@in_loop
async def test_a_server_that_was_started_again() -> None:
    """It has published less than before when it is heard of again."""
    server, router = EventServer(), Router()
    server.publish(stored(1, 2))
    async with relayed(server, router):
        await until(router, 1, 2)
        for number in range(100, 200):  # some of them come live
            server.publish(stored(number))
            await asyncio.sleep(0.002)
            server.publish(BlockRemoved(block_hashes=(number,)))
        await until(router, 1, 2)
        server.restart()
        server.publish(AllBlocksCleared())
        server.publish(stored(11))
        async with asyncio.timeout(10):
            while 1 in router.blocks:  # until it is connected again
                server.publish(stored(12, parent=11))
                server.publish(BlockRemoved(block_hashes=(12,)))
                await asyncio.sleep(0.02)
        await until(router, 11)
