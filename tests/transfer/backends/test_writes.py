"""Writes into a peer's pages that take their time or get lost, with real sockets; and the runs that they consist of."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.orders import CancelSend, CloseSession, DropPeer
from headrace.core.messages.stage_events import ChunkAcked, KvReceived, PeerLost, SendCancelled, SessionClosed
from headrace.core.types.kv.backends import NIXL, NixlAccess, NixlMemory, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.strided_pool import ArrayPageStore, runs
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed
from tests.transfer.harness import FIRST, Pair, value, zmq_context

GEOMETRY = Geometry("float32", layers=3, kv_heads=2, head_dim=8, page_size=16)
MEMORY = PoolMemory(nixl=NixlMemory(version="1.5", bytes=1, pages=64, strides=(0, 0, 0, 0, 0)))


class SlowWrite:
    done = False
    lost = ""


class SlowPool(RemotePages):
    """A pool of this process that is written into as if over a network: bytes land when the test says so.

    It is the Transport, the RegisteredPool and the RemotePages of its backend."""

    def __init__(self) -> None:
        self.store: ArrayPageStore | None = None
        self.granted: list[str] = []
        self.refuses = False
        self.pieces: list[tuple[int, int, int, Bytes, Box]] = []
        self.writes: list[SlowWrite] = []

    def grant(self, session: str) -> NixlAccess:
        if self.refuses:
            raise OSError("no transport")
        self.granted.append(session)
        return NixlAccess(metadata=b"agent", address=4096)

    def revoke(self, session: str, stage: int) -> bool:
        return True

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "SlowPool":
        if access is None:
            raise ValueError("the peer granted no access")
        assert (access.metadata, access.address, memory) == (b"agent", 4096, MEMORY)
        return self

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self.pieces.append((page, first_slot, count, data, box))

    def flush(self) -> SlowWrite:
        self.writes.append(SlowWrite())
        return self.writes[-1]

    def close(self) -> Completed:
        for write in self.writes:
            write.done = True
        return Completed()

    def land(self) -> None:
        assert self.store is not None
        for page, first_slot, count, data, box in self.pieces:
            self.store.write(page, first_slot, count, data, box)
        self.close()


@pytest.fixture
def slow() -> SlowPool:
    return SlowPool()


@pytest.fixture
def pair(slow: SlowPool) -> Iterator[Pair]:
    with zmq_context() as context:
        made = made_with(context, slow)
        yield made
        made.close()


def made_with(context: Any, slow: SlowPool) -> Pair:
    pools: dict[str, Any] = {"transports": {NIXL: slow}, "registered_pools": {NIXL: slow}, "memory": MEMORY}
    pair = Pair(context, GEOMETRY, GEOMETRY, backend=NIXL, **pools)
    slow.store = pair.target
    return pair


def ordered(pair: Pair, slow: SlowPool) -> None:
    """A chunk is on its way."""
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    pair.expect(1, range(4), 0, 64)
    pair.send(1, 0, 0, 64, pages=range(8, 12), dst_pages=range(4), last=True)
    pair.loop.until(lambda: slow.writes)


def test_a_chunk_is_announced_when_its_bytes_have_come_without_another_message(pair: Pair, slow: SlowPool) -> None:
    ordered(pair, slow)
    for _ in range(5):
        pair.loop.turn()
    assert not pair.loop.of(pair.receiver, KvReceived)
    assert pair.sender.next_deadline() is not None, "nothing wakes the sender when they have"
    slow.land()
    assert pair.loop.wait_for(pair.receiver, KvReceived).first == FIRST
    pair.loop.wait_for(pair.sender, ChunkAcked)
    assert np.array_equal(pair.target.data[:4], pair.store.data[8:12])
    assert slow.granted == [pair.session]
    assert value(pair.receiver.statistics(), "bytes_received_total", ("nixl",)) == 4 * GEOMETRY.page_bytes
    assert value(pair.sender.statistics(), "unacked_bytes") == 0


def test_quiet_waits_for_bytes_on_their_way(pair: Pair, slow: SlowPool) -> None:
    ordered(pair, slow)
    pair.loop.apply(pair.sender, CancelSend(seq=0, request=1))
    for _ in range(5):
        pair.loop.turn()
    assert not pair.loop.of(pair.sender, SendCancelled)
    slow.land()
    pair.loop.wait_for(pair.sender, SendCancelled)
    assert not pair.loop.of(pair.receiver, KvReceived), "what was cancelled is not announced"


def test_a_lost_write_is_reported_once_and_nothing_is_quiet_before_its_session_has_ended(
    pair: Pair, slow: SlowPool
) -> None:
    ordered(pair, slow)
    slow.writes[0].lost = "connection reset"
    lost = pair.loop.wait_for(pair.sender, PeerLost)
    assert (lost.session, lost.reason) == (pair.session, "connection reset")
    pair.loop.apply(pair.sender, CancelSend(seq=0, request=1))
    for _ in range(5):
        pair.loop.turn()
    assert not pair.loop.of(pair.sender, SendCancelled)
    assert len(pair.loop.of(pair.sender, PeerLost)) == 1
    pair.loop.apply(pair.sender, DropPeer(seq=0, session=pair.session))
    pair.loop.wait_for(pair.sender, SendCancelled)
    assert not pair.loop.of(pair.receiver, KvReceived)


def test_a_session_is_hung_up_as_soon_as_its_right_is_taken_back(pair: Pair, slow: SlowPool) -> None:
    ordered(pair, slow)
    pair.loop.apply(pair.receiver, CloseSession(seq=0, session=pair.session))
    assert pair.loop.of(pair.receiver, SessionClosed) == [SessionClosed(stage=0, session=pair.session)]


def test_kv_comes_in_frames_where_the_pool_cannot_be_opened(slow: SlowPool, caplog: pytest.LogCaptureFixture) -> None:
    slow.refuses = True
    with zmq_context() as context, caplog.at_level(logging.WARNING):
        pair = made_with(context, slow)
        pair.expect(1, range(4), 0, 64)
        pair.send(1, 0, 0, 64, pages=range(8, 12), dst_pages=range(4), last=True)
        assert pair.loop.wait_for(pair.receiver, KvReceived).first == FIRST
        pair.close()
    assert "KV comes in frames: the pool cannot be opened for nixl: no transport" in caplog.text
    assert "cannot be opened by nixl: the peer granted no access" in caplog.text
    assert not slow.writes


@given(data=st.data())
def test_runs_are_all_of_a_strided_copy_and_one_where_nothing_is_between(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    row = data.draw(st.integers(1, 5))
    sides = []
    for _ in range(2):  # two pools around the block, each with slack of its own
        slack = [data.draw(st.integers(0, 1)) for _ in counts]
        whole = np.arange(np.prod([n + s for n, s in zip(counts, slack, strict=True)]) * row, dtype=np.int64)
        pool = whole.astype(np.int64).reshape(*[n + s for n, s in zip(counts, slack, strict=True)], row)
        sides.append(pool[tuple(slice(n) for n in counts)])
    strides = [tuple(int(step) // 8 for step in side.strides[:-1]) for side in sides]
    found = runs((*counts, row), *strides)
    for side, starts in zip(sides, (found.source, found.target), strict=True):
        moved = (starts[:, None] + np.arange(found.length)).reshape(-1)
        assert np.array_equal(moved, side.reshape(-1))
    if all(side.flags.c_contiguous for side in sides):
        assert found.length == sides[0].size, "one piece on both sides moves as one"
