"""Sender to receiver over real sockets, from pool to pool."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, CancelReceive, CancelSend, DropPeer
from headrace.core.messages.stage_events import (
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    ReceiveCancelled,
    ReceiveFailed,
    ReceivePrepared,
    SendCancelled,
    SendFailed,
)
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.protocol.messages import ANSWER_FRAME_BYTES, Ack, Attach, Attached, Chunk, Refuse
from tests.transfer.harness import FIRST, Pair, gather, part, value
from tests.transfer.raw import ANSWERS, STAGE, RawPeer


def geometry(page_size: int, dtype: str = "float32") -> Geometry:
    return Geometry(dtype, layers=3, kv_heads=2, head_dim=8, page_size=page_size)


@pytest.fixture(params=[ZMQ, SHM])
def pair(context: Any, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(context, geometry(16), geometry(16), backend=request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("source_size", "destination_size"), [(16, 16), (16, 64), (64, 16), (5, 7), (1, 3)])
@pytest.mark.parametrize("cached", [0, 16, 21])
@pytest.mark.parametrize("backend", [ZMQ, SHM])
def test_kv_arrives_exactly_whatever_the_page_sizes(
    context: Any, backend: str, source_size: int, destination_size: int, cached: int
) -> None:
    pair = Pair(context, geometry(source_size), geometry(destination_size), pages=256, backend=backend)
    tokens = 150
    pages = list(range(200, 0, -1))
    dst_pages = list(range(7, 256))
    used = part(destination_size, dst_pages, cached, cached, tokens - cached)
    untouched = np.delete(pair.target.data, used, axis=0)
    pair.expect(5, used, cached, tokens - cached)
    cuts = [cached, 64, 128, tokens]
    for chunk, (start, end) in enumerate(pairwise(cuts)):
        pair.send(5, chunk, start, end - start, pages=pages, dst_pages=dst_pages, origin=cached, last=end == tokens)
    arrived = pair.loop.wait_for(pair.receiver, KvReceived)
    pair.loop.wait_for(pair.sender, ChunkAcked, 3)

    assert (arrived.request, arrived.first, arrived.chunks) == (5, FIRST, 3)
    assert arrived.bytes == (tokens - cached) * pair.source.token_bytes
    sent = gather(pair.store, pair.source, pages, cached, tokens - cached)
    assert np.array_equal(gather(pair.target, pair.destination, dst_pages, cached, tokens - cached), sent)
    assert np.array_equal(np.delete(pair.target.data, used, axis=0), untouched)
    assert [event.chunk for event in pair.loop.of(pair.sender, ChunkAcked)] == [0, 1, 2]
    for port, name in ((pair.sender, "bytes_sent_total"), (pair.receiver, "bytes_received_total")):
        assert value(port.statistics(), name, (backend,)) == arrived.bytes
    assert value(pair.sender.statistics(), "unacked_bytes") == 0
    pair.close()


def test_many_requests_at_once_keep_apart(pair: Pair) -> None:
    for request in range(16):
        pair.expect(request, range(request * 4, request * 4 + 4), 0, 64)
    for chunk in range(4):
        for request in reversed(range(16)):
            pages = list(range(63 - request * 4, 59 - request * 4, -1))
            pair.send(
                request, chunk, chunk * 16, 16, pages=pages, dst_pages=list(range(request * 4, request * 4 + 4)),
                last=chunk == 3,
            )  # fmt: skip
    pair.loop.wait_for(pair.receiver, KvReceived, 16)
    pair.loop.wait_for(pair.sender, ChunkAcked, 64)
    assert np.array_equal(pair.target.data, pair.store.data[::-1])


def test_a_last_chunk_may_bring_no_tokens(pair: Pair) -> None:
    pair.expect(1, [3], 0, 16)
    pair.send(1, 0, 0, 16, pages=[9], dst_pages=[3])
    pair.loop.wait_for(pair.receiver, ChunkReceived)
    assert not pair.loop.of(pair.receiver, KvReceived)
    pair.send(1, 1, 16, 0, pages=[9], dst_pages=[3], last=True)
    assert pair.loop.wait_for(pair.receiver, KvReceived).chunks == 2
    assert np.array_equal(pair.target.data[3], pair.store.data[9])


def test_attaching_before_the_session_is_admitted_is_refused_and_tried_again(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16), admitted=False)
    pair.loop.until(lambda: value(pair.sender.statistics(), "refusals_total", ("data", "no_session")) >= 2)
    assert value(pair.receiver.statistics(), "data_connections") == 0
    pair.admit()
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    pair.close()


def test_a_small_window_slows_down_but_does_not_stop(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16), config=TransferConfig(window_bytes=1))
    pair.expect(1, range(4), 0, 64)
    for chunk in range(4):
        pair.send(1, chunk, chunk * 16, 16, pages=range(8, 12), dst_pages=range(4), last=chunk == 3)
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    most = 0.0
    while not pair.loop.of(pair.receiver, KvReceived):
        most = max(most, value(pair.sender.statistics(), "unacked_bytes"))
        pair.loop.turn()
    assert most <= pair.source.page_bytes + 256
    assert np.array_equal(pair.target.data[:4], pair.store.data[8:12])
    pair.close()


def test_forget_then_poison_no_byte_lands(context: Any) -> None:
    """G2: pages of a forgotten request belong to another request at once, whatever is still on the wire."""
    pair = Pair(context, geometry(16), geometry(16))
    pair.expect(1, range(4), 0, 64)
    pair.send(1, 0, 0, 16, pages=range(4), dst_pages=range(4))
    pair.loop.wait_for(pair.receiver, ChunkReceived)
    for chunk in (1, 2, 3):  # on their way while the receiver forgets
        pair.send(1, chunk, chunk * 16, 16, pages=range(4), dst_pages=range(4), last=chunk == 3)
    pair.loop.apply(pair.receiver, CancelReceive(seq=0, request=1))
    assert pair.loop.of(pair.receiver, ReceiveCancelled)
    pair.target.data[:] = 0xEE
    pair.loop.until(lambda: value(pair.receiver.statistics(), "chunks_rejected_total", ("unknown_ticket",)) == 3)
    assert (pair.target.data == 0xEE).all()
    assert not pair.loop.of(pair.receiver, KvReceived)
    assert pair.loop.wait_for(pair.sender, SendFailed).code == "cancelled", "the peer has taken it back"
    pair.loop.apply(pair.sender, CancelSend(seq=9, request=1))
    pair.loop.wait_for(pair.sender, SendCancelled)
    pair.loop.until(lambda: value(pair.sender.statistics(), "unacked_bytes") == 0)
    assert len(pair.loop.of(pair.sender, SendFailed)) == 1
    pair.close()


def test_the_same_ticket_again_under_a_new_generation(pair: Pair) -> None:
    pair.expect(1, [0], 0, 16, generation=1)
    pair.loop.apply(pair.receiver, CancelReceive(seq=0, request=1))
    pair.expect(1, [1], 0, 16, generation=2)
    pair.send(1, 0, 0, 16, pages=[5], dst_pages=[1], last=True, generation=2)
    pair.loop.wait_for(pair.receiver, KvReceived)
    assert len(pair.loop.of(pair.receiver, ReceivePrepared)) == 2
    assert np.array_equal(pair.target.data[1], pair.store.data[5])


def test_cancel_overtakes_sends_that_still_wait_for_their_pages(pair: Pair) -> None:
    pair.expect(1, range(4), 0, 64)
    pair.send(1, 0, 0, 16, pages=range(4), dst_pages=range(4))
    pair.loop.wait_for(pair.receiver, ChunkReceived)
    pair.loop.apply(pair.sender, CancelSend(seq=5, request=1))
    pair.loop.wait_for(pair.sender, SendCancelled)
    before = value(pair.sender.statistics(), "chunks_sent_total")
    pair.send(1, 1, 16, 16, pages=range(4), dst_pages=range(4))
    pair.send(1, 2, 32, 32, pages=range(4), dst_pages=range(4), last=True)
    assert value(pair.sender.statistics(), "chunks_sent_total") == before
    assert value(pair.sender.statistics(), "queued_chunks") == 0


def test_cancelling_what_was_never_sent_is_quiet_at_once(pair: Pair) -> None:
    pair.loop.apply(pair.sender, CancelSend(seq=1, request=77))
    assert [event.request for event in pair.loop.of(pair.sender, SendCancelled)] == [77]


def test_sending_to_a_dropped_session_fails_the_request(pair: Pair) -> None:
    pair.loop.apply(pair.sender, DropPeer(seq=1, session=pair.session))
    pair.send(1, 0, 0, 16, pages=[0], dst_pages=[0])
    assert pair.loop.wait_for(pair.sender, SendFailed).code == "peer_gone"


def test_pages_that_do_not_fit_the_tokens_fail_the_request(pair: Pair) -> None:
    pair.send(1, 0, 0, 33, pages=[0, 1], dst_pages=[0, 1, 2])
    failed = pair.loop.wait_for(pair.sender, SendFailed)
    assert (failed.code, failed.message) == ("bad_chunk", "source and destination pages: (2, 3) given, (3, 3) needed")


def test_expecting_on_an_unknown_session_fails(pair: Pair) -> None:
    pair.session = "x" * 32
    pair.expect(1, [0], 0, 16)
    assert pair.loop.wait_for(pair.receiver, ReceiveFailed).code == "peer_gone"


def test_attaching_anew_brings_unacknowledged_chunks_again(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16), connected=False)
    first = RawPeer(context, pair.loop, pair.sender.port)
    assert isinstance(first.take()[0], Attached)
    for chunk in range(3):
        pair.send(1, chunk, chunk * 16, 16, pages=range(3), dst_pages=range(3), last=chunk == 2)
    first_chunks = [first.take() for _ in range(3)]
    header = first_chunks[0][0]
    assert isinstance(header, Chunk)
    first.say(Ack(ticket=header.ticket, generation=1, chunk=0))
    pair.loop.wait_for(pair.sender, ChunkAcked)

    second = RawPeer(context, pair.loop, pair.sender.port)
    assert isinstance(second.take()[0], Attached)
    assert [second.take() for _ in range(2)] == first_chunks[1:]
    first.say(Ack(ticket=header.ticket, generation=1, chunk=1))  # this connection counts no more
    answer, _ = first.take()
    assert isinstance(answer, Refuse)
    assert answer.code == "no_session"
    assert len(pair.loop.of(pair.sender, ChunkAcked)) == 1
    for chunk in (1, 2, 2):
        second.say(Ack(ticket=header.ticket, generation=1, chunk=chunk))
    pair.loop.wait_for(pair.sender, ChunkAcked, 3)
    pair.loop.until(lambda: value(pair.sender.statistics(), "stale_messages_total", ("ack",)) == 1)
    pair.close()


def test_attaching_to_the_wrong_stage_is_refused(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16), connected=False)
    peer = RawPeer(context, pair.loop, pair.sender.port, stage=3)
    answer, _ = peer.take()
    assert answer == Refuse(code="wrong_stage", message="stage 0 here, 3 asked for")
    pair.close()


def test_a_partial_page_leaves_without_its_foreign_slots(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16), connected=False)
    peer = RawPeer(context, pair.loop, pair.sender.port)
    peer.take()
    pair.send(1, 0, 0, 5, pages=[0], dst_pages=[0], last=True)
    _, (row, payload) = peer.take()
    assert len(row) == 256
    assert payload == pair.store.data[0, :, :, :, :5].tobytes()
    pair.close()


def test_a_peer_that_does_not_read_holds_up_no_other(context: Any) -> None:
    """G7: its window fills and no more is sent to it; the other session gets everything meanwhile."""
    pair = Pair(context, geometry(16), geometry(16), connected=True)
    silent = "z" * 32
    pair.loop.apply(
        pair.sender,
        AdmitPeer(
            seq=0,
            terms=PeerTerms(session=silent, geometries=(pair.destination,), window_bytes=2 * pair.source.page_bytes),
        ),
    )
    peer = RawPeer(context, pair.loop, pair.sender.port, session=silent)
    assert isinstance(peer.take()[0], Attached)
    mine, pair.session = pair.session, silent
    for chunk in range(40):
        pair.send(1, chunk, chunk * 16, 16, pages=range(40), dst_pages=range(40))
    assert value(pair.sender.statistics(), "queued_chunks") == 38
    pair.session = mine
    for request in range(2, 12):
        pair.expect(request, range(4), 0, 64)
        pair.send(request, 0, 0, 64, pages=range(4), dst_pages=range(4), last=True)
        pair.loop.wait_for(pair.receiver, KvReceived, request - 1)
    assert value(pair.sender.statistics(), "queued_chunks") == 38
    pair.loop.wait_for(pair.sender, ChunkAcked, 10)
    pair.loop.apply(pair.sender, CancelSend(seq=0, request=1))
    pair.loop.wait_for(pair.sender, SendCancelled)
    assert value(pair.sender.statistics(), "queued_chunks") == 0
    assert value(pair.sender.statistics(), "unacked_bytes") == 2 * pair.source.page_bytes  # until it answers
    pair.close()


BIG = Geometry("float32", layers=8, kv_heads=8, head_dim=64, page_size=64)  # 2 MiB a page
ROOMY = TransferConfig(peer_timeout_s=0.6, window_bytes=1 << 30)

STOPPED_PEER = """
import os, signal, sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.rcvhwm = 1
socket.connect(sys.argv[1])
socket.send(bytes.fromhex(sys.argv[2]))
socket.recv_multipart()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_pages_of_a_stopped_process_come_back_when_its_session_ends(context: Any) -> None:
    """Frames that libzmq holds for it pin their pages, until the control endpoint misses its pings."""
    pair = Pair(context, BIG, BIG, config=ROOMY, connected=False)
    attach = ANSWERS.encode(Attach(session=pair.session, stage=0, checksum="xxh3_64"))
    endpoint = f"tcp://127.0.0.1:{pair.sender.port}"
    process = subprocess.Popen([sys.executable, "-c", STOPPED_PEER, endpoint, attach.hex()])
    try:
        pair.send(1, 0, 0, 64 * 60, pages=range(60), dst_pages=range(60), last=True)
        pair.loop.until(lambda: value(pair.sender.statistics(), "chunks_sent_total") == 1)
        pair.loop.apply(pair.sender, CancelSend(seq=1, request=1))
        assert not pair.loop.of(pair.sender, SendCancelled)  # far more than the kernel takes in
        pair.loop.apply(pair.sender, DropPeer(seq=2, session=pair.session))
        pair.loop.wait_for(pair.sender, SendCancelled)
    finally:
        process.kill()
        process.wait()
    pair.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3))
