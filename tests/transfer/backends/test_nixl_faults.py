"""Nothing is written through NIXL after a cancel, a death, a stop, or the end of the access."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.core.messages.orders import CancelSend, CloseSession, DropPeer
from headrace.core.messages.stage_events import (
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    PeerLost,
    ReceiveFailed,
    SendCancelled,
    SendFailed,
    SessionClosed,
)
from headrace.core.types.kv.backends import PoolMemory
from tests.transfer.harness import random_store
from tests.transfer.nixl_handoff import BIG, CONFIG, PAGES, POISON, Handoff
from tests.transfer.nixl_stage import Process, Setup

pytestmark = pytest.mark.nixl


def test_after_quiet_nothing_is_written(big: Handoff) -> None:
    """A cancel in the middle of a transfer is answered only when no byte of it is under way."""
    big.flood(1, "s" * 32)
    big.stage.order(CancelSend(seq=0, request=1))
    big.stage.wait_for(SendCancelled)
    assert big.stays_poisoned()
    big.fetch(2, "s" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.stage.wait_for(ChunkAcked)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])


def test_a_killed_writer_writes_no_more_once_its_right_is_taken_back(big: Handoff) -> None:
    big.flood(1, "s" * 32)
    big.stage.kill()
    big.loop.apply(big.receiver, CloseSession(seq=0, session="s" * 32))
    assert big.loop.of(big.receiver, SessionClosed), "no stage has to be waited for"
    assert big.stays_poisoned()


def test_a_stopped_writer_that_goes_on_later_writes_nothing(big: Handoff, tmp_path: Path) -> None:
    """Its writes were posted, and were under way when it was stopped; the right to write ends meanwhile. Whom it writes
    to is stopped first: over TCP nothing but what the kernel has buffered can come then, so there is a middle."""
    owner, session = big.stage_elsewhere(tmp_path), "o" * 32
    big.join_elsewhere(owner, session)
    big.fetch_elsewhere(owner, 1, session, range(1))
    big.stage.wait_for(ChunkAcked)
    big.target.data[:] = POISON
    owner.send_signal(signal.SIGSTOP)
    big.fetch_elsewhere(owner, 2, session, range(PAGES))
    big.send(3, session, [0], [PAGES], 0, BIG.page_size)
    assert big.stage.wait_for(SendFailed).request == 3, "so the one before it is posted"
    big.stage.send_signal(signal.SIGSTOP)
    owner.send_signal(signal.SIGCONT)
    big.loop.until(lambda: big.written() > 0, 20.0)
    owner.order(CloseSession(seq=0, session=session))
    owner.wait_for(SessionClosed)
    assert big.written() < 0.98, "it was stopped in the middle"
    assert big.stays_poisoned(0.2)
    big.stage.send_signal(signal.SIGCONT)
    assert big.stays_poisoned(1.0)
    assert big.stage.wait_for(PeerLost).session == session, "it finds out, and its session ends"
    big.stage.order(CancelSend(seq=0, request=2))
    assert big.stays_poisoned(0.3)
    assert not big.stage.of(SendCancelled), "it cannot know when the last byte has come"
    big.stage.order(DropPeer(seq=0, session=session))
    big.stage.wait_for(SendCancelled)
    big.join_elsewhere(owner, "t" * 32)  # the next session is as good as the first
    big.fetch_elsewhere(owner, 4, "t" * 32, range(8, 12))
    big.loop.until(lambda: len(owner.of(KvReceived)) == 2, 20.0)
    assert np.array_equal(big.target.data[8:12], big.store.data[8:12])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_goes_on_for_others_when_a_peer_dies_or_stops(big: Handoff, how: signal.Signals) -> None:
    """In the middle of writing to it. The source's pages come back when its session has ended."""
    peer = Process("peer", Setup(BIG, PAGES, CONFIG), big.loop)
    big.processes.append(peer)
    big.join_elsewhere(peer, "p" * 32)
    big.fetch_elsewhere(peer, 7, "p" * 32, range(PAGES))
    time.sleep(0.1)
    peer.send_signal(how)
    for request in range(1, 4):
        big.fetch(request, "s" * 32, range(8), range(8), 0, 8 * BIG.page_size)
        big.loop.wait_for(big.receiver, KvReceived, request, 20.0)
    assert np.array_equal(big.target.data[:8], big.store.data[:8])
    big.stage.order(DropPeer(seq=0, session="p" * 32))
    big.stage.order(CancelSend(seq=0, request=7))
    assert big.stage.wait_for(SendCancelled).request == 7
    big.fetch(4, "s" * 32, range(8, 16), range(8, 16), 0, 8 * BIG.page_size)
    big.loop.wait_for(big.receiver, KvReceived, 4, 20.0)
    assert np.array_equal(big.target.data[8:16], big.store.data[8:16])


def test_a_pool_in_use_by_no_session_has_no_agent_to_reach(big: Handoff) -> None:
    """What was granted to an ended session opens nothing, even to a process that kept it."""
    from headrace.transfer.backends.nixl import LOOPBACK, NixlTransport

    kept = big.registered.grant("k" * 32)
    assert big.registered.revoke("k" * 32, 0)
    source = random_store(BIG, 4)
    transport = NixlTransport(memoryview(source.data.reshape(-1)), LOOPBACK)
    big.target.data[:] = POISON
    try:
        pages = transport.open("k" * 32, 0, BIG, PoolMemory(nixl=big.registered.memory), kept)
        pages.write(0, 0, BIG.page_size, source.data[0])
        write = pages.flush()
        end = time.monotonic() + 5
        while not write.lost and time.monotonic() < end:
            assert not write.done
            time.sleep(0.01)
        assert write.lost
        pages.close()
        assert write.done, "our own memory is free again"
    except OSError:
        pass  # it is noticed here where the connection is made at once
    assert (big.target.data == POISON).all()
    transport.close()


def test_what_a_flood_leaves_behind(big: Handoff) -> None:
    """The transfer that the other tests interrupt, left alone: every byte, acknowledged."""
    big.flood(1, "s" * 32)
    big.loop.wait_for(big.receiver, KvReceived, 1, 30.0)
    big.stage.wait_for(ChunkAcked)
    assert np.array_equal(big.target.data, big.store.data)
    assert big.loop.of(big.receiver, ChunkReceived)
    assert not big.loop.of(big.receiver, ReceiveFailed)
