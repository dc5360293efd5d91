"""What a server's prefix cache holds, told to Dynamo's KV router from the beginning on.

server ──KV events, those before this worker's start replayed──► KvEventFollower ──► publisher of each rank ──► routers

Dynamo's own subscriber, a ZmqSource, asks for no replay. A publisher knows no event for an emptied cache: its pages are
taken back one by one.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEventBatch
from headrace.peer.kv_event_follower import KvEventFollower, KvEventSource


class Publisher(Protocol):
    """What Dynamo's KvEventPublisher is needed for. Hashes are signed, of 64 bits."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None:
        """These blocks can be reused from now on."""

    def publish_removed(self, block_hashes: list[int]) -> None:
        """These cannot any more."""


class CacheRelay:
    """Follows one server. host: of its KV events. publishers: one for each data-parallel rank, in their order."""

    def __init__(self, host: str, source: KvEventSource, publishers: Sequence[Publisher]) -> None:
        self._publishers = publishers
        self._held: list[dict[Hash, None]] = [{} for _ in publishers]  # parents before their children
        self._follower = KvEventFollower(host, source, self._apply, self._forget)

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._follower.run()

    def _apply(self, batch: KvEventBatch) -> None:
        rank = batch.data_parallel_rank
        if rank >= len(self._publishers):
            return
        for event in batch.events:
            match event:
                case BlockStored(medium="GPU"):
                    self._stored(rank, event)
                case BlockRemoved(medium="GPU"):
                    self._removed(rank, [each for each in event.block_hashes if each in self._held[rank]])
                case AllBlocksCleared():
                    self._cleared(rank)

    def _stored(self, rank: int, event: BlockStored) -> None:
        """Of pages behind one that is not known, since the replay began later, a router can make nothing."""
        parent, held = event.parent_block_hash, self._held[rank]
        if parent is not None and parent not in held:
            return
        held.update(dict.fromkeys(event.block_hashes))
        self._publishers[rank].publish_stored(
            list(event.token_ids),
            [event.block_size] * len(event.block_hashes),
            [_signed(each) for each in event.block_hashes],
            None if parent is None else _signed(parent),
        )

    def _removed(self, rank: int, hashes: list[Hash]) -> None:
        for each in hashes:
            del self._held[rank][each]
        if hashes:
            self._publishers[rank].publish_removed([_signed(each) for each in hashes])

    def _cleared(self, rank: int) -> None:
        self._removed(rank, list(reversed(self._held[rank])))

    def _forget(self) -> None:
        for rank in range(len(self._publishers)):
            self._cleared(rank)


def _signed(number: Hash) -> int:
    return number - (1 << 64) if number >> 63 else number
