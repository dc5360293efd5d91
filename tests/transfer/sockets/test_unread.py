"""Peers that talk and do not read, over real sockets: what is queued for them is bounded, and goes when they do."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer
from headrace.core.messages.peers import (
    AskCancel,
    ConnectPrefill,
    EndPeer,
    PeerGone,
    PeerJoined,
    PrefillDown,
    PrefillUp,
)
from headrace.core.messages.stage_events import ChunkAcked, KvReceived, SendCancelled
from headrace.core.runtime.codec import Codec
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.control import client
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer, unread_replies
from headrace.transfer.data import receiver, sender
from headrace.transfer.data.outbound import PARTS_IN_FLIGHT
from headrace.transfer.protocol.messages import Ack, Attach, Attached, Chunk, Goodbye, PeerMessage, Ping
from headrace.transfer.sockets.listener import REFUSALS
from tests.transfer.control.session_table import OFFER, hello
from tests.transfer.data.test_transfer import BIG, geometry
from tests.transfer.harness import CLOCK, Loop, Pair, value
from tests.transfer.plain import RUBBISH, Plain
from tests.transfer.raw import ANSWERS, RawPeer, RawStage

ROOMY = TransferConfig(window_bytes=1 << 30)
PEER: Codec[PeerMessage] = Codec(PeerMessage)
PING = ANSWERS.encode(Ping(number=1))


def insist(loop: Loop, peer: Plain, message: bytes, enough: Callable[[], object]) -> None:
    """Say it again and again while the loop turns, until that is enough."""

    def said() -> object:
        peer.say(message, 1000)
        return enough()

    loop.until(said, timeout_s=30)


def closed(port: Any, *labels: str) -> float:
    return value(port.statistics(), "connections_closed_total", labels)


def attached(pair: Pair) -> Plain:
    """A peer that has attached, and has not read the answer."""
    peer = Plain(pair.sender.port)
    peer.say(ANSWERS.encode(Attach(session=pair.session, stage=0, checksum="xxh3_64")))
    return peer


def stuck(pair: Pair) -> Plain:
    """A peer that reads nothing of the chunks that it gets, far more than kernels take in; they are cancelled."""
    peer = attached(pair)
    for chunk in range(3):
        pair.send(1, chunk, chunk * 1280, 1280, pages=range(60), dst_pages=range(60), last=chunk == 2)
    pair.loop.until(lambda: value(pair.sender.statistics(), "chunks_sent_total") == 3)
    pair.loop.apply(pair.sender, CancelSend(seq=1, request=1))
    return peer


def test_pages_come_back_when_the_session_ends_though_the_peer_pings_and_reads_nothing(context: Any) -> None:
    pair = Pair(context, BIG, BIG, config=ROOMY, connected=False)
    with stuck(pair) as peer:
        end, pings = CLOCK.now() + 0.5, iter(range(100))  # more unread Pongs would have the connection closed for them
        pair.loop.until(lambda: (peer.say(PING) if next(pings, None) is not None else None) or CLOCK.now() >= end)
        assert not pair.loop.of(pair.sender, SendCancelled), "libzmq still reads from the pages (G3)"
        assert not peer.closed
        pair.loop.apply(pair.sender, DropPeer(seq=2, session=pair.session))
        pair.loop.until(lambda: peer.say(PING) or pair.loop.of(pair.sender, SendCancelled))
        assert closed(pair.sender, "data", "ended") == 1
        pair.loop.until(lambda: peer.closed)
    pair.close()


def test_a_connection_that_another_one_replaces_holds_no_pages(context: Any) -> None:
    pair = Pair(context, BIG, BIG, config=ROOMY, connected=False)
    with stuck(pair) as peer:
        second = RawPeer(context, pair.loop, pair.sender.port, session=pair.session)
        assert isinstance(second.take()[0], Attached)
        pair.loop.wait_for(pair.sender, SendCancelled)
        pair.loop.until(lambda: peer.closed)
    pair.close()


def test_ending_one_session_leaves_the_others_their_connections(context: Any) -> None:
    pair = Pair(context, geometry(16), geometry(16))
    other = "z" * 32
    admit = AdmitPeer(seq=0, terms=PeerTerms(session=other, geometries=(pair.destination,), window_bytes=1 << 20))
    pair.loop.apply(pair.sender, admit)
    peer = RawPeer(context, pair.loop, pair.sender.port, session=other)
    assert isinstance(peer.take()[0], Attached)
    pair.loop.until(lambda: value(pair.receiver.statistics(), "data_connections") == 1)
    pair.loop.apply(pair.sender, DropPeer(seq=1, session=other))
    pair.expect(1, [0], 0, 16)
    pair.send(1, 0, 0, 16, pages=[1], dst_pages=[0], last=True)
    pair.loop.wait_for(pair.receiver, KvReceived)
    assert closed(pair.sender, "data", "ended") == 1
    assert value(pair.sender.statistics(), "refusals_total", ("data", "no_session")) == 0, "it has not attached again"
    pair.close()


@pytest.mark.parametrize("frame", [RUBBISH, ANSWERS.encode(Ack(ticket="t", generation=1, chunk=0))])
def test_strangers_at_the_data_socket_are_refused_a_few_times_and_cut_off(context: Any, frame: bytes) -> None:
    pair = Pair(context, geometry(16), geometry(16))
    with Plain(pair.sender.port) as peer:
        insist(pair.loop, peer, frame, lambda: peer.closed)
        assert closed(pair.sender, "data", "refused") == 1
        assert 0 < peer.heard().count(b"Refuse") <= REFUSALS
    pair.expect(1, [0], 0, 16)
    pair.send(1, 0, 0, 16, pages=[1], dst_pages=[0], last=True)
    pair.loop.wait_for(pair.receiver, KvReceived)
    pair.close()


def test_a_peer_that_leaves_the_answers_to_its_pings_unread_loses_its_connection(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "QUEUED_MESSAGES", 100)
    pair = Pair(context, geometry(16), geometry(16), connected=False)
    with attached(pair) as peer:
        insist(pair.loop, peer, PING, lambda: closed(pair.sender, "data", "unread"))
        pair.loop.until(lambda: peer.closed)
    again = RawPeer(context, pair.loop, pair.sender.port, session=pair.session)
    assert isinstance(again.take()[0], Attached)
    pair.close()


def test_acknowledging_what_it_does_not_read_gets_a_peer_no_more_than_its_queue(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window opens with every acknowledgement; libzmq's queue does not."""
    monkeypatch.setattr(sender, "QUEUED_MESSAGES", 8)
    pair = Pair(context, BIG, BIG, config=TransferConfig(window_bytes=1), connected=False)
    with attached(pair) as peer:
        for chunk in range(60):
            pair.send(1, chunk, chunk * 64, 64, pages=range(60), dst_pages=range(60))
            peer.say(ANSWERS.encode(Ack(ticket="ticket-1", generation=1, chunk=chunk)))
        acks = (ANSWERS.encode(Ack(ticket="ticket-1", generation=1, chunk=chunk)) for chunk in cycle(range(60)))
        pair.loop.until(lambda: peer.say(next(acks)) or closed(pair.sender, "data", "unread"))
        assert value(pair.sender.statistics(), "queued_chunks") > 30
        pair.loop.apply(pair.sender, CancelSend(seq=1, request=1))
        pair.loop.wait_for(pair.sender, SendCancelled)
    pair.close()