@example([b"x" * (ANSWER_FRAME_BYTES + 1)])
@example([ANSWERS.encode(Attach(session="s" * 32, stage=0, checksum="xxh3_64"))[:-1]])
@example([ANSWERS.encode(Ack(ticket="t", generation=1, chunk=0)), b""])
def test_rubbish_at_the_data_socket_is_refused_and_disturbs_no_session(
    context: Any, pair: Pair, frames: list[bytes]
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{pair.sender.port}")
    pair.loop.raw.append(stranger)
    stranger.send_multipart(frames)
    pair.loop.until(lambda: stranger.poll(0))
    answer = STAGE.decode(stranger.recv())
    assert isinstance(answer, Refuse)
    assert answer.code == "bad_message"
    pair.loop.raw.remove(stranger)
    stranger.close(linger=0)
    arrived = len(pair.loop.of(pair.receiver, KvReceived))
    pair.expect(arrived, [0], 0, 16)
    pair.send(arrived, 0, 0, 16, pages=[1], dst_pages=[0], last=True)
    pair.loop.wait_for(pair.receiver, KvReceived, arrived + 1)


def test_answers_without_a_session_or_for_unknown_chunks_change_nothing(context: Any, pair: Pair) -> None:
    stranger = RawPeer(context, pair.loop, pair.sender.port, session="x" * 32)
    stranger.say(Ack(ticket="ticket-1", generation=1, chunk=0))
    codes = [answer.code for answer, _ in (stranger.take(), stranger.take()) if isinstance(answer, Refuse)]
    assert codes == ["no_session", "no_session"]
    pair.expect(1, [0], 0, 16)
    pair.send(1, 0, 0, 16, pages=[1], dst_pages=[0], last=True)
    pair.loop.wait_for(pair.sender, ChunkAcked)
    assert len(pair.loop.of(pair.sender, ChunkAcked)) == 1
