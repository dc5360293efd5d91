"""A prefill server and a decode peer of several stages each, joined by real sockets on loopback."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.core.messages.orders import AdmitPeer, OpenSession, PrepareReceive, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, KvReceived
from headrace.core.types.kv.backends import SHM, ZMQ, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import KV, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.transfer.backends.shm import SharedPool, ShmTransport
from headrace.transfer.backends.strided_pool import StridedPool, c_order
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender
from tests.transfer.harness import CONFIG, FIRST, Loop, part, random_store, scramble
from tests.transfer.ranks import assemble
from tests.transfer.raw import SESSION

PAGES = 64
SLOT, DST_SLOT = 5, 3  # of states, where a side has any


class Group:
    """All stages of a prefill server and of a decode peer, in one loop. layouts: of the peer's pools; C order
    unless given. ranks: of the senders, where other ranks between them offer nothing."""

    def __init__(
        self,
        context: Any,
        sources: list[Geometry],
        destinations: list[Geometry],
        *,
        backend: str = ZMQ,
        layouts: Sequence[PoolLayout] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.sources, self.destinations, self.backend = sources, destinations, backend
        self.stores = [random_store(geometry, PAGES, seed=i) for i, geometry in enumerate(sources)]
        layouts = layouts or [c_order(geometry, PAGES) for geometry in destinations]
        self.pools: list[SharedPool] = []
        memories: list[Any] = [np.zeros(layout.bytes, np.uint8) for layout in layouts]
        if backend == SHM:
            self.pools = [SharedPool(layout) for layout in layouts]
            memories = [pool.buffer for pool in self.pools]
        self.memory = tuple(PoolMemory(shm=pool.memory) for pool in self.pools)
        self.targets = [StridedPool(*pool) for pool in zip(destinations, layouts, memories, strict=True)]
        for i, target in enumerate(self.targets):
            scramble(target, 50 + i)
        self.senders = [
            Sender(
                CONFIG,
                stage=ranks[i] if ranks else i,
                number=i,
                geometry=geometry,
                store=store,
                context=context,
                transports={SHM: ShmTransport()},
            )
            for i, (geometry, store) in enumerate(zip(sources, self.stores, strict=True))
        ]
        self.receivers = [
            Receiver(
                CONFIG,
                stage=i,
                geometry=geometry,
                store=store,
                context=context,
                registered_pools={SHM: self.pools[i]} if self.pools else {},
            )
            for i, (geometry, store) in enumerate(zip(destinations, self.targets, strict=True))
        ]
        self.loop = Loop(*self.senders, *self.receivers)
        for sender in self.senders:
            self.loop.apply(
                sender,
                AdmitPeer(
                    seq=0,
                    terms=PeerTerms(
                        session=SESSION,
                        geometries=tuple(destinations),
                        window_bytes=4096,
                        backend=backend,
                        memory=self.memory,
                    ),
                ),
            )

    def connect(self, receiver: Receiver) -> None:
        endpoints = tuple(f"tcp://127.0.0.1:{sender.port}" for sender in self.senders)
        order = OpenSession(
            seq=0,
            terms=PrefillTerms(
                session=SESSION,
                endpoints=endpoints,
                geometries=tuple(self.sources),
                window_bytes=4096,
                backend=self.backend,
            ),
        )
        self.loop.apply(receiver, order)

    def expect(self, pages: Sequence[int], start: int, count: int) -> None:
        for receiver in self.receivers:
            self.loop.apply(
                receiver,
                PrepareReceive(
                    seq=0, request=1, session=SESSION, ticket="t", generation=1, start=start, count=count,
                    pages=pack(pages), row=0, slot=self._slot(self.destinations, DST_SLOT),
                ),
            )  # fmt: skip

    def send(self, sender: Sender, chunk: int, start: int, count: int, *, last: bool, pages: range, dst: range) -> None:
        self.loop.apply(
            sender,
            SendChunk(
                seq=0, request=1, after=0, session=SESSION, ticket="t", generation=1, chunk=chunk, start=start,
                count=count, pages=pack(part(self.sources[0].page_size, pages, 0, start, count)),
                dst_pages=pack(part(self.destinations[0].page_size, dst, 0, start, count)), row=0, dst_row=0,
                slot=self._slot(self.sources, SLOT), dst_slot=self._slot(self.destinations, DST_SLOT),
                last=FIRST if last else None,
            ),
        )  # fmt: skip

    def hand_over(self, start: int, end: int, cuts: Sequence[int], pages: range, dst: range) -> None:
        """Send [start, end) in chunks to receivers that have connected, and wait until it has arrived everywhere."""
        self.expect(part(self.destinations[0].page_size, dst, 0, start, end - start), start, end - start)
        for chunk, (left, right) in enumerate(pairwise(cuts)):
            for sender in reversed(self.senders):
                self.send(sender, chunk, left, right - left, last=right == end, pages=pages, dst=dst)
        for receiver, geometry in zip(self.receivers, self.destinations, strict=True):
            arrived = self.loop.wait_for(receiver, KvReceived)
            assert arrived.bytes == (end - start) * geometry.token_bytes + geometry.states_sent(end)
        for sender in self.senders:
            self.loop.wait_for(sender, ChunkAcked, len(cuts) - 1)

    def positions(
        self,
        stores: Sequence[StridedPool],
        ranks: Sequence[Geometry],
        pages: range,
        start: int,
        count: int,
        tensor: str = KV,
    ) -> np.ndarray:
        whole, size = assemble(stores, ranks, tensor), ranks[0].page_size
        return np.stack([whole[pages[p // size], :, :, :, p % size] for p in range(start, start + count)])

    @staticmethod
    def _slot(ranks: Sequence[Geometry], slot: int) -> int:
        return slot if any(rank.state_bytes for rank in ranks) else -1

    def close(self) -> None:
        self.loop.close()
        for pool in self.pools:
            pool.close()