def test_however_small_chunks_are_only_so_many_are_in_flight(context: Any) -> None:
    pair = Pair(context, geometry(1), geometry(1), config=ROOMY, pages=PARTS_IN_FLIGHT + 10, connected=False)
    peer = RawPeer(context, pair.loop, pair.sender.port)
    assert isinstance(peer.take()[0], Attached)
    pages = range(PARTS_IN_FLIGHT + 10)
    for chunk in pages:
        pair.send(1, chunk, chunk, 1, pages=pages, dst_pages=pages)
    assert value(pair.sender.statistics(), "queued_chunks") == 10
    for _ in pages:
        header, _ = peer.take()
        assert isinstance(header, Chunk)
        peer.say(Ack(ticket=header.ticket, generation=1, chunk=header.chunk))
    pair.loop.wait_for(pair.sender, ChunkAcked, len(pages))
    pair.close()


class ServerBench:
    """A control endpoint, and peers that say to it what they are told."""

    def __init__(self, context: Any) -> None:
        self.control_server = ControlServer(TransferConfig(max_tickets_per_peer=4), context)
        self.control_server.ready(OFFER)
        self.loop = Loop(self.control_server)

    def joined(self, instance: str) -> Plain:
        peer, before = Plain(self.control_server.port), value(self.control_server.statistics(), "control_sessions")
        peer.say(PEER.encode(hello(instance=instance)))
        self.loop.until(lambda: value(self.control_server.statistics(), "control_sessions") == before + 1)
        return peer


@pytest.fixture
def bench(context: Any) -> Iterator[ServerBench]:
    made = ServerBench(context)
    yield made
    made.loop.close()


