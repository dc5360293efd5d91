"""A handoff in which a stage writes into the peer's pool in shared memory, and tells it of what it has written."""

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import CancelSend, CloseSession, DropPeer
from headrace.core.messages.stage_events import ChunkAcked, KvReceived, SendCancelled, SendFailed, SessionClosed
from headrace.core.types.kv.backends import FAKE, SHM, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.writer_locks import host_token
from tests.transfer.harness import FIRST, Pair, value, zmq_context

pytestmark = pytest.mark.skipif(not host_token(), reason="no shared memory here")
BARE = TransferConfig(peer_timeout_s=1.0, window_bytes=1 << 20)


@pytest.fixture
def pair() -> Iterator[Pair]:
    geometry = Geometry("float32", layers=3, kv_heads=2, head_dim=8, page_size=16)
    with zmq_context() as context:
        made = Pair(context, geometry, geometry, backend=SHM)
        yield made
        made.close()


def test_kv_comes_in_frames_where_the_pool_is_out_of_reach(pair: Pair) -> None:
    assert pair.shared is not None
    pair.shared.close()  # its name is gone before the stage has opened it
    pair.expect(1, range(4), 0, 64)
    pair.send(1, 0, 0, 64, pages=range(8, 12), dst_pages=range(4), last=True)
    assert pair.loop.wait_for(pair.receiver, KvReceived).first == FIRST
    pair.loop.wait_for(pair.sender, ChunkAcked)
    assert np.array_equal(pair.target.data[:4], pair.store.data[8:12])
    assert value(pair.sender.statistics(), "bytes_sent_total", ("shm",)) == 0
    assert value(pair.receiver.statistics(), "bytes_received_total", ("zmq",)) == 4 * pair.source.page_bytes


def test_after_quiet_nothing_is_written_to_poisoned_pages(pair: Pair) -> None:
    pair.expect(1, range(8), 0, 128)
    pair.send(1, 0, 0, 64, pages=range(8), dst_pages=range(8))
    pair.loop.until(lambda: value(pair.sender.statistics(), "bytes_sent_total", ("shm",)) > 0)
    pair.loop.apply(pair.sender, CancelSend(seq=1, request=1))
    pair.loop.wait_for(pair.sender, SendCancelled)
    pair.target.data[:] = 0xEE
    pair.send(1, 1, 64, 64, pages=range(8), dst_pages=range(8), last=True)  # was on its way when CancelSend overtook it
    pair.loop.turn()
    assert (pair.target.data == 0xEE).all()


def test_pages_that_the_peer_has_not_fail_the_request(pair: Pair) -> None:
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    pair.send(1, 0, 0, 16, pages=[0], dst_pages=[64])
    failed = pair.loop.wait_for(pair.sender, SendFailed)
    assert (failed.code, failed.message) == ("bad_chunk", "page 64 of 64 pages")
    assert value(pair.sender.statistics(), "unacked_bytes") == 0


@pytest.mark.parametrize("sides", [(True, False), (False, True)])
def test_bytes_that_change_in_the_pool_are_found_by_the_checksum_where_a_side_wants_one(
    sides: tuple[bool, bool],
) -> None:
    """As if a second writer were there: the chunk is refused, and its ticket fails."""
    geometry = Geometry("float32", layers=3, kv_heads=2, head_dim=8, page_size=16)
    sending, receiving = (replace(BARE, checksum_shm=wanted) for wanted in sides)
    with zmq_context() as context:
        pair = Pair(context, geometry, geometry, config=sending, receiver_config=receiving, backend=SHM)
        _change_under_way(pair)
        assert pair.loop.wait_for(pair.sender, SendFailed).code == "checksum_mismatch"
        assert not pair.loop.of(pair.receiver, KvReceived)
        pair.close()


def test_nothing_is_checked_in_shared_memory_unless_a_side_wants_it(pair: Pair) -> None:
    _change_under_way(pair)
    assert pair.loop.wait_for(pair.receiver, KvReceived).first == FIRST


def _change_under_way(pair: Pair) -> None:
    pair.expect(1, [3], 0, 16)
    pair.send(1, 0, 0, 16, pages=[9], dst_pages=[3], last=True)
    while not value(pair.sender.statistics(), "bytes_sent_total", ("shm",)):
        pair.sender.receive(0.0)
    pair.target.data[3, 0, 0, 0, 0, 0] ^= 1


def test_a_session_that_ends_is_hung_up_when_its_stage_has_let_go(pair: Pair) -> None:
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    pair.loop.apply(pair.receiver, CloseSession(seq=0, session=pair.session))
    for _ in range(5):
        pair.loop.turn()
    assert not pair.loop.of(pair.receiver, SessionClosed), "the stage has the pool mapped, and may write"
    assert value(pair.receiver.statistics(), "sessions_being_revoked") == 1
    pair.loop.apply(pair.sender, DropPeer(seq=0, session=pair.session))
    assert pair.loop.wait_for(pair.receiver, SessionClosed).session == pair.session
    assert value(pair.receiver.statistics(), "sessions_being_revoked") == 0


def test_fake_goes_through_all_the_motions_and_moves_nothing() -> None:
    geometry = Geometry("float32", layers=3, kv_heads=2, head_dim=8, page_size=16)
    with zmq_context() as context:
        pair = Pair(context, geometry, geometry, backend=FAKE)
        pair.memory = (PoolMemory(),)
        pair.loop.apply(pair.sender, DropPeer(seq=0, session=pair.session))
        pair.admit()
        before = pair.target.data.copy()
        pair.expect(1, range(4), 0, 64)
        pair.send(1, 0, 0, 64, pages=range(8, 12), dst_pages=range(4), last=True)
        arrived = pair.loop.wait_for(pair.receiver, KvReceived)
        pair.loop.wait_for(pair.sender, ChunkAcked)
        assert (arrived.first, arrived.bytes) == (FIRST, 4 * geometry.page_bytes)
        assert np.array_equal(pair.target.data, before)
        pair.close()


def test_the_window_holds_for_written_chunks_too() -> None:
    geometry = Geometry("float32", layers=3, kv_heads=2, head_dim=8, page_size=16)
    with zmq_context() as context:
        pair = Pair(context, geometry, geometry, config=TransferConfig(window_bytes=1), backend=SHM)
        pair.expect(1, range(4), 0, 64)
        for chunk in range(4):
            pair.send(1, chunk, chunk * 16, 16, pages=range(8, 12), dst_pages=range(4), last=chunk == 3)
        most = 0.0
        while not pair.loop.of(pair.receiver, KvReceived):
            most = max(most, value(pair.sender.statistics(), "unacked_bytes"))
            pair.loop.turn()
        assert most <= geometry.page_bytes + 256
        assert np.array_equal(pair.target.data[:4], pair.store.data[8:12])
        pair.close()
