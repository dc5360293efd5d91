"""Peers and prefill servers that keep to the form of messages and to nothing else: what it costs, and whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer
from headrace.core.messages.peers import PeerGone, PeerReserved, PrefillDown, PrefillUp, TellCancelled, TicketFailed
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.rate_limit import TokenBucket
from headrace.core.stats import MAX_LABELS, Counters
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.control.connection import ControlConnection
from headrace.transfer.control.server import ControlServer
from headrace.transfer.control.session import BURST, MESSAGES_PER_S, RESERVED_PAGES, page_limit
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.messages import (
    Attach,
    Cancel,
    ControlMessage,
    Failed,
    Finished,
    Goodbye,
    Nack,
    Ping,
    Pong,
    Welcome,
)
from tests.fuzz.mutations import VALID, Mutator
from tests.transfer.control.session_table import CONFIG, OFFER, hello, joined, reserve
from tests.transfer.harness import Loop, random_store, zmq_context
from tests.transfer.raw import SESSION, RawStage

MANY = TransferConfig(max_tickets_per_peer=1000)
PING, PONG = (msgspec.msgpack.encode({"type": kind, "number": 1 << 40}) for kind in ("Ping", "Pong"))


def test_a_peer_that_never_stops_talking_loses_its_session_and_others_do_not() -> None:
    made, session = joined(b"loud")
    made.receive(b"calm", hello(instance="e" * 32), 0.0)
    answers = [made.receive(b"loud", Ping(number=0), 0.1) for _ in range(int(BURST + MESSAGES_PER_S))]
    ended = next(number for number, answer in enumerate(answers) if answer.events)
    assert BURST <= ended <= BURST + MESSAGES_PER_S * 0.1 + 1
    [(_, goodbye)] = answers[ended].replies
    assert isinstance(goodbye, Goodbye)
    assert "messages a second" in goodbye.reason
    assert answers[ended].events == [PeerGone(session=session, reason=goodbye.reason, name="decode")]
    assert not any(answer.replies for answer in answers[ended + 1 :])
    assert not made.receive(b"loud", hello(), 1.0).replies, "a new session needs a new connection"
    assert made.receive(b"new", hello(), 1.0).replies
    assert made.receive(b"calm", Ping(number=1), 0.2).replies == [(b"calm", Pong(number=1))]


def test_saying_hello_again_and_again_counts_as_talking() -> None:
    made = SessionTable(CONFIG, lambda: "s" * 32)
    made.ready(OFFER)
    said = [made.receive(b"loud", hello(kv_pages=number % 2 + 100), 0.0).replies for number in range(int(BURST) + 9)]
    assert isinstance(said[int(BURST)][0][1], Welcome)
    assert any(isinstance(reply, Goodbye) for replies in said for _, reply in replies)
    assert made.peers == 0


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_a_peer_below_the_rate_is_never_cut_off(pauses: list[float]) -> None:
    rate, now = TokenBucket(0.0, MESSAGES_PER_S, BURST), 0.0
    for pause in pauses:
        now += pause
        messages = int(0.999 * pause * MESSAGES_PER_S)  # differences of times are rounded
        assert not any(rate.exceeded(now) for _ in range(messages))


def test_pages_in_open_tickets_have_a_limit_that_ending_a_ticket_gives_back() -> None:
    made = SessionTable(MANY, lambda: "s" * 32)
    made.ready(OFFER)
    made.receive(b"a", hello(kv_pages=10), 0.0)
    limit = page_limit(hello(kv_pages=10))
    for number in range(limit // 2):
        assert made.receive(b"a", reserve(f"t{number}"), 0.0).events
    [(_, refused)] = made.receive(b"a", reserve("more"), 0.0).replies
    assert isinstance(refused, Failed)
    assert (refused.code, refused.status) == ("too_many_tickets", 429)
    assert str(limit) in refused.message
    made.receive(b"a", Cancel(ticket="other", generation=1), 0.0)
    assert not made.receive(b"a", reserve("more", 2), 0.0).events
    [event] = made.receive(b"a", Cancel(ticket="t0", generation=1), 0.0).events
    made.tell(TellCancelled(session="s" * 32, ticket="t0", generation=1), 0.0)
    assert isinstance(made.receive(b"a", reserve("more", 3), 0.0).events[0], PeerReserved)
    assert page_limit(hello(kv_pages=1 << 30)) == RESERVED_PAGES
    assert event


def link(**options: Any) -> ControlConnection:
    made = ControlConnection("p", "10.0.0.5", hello, CONFIG, Counters(), **options)
    made.tick(0.0)
    return made


def welcome(**changes: Any) -> Welcome:
    made = SessionTable(CONFIG, lambda: "s" * 32)
    made.ready(OFFER)
    message = made.receive(b"a", hello(), 0.0).replies[0][1]
    assert isinstance(message, Welcome)
    return replace(message, **changes)


def test_a_prefill_server_cannot_send_its_peer_to_any_address() -> None:
    stage = replace(welcome().stages[0], data_host="169.254.169.254", data_port=80)
    asked: list[tuple[str, int]] = []
    refusing = link(may_connect=lambda host, port: bool(asked.append((host, port))))
    [down] = refusing.receive(welcome(stages=(stage,)), 0.1).events
    assert isinstance(down, PrefillDown)
    assert asked == [("169.254.169.254", 80)]
    assert "169.254.169.254:80" in down.reason
    assert "--allow-prefill" in down.reason
    [up] = link(may_connect=lambda host, port: True).receive(welcome(stages=(stage,)), 0.1).events
    assert isinstance(up, PrefillUp)
    assert up.terms.endpoints == ("tcp://169.254.169.254:80",)
    [up] = link(may_connect=lambda host, port: False).receive(welcome(), 0.1).events
    assert isinstance(up, PrefillUp), "the control endpoint's own host needs no leave"


@pytest.mark.parametrize(("status", "told"), [(200, 502), (101, 502), (304, 502), (400, 400), (503, 503)])
def test_a_failure_is_never_answered_as_a_success(status: int, told: int) -> None:
    up = link()
    up.receive(welcome(), 0.1)
    failed = Failed(ticket="t", generation=1, code="c", message="m", status=status)
    [event] = up.receive(failed, 0.2).events
    assert isinstance(event, TicketFailed)
    assert event.error.status == told


def test_what_a_server_says_cannot_write_lines_of_its_own_into_the_log() -> None:
    [down] = link().receive(Goodbye(reason="x\n2026-01-01 ERROR \x1b[31mall is lost"), 0.1).events
    assert isinstance(down, PrefillDown)
    assert down.reason.isprintable()


def test_label_values_of_others_do_not_grow_the_metrics_without_end() -> None:
    counters = Counters()
    for number in range(3 * MAX_LABELS):
        counters.add("nacks_total", labels=(f"code{number}",))
    counters.add("nacks_total", labels=("code1",))
    samples = counters.snapshot()
    assert len(samples) == MAX_LABELS + 1
    assert counters.value("nacks_total", ("other",)) == 2 * MAX_LABELS
    assert counters.value("nacks_total", ("code1",)) == 2
    assert sum(sample.value for sample in samples) == 3 * MAX_LABELS + 1


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0, 1e9])
def test_a_time_that_is_none_is_no_message(seconds: float) -> None:
    codec: Codec[ControlMessage] = Codec(ControlMessage)
    failed = Failed(ticket="t", generation=1, code="c", message="m", status=429, retry_after_s=seconds)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(failed))
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(welcome(heartbeat_s=seconds)))


def test_chunks_cannot_go_on_for_ever() -> None:
    with zmq_context() as context:
        stage = RawStage(context)
        stage.send(0, chunk=33)  # of 32 tokens
        answer = stage.answer()
        assert isinstance(answer, Nack)
        assert (answer.code, "33" in answer.message) == ("bad_chunk", True)
        stage.close()


@contextmanager
def watched_context() -> Iterator[tuple[Any, list[str]]]:
    """A context, and the addresses that sockets of it are connected to."""
    addresses: list[str] = []

    class Watched(zmq.Socket[bytes]):
        def connect(self, addr: str) -> Any:
            addresses.append(addr)
            return super().connect(addr)

    class Context(zmq.Context[Watched]):
        _socket_class = Watched

    context: Any = Context()
    try:
        yield context, addresses
    finally:
        context.destroy(linger=0)


def answers(loop: Loop, peer: Any, *greeting: bytes) -> None:
    """Turn until the port answers the greeting and a ping: then it has read what the peer said before. They are sent
    again and again, since a connection that sent too large a frame is closed and made anew."""

    def answered() -> bool:
        for message in (*greeting, PING):
            peer.send(message)
        return any(PONG in peer.recv_multipart() for _ in iter(lambda: peer.poll(0), 0))

    loop.until(answered, timeout_s=20)


@given(st.integers(0, 1 << 32))
@settings(max_examples=20, deadline=None)
def test_control_endpoint_and_stage_connect_to_no_address_that_they_are_told(seed: int) -> None:
    """Their sockets are bound, and connected to none but the inside of their process."""
    mutator = Mutator(seed)
    geometry = OFFER.geometries[0]
    with watched_context() as (context, addresses), zmq_context() as outside:
        control_server = ControlServer(CONFIG, context)
        sender = Sender(CONFIG, stage=0, geometry=geometry, store=random_store(geometry, 4), context=context)
        loop = Loop(control_server, sender)
        control_server.ready(OFFER)
        loop.apply(
            sender, AdmitPeer(seq=0, terms=PeerTerms(session=SESSION, geometries=(geometry,), window_bytes=1 << 20))
        )
        address = {"host": "127.0.0.1", "endpoint": "tcp://127.0.0.1:9", "data_host": "127.0.0.1", "data_port": 9}
        attach = Attach(session=SESSION, stage=0, checksum="xxh3_64")
        for port, greeting in ((control_server.port, hello(name=address["endpoint"])), (sender.port, attach)):
            peer = outside.socket(zmq.DEALER)
            loop.raw.append(peer)
            peer.connect(f"tcp://127.0.0.1:{port}")
            told = msgspec.msgpack.encode(msgspec.to_builtins(greeting) | address)
            answers(loop, peer, told)
            for _ in range(40):
                peer.send(mutator.any(VALID))
            answers(loop, peer, told)
        loop.close()
        assert [to for to in addresses if not to.startswith("inproc:")] == []
        with context.socket(zmq.DEALER) as control:
            control.connect("tcp://127.0.0.1:9")
        assert "tcp://127.0.0.1:9" in addresses, "it would have been seen"


GEOMETRIES = st.builds(
    Geometry,
    st.sampled_from(["float32", "bfloat16", "x", ""]),
    *[st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70) for _ in range(6)],
)


@given(st.lists(GEOMETRIES, min_size=1, max_size=5))
def test_any_geometries_have_an_answer(geometries: list[Geometry]) -> None:
    made = SessionTable(CONFIG, lambda: "s" * 32)
    made.ready(OFFER)
    assert made.receive(b"a", hello(geometries=tuple(geometries)), 0.0).replies
    stages = tuple(replace(OFFER.stages()[0], rank=rank, geometry=geometry) for rank, geometry in enumerate(geometries))
    assert link().receive(welcome(stages=stages), 0.1).events


@given(
    st.builds(
        Finished,
        ticket=st.text(min_size=1, max_size=9),
        generation=st.integers(0, 9),
        metadata=st.binary(max_size=300) | st.binary(min_size=254).map(lambda data: b"\1\0" + data[:254]),
    )
)
def test_any_metadata_ends_in_a_word_for_the_ticket(finished: Finished) -> None:
    made = link()
    made.receive(welcome(), 0.1)
    assert len(made.receive(finished, 0.2).events) == (1 if finished.metadata else 0)


@given(st.binary(max_size=400), st.integers(0, 1 << 31), st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_any_reservation_is_passed_on_whole_or_fails_alone(pages: bytes, tokens: int, cached: int, row: int) -> None:
    made, _ = joined()
    outcome = made.receive(b"a", reserve(pages=pages, prompt_tokens=tokens, cached_tokens=cached, row=row), 0.0)
    assert len(outcome.replies) + len(outcome.events) == 1
    for event in outcome.events:
        assert isinstance(event, PeerReserved)
        assert event.reservation.row < 8
        assert event.reservation.cached_tokens < event.reservation.prompt_tokens <= 2048
    assert made.receive(b"a", reserve("fine", pages=pack([1, 2])), 0.0).events