@pytest.mark.parametrize("frame", [RUBBISH, PEER.encode(Ping(number=1)), PEER.encode(hello(fingerprint="other"))])
def test_strangers_at_the_control_endpoint_are_refused_a_few_times_and_cut_off(
    bench: ServerBench, frame: bytes
) -> None:
    with Plain(bench.control_server.port) as peer:
        insist(bench.loop, peer, frame, lambda: peer.closed)
        assert closed(bench.control_server, "control", "refused") == 1
        assert 0 < peer.heard().count(b"Refuse") <= REFUSALS


def test_a_peer_that_leaves_its_replies_unread_ends_its_session_and_its_connection(bench: ServerBench) -> None:
    with bench.joined("c" * 32) as calm, bench.joined("d" * 32) as loud:
        insist(
            bench.loop,
            loud,
            PEER.encode(hello(instance="d" * 32)),
            lambda: bench.loop.of(bench.control_server, PeerGone),
        )
        assert "does not read" in bench.loop.wait_for(bench.control_server, PeerGone).reason
        assert closed(bench.control_server, "control", "unread") == 1
        bench.loop.until(lambda: loud.closed)
        calm.say(PEER.encode(Ping(number=1)))
        bench.loop.turn()
        assert not calm.closed
        assert value(bench.control_server.statistics(), "control_sessions") == 1


def test_a_session_that_ends_takes_its_connection_with_it_after_the_last_word(bench: ServerBench) -> None:
    with bench.joined("c" * 32) as peer:
        session = bench.loop.wait_for(bench.control_server, PeerJoined).session
        bench.loop.apply(bench.control_server, EndPeer(session=session, reason="enough"))
        bench.loop.until(lambda: peer.closed)
        assert b"enough" in peer.heard()
        assert closed(bench.control_server, "control", "ended") == 1


def test_a_peer_that_comes_back_on_the_same_connection_keeps_it(bench: ServerBench) -> None:
    with bench.joined("c" * 32) as peer:
        peer.say(PEER.encode(Goodbye()))
        bench.loop.wait_for(bench.control_server, PeerGone)
        peer.say(PEER.encode(hello(instance="c" * 32)))
        bench.loop.wait_for(bench.control_server, PeerJoined, 2)
        for event in bench.control_server.tick(CLOCK.now() + 2.0):
            assert not isinstance(event, PeerGone)
        bench.loop.turn()
        assert not peer.closed


def test_unread_replies_have_room_for_every_ticket_of_a_peer() -> None:
    assert unread_replies(TransferConfig(max_tickets_per_peer=500)) >= 2 * 500


def test_a_stage_that_does_not_read_its_answers_is_connected_to_again(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "QUEUED_ANSWERS", 50)
    stage = RawStage(context, options={zmq.RCVHWM: 1, zmq.RCVBUF: 4096})
    stage.loop.raw.remove(stage.socket)  # it is not read from now on

    def given_up() -> bool:
        for number in range(100):
            stage.send(0, ticket="x" * 200, chunk=number)  # which was not asked for
        return closed(stage.receiver, "receiver", "unread") == 1

    stage.loop.until(given_up, timeout_s=30)
    stage.loop.raw.append(stage.socket)
    routes = {stage.route}

    def attached_again() -> bool:
        while stage.socket.poll(0):
            route, body = stage.socket.recv_multipart()
            if isinstance(ANSWERS.decode(body), Attach):
                routes.add(route)
        return len(routes) == 2

    stage.loop.until(attached_again)
    stage.close()


def test_a_control_endpoint_that_does_not_read_is_down(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "QUEUED_MESSAGES", 50)
    control_server = ControlServer(TransferConfig(peer_timeout_s=30), context)
    asking = ControlClient(TransferConfig(peer_timeout_s=30), context)
    loop = Loop(control_server, asking)
    control_server.ready(OFFER)
    asking.ready(hello())
    loop.apply(asking, ConnectPrefill(name="p", endpoint=f"tcp://127.0.0.1:{control_server.port}"))
    session = loop.wait_for(asking, PrefillUp).session
    alone = Loop(asking)  # the control endpoint is not turned any more

    def down() -> bool:
        for number in range(1000):
            alone.apply(asking, AskCancel(session=session, ticket=f"{number}", generation=1, reason="x" * 1000))
        return bool(alone.of(asking, PrefillDown))

    alone.until(down, timeout_s=30)
    assert alone.of(asking, PrefillDown)[0].reason == "it does not read what it is told"
    loop.close()
