"""ControlServer and control client over real sockets: sessions, tickets, restarts, and peers that send rubbish."""

import socket as sockets
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ConnectPrefill,
    DisconnectPrefill,
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    PrefillDown,
    PrefillUp,
    TellCancelled,
    TellFailed,
    TellFinished,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.runtime import process
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer
from headrace.transfer.protocol.messages import (
    CONTROL_FRAME_BYTES,
    ControlMessage,
    Hello,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from tests.scarcity import no_descriptors
from tests.transfer.control.test_sessions import FIRST, OFFER, hello
from tests.transfer.harness import CLOCK, Loop, value, zmq_context

CONFIG = TransferConfig(peer_timeout_s=1.0)
PEER: Codec[PeerMessage] = Codec(PeerMessage)
CONTROL: Codec[ControlMessage] = Codec(ControlMessage)


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq_context() as made:
        yield made


class Both:
    """A control endpoint and a control client, the control client told to dial the control endpoint."""

    def __init__(self, context: Any, *, ready: bool = True, control_context: Any = None) -> None:
        self.context = context
        self.control_server = ControlServer(CONFIG, control_context or context)
        self.control_client = ControlClient(CONFIG, context)
        self.loop = Loop(self.control_server, self.control_client)
        if ready:
            self.control_server.ready(OFFER)
        self.control_client.ready(hello())
        self.endpoint = f"tcp://127.0.0.1:{self.control_server.port}"
        self.loop.apply(self.control_client, ConnectPrefill(name="p", endpoint=self.endpoint))

    @property
    def up(self) -> PrefillUp:
        return self.loop.wait_for(self.control_client, PrefillUp)

    def reserve(self, ticket: str = "t", generation: int = 1) -> PeerReserved:
        seen = len(self.loop.of(self.control_server, PeerReserved))
        ask = AskReserve(
            session=self.up.session, ticket=ticket, generation=generation, prompt_tokens=40, cached_tokens=0,
            pages=pack([8, 9]), row=0,
        )  # fmt: skip
        self.loop.apply(self.control_client, ask)
        return self.loop.wait_for(self.control_server, PeerReserved, seen + 1)


@pytest.fixture
def both(context: Any) -> Iterator[Both]:
    made = Both(context)
    yield made
    made.loop.close()


class Stranger:
    """A DEALER that says to the control endpoint what it is told."""

    def __init__(self, context: Any, both: Both) -> None:
        self.both = both
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(both.endpoint)
        both.loop.raw.append(self.socket)

    def ask(self, *frames: bytes) -> ControlMessage:
        self.socket.send_multipart(frames)
        self.both.loop.until(lambda: self.socket.poll(0))
        return CONTROL.decode(self.socket.recv())


def test_hello_reserve_and_the_three_ends_of_a_ticket(both: Both) -> None:
    up = both.up
    joined = both.loop.wait_for(both.control_server, PeerJoined)
    assert (up.name, up.session, up.geometries) == ("p", joined.session, OFFER.geometries)
    assert up.endpoints == ("tcp://127.0.0.1:7001",)
    session = up.session

    assert both.reserve("a").pages == pack([8, 9])
    error = ErrorInfo(code="stage_failed", message="stage 0 died", status=503, stage=0)
    both.loop.apply(both.control_server, TellFailed(session=session, ticket="a", generation=1, error=error))
    failed = both.loop.wait_for(both.control_client, TicketFailed)
    assert failed == TicketFailed(session=session, ticket="a", generation=1, error=error)

    both.reserve("b", 2)
    both.loop.apply(both.control_client, AskCancel(session=session, ticket="b", generation=2, reason="client left"))
    assert both.loop.wait_for(both.control_server, PeerCancelled).reason == "client left"
    both.loop.apply(both.control_server, TellCancelled(session=session, ticket="b", generation=2))
    assert both.loop.wait_for(both.control_client, TicketCancelled).ticket == "b"

    both.reserve("c", 3)
    both.loop.apply(both.control_server, TellFinished(session=session, ticket="c", generation=3, first=FIRST))
    assert both.loop.wait_for(both.control_client, TicketFinished).first == FIRST


def test_two_names_of_one_control_endpoint_are_two_sessions_that_both_stand(both: Both) -> None:
    """Else each hello would end the other's session, for ever."""
    first = both.up.session
    both.loop.apply(
        both.control_client, ConnectPrefill(name="q", endpoint=both.endpoint.replace("127.0.0.1", "localhost"))
    )
    both.loop.until(lambda: len(both.loop.of(both.control_client, PrefillUp)) == 2)
    end = CLOCK.now() + 2 * CONFIG.peer_timeout_s
    both.loop.until(lambda: CLOCK.now() >= end)
    assert not both.loop.of(both.control_client, PrefillDown)
    assert [up.session != first for up in both.loop.of(both.control_client, PrefillUp)] == [False, True]


def test_pings_renew_a_held_ticket_until_it_is_reserved_or_given_up(both: Both) -> None:
    session = both.up.session
    for ticket in ("a", "b"):
        both.loop.apply(both.control_client, AskRenew(session=session, ticket=ticket))
    both.loop.until(
        lambda: any(set(event.tickets) == {"a", "b"} for event in both.loop.of(both.control_server, PeerRenewed))
    )
    both.reserve("a")
    both.loop.apply(both.control_client, AskCancel(session=session, ticket="b", generation=0, reason="too late"))
    released = both.loop.wait_for(both.control_server, PeerReleased)
    assert (released.ticket, released.reason) == ("b", "too late")
    seen = len(both.loop.of(both.control_server, PeerRenewed))
    end = CLOCK.now() + CONFIG.peer_timeout_s
    both.loop.until(lambda: CLOCK.now() >= end)
    assert len(both.loop.of(both.control_server, PeerRenewed)) == seen, "pings go on, and renew nothing"
    assert not both.loop.of(both.control_server, PeerGone)


def test_what_a_reservation_says_of_its_prompt_gets_to_the_scheduler(both: Both) -> None:
    for wait, digest in ((True, ""), (False, "f" * 64)):
        ask = AskReserve(
            session=both.up.session, ticket=f"t{wait}", generation=1, prompt_tokens=40, cached_tokens=0,
            pages=pack([8, 9]), row=0, wait=wait, prompt_hash=digest,
        )  # fmt: skip
        both.loop.apply(both.control_client, ask)
        reserved = both.loop.wait_for(both.control_server, PeerReserved, 2 - wait)
        assert (reserved.ticket, reserved.wait, reserved.prompt_hash) == (ask.ticket, wait, digest)


def test_pings_keep_a_quiet_session_alive(both: Both) -> None:
    session = both.up.session
    end = CLOCK.now() + 2 * CONFIG.peer_timeout_s
    both.loop.until(lambda: CLOCK.now() >= end)
    assert not both.loop.of(both.control_server, PeerGone)
    assert not both.loop.of(both.control_client, PrefillDown)
    assert both.reserve().session == session


def test_a_peer_that_falls_silent_is_gone_by_the_clock_alone(both: Both) -> None:
    session = both.up.session
    assert both.control_server.tick(CLOCK.now() + 0.4) == []
    [gone] = both.control_server.tick(CLOCK.now() + 10)
    assert gone == PeerGone(session=session, reason="silent for 1 s")


def test_a_prefill_server_that_falls_silent_is_down_and_dialled_again(both: Both) -> None:
    session = both.up.session
    alone = Loop(both.control_client)  # the control endpoint is not turned
    down = alone.wait_for(both.control_client, PrefillDown)
    assert down == PrefillDown(name="p", session=session, reason="silent for 1 s")
    again = both.loop.wait_for(both.control_client, PrefillUp, 2)
    assert again.session != session
    assert both.loop.wait_for(both.control_server, PeerGone).session == session  # replaced by the same instance


def test_without_descriptors_a_control_endpoint_is_dialled_later(context: Any) -> None:
    control_server, control_client = ControlServer(CONFIG, context), ControlClient(CONFIG, context)
    loop = Loop(control_server, control_client)
    control_server.ready(OFFER)
    control_client.ready(hello())
    with no_descriptors():
        loop.apply(control_client, ConnectPrefill(name="p", endpoint=f"tcp://127.0.0.1:{control_server.port}"))
    loop.wait_for(control_client, PrefillUp)
    loop.close()


def test_a_crowd_at_the_control_endpoint_ends_no_session_and_keeps_no_peer_out(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_SESSIONLESS", 8)
    both = Both(context)
    session = both.up.session
    crowd = []
    for _ in range(40):
        crowd.append(sockets.create_connection(("127.0.0.1", both.control_server.port), timeout=10))
        both.loop.turn()
    both.loop.until(
        lambda: value(both.control_server.statistics(), "connections_closed_total", ("control", "shed")) >= 32
    )
    assert Stranger(context, both).ask(PEER.encode(hello(instance="e" * 32))).session != session
    assert both.reserve().session == session
    assert not both.loop.of(both.control_server, PeerGone)
    assert value(both.control_server.statistics(), "connections", ("control",)) <= 8 + 2
    both.loop.close()
    for connection in crowd:
        connection.close()


def test_a_server_that_is_not_ready_is_asked_again_and_reported_once(context: Any) -> None:
    both = Both(context, ready=False)
    both.loop.until(lambda: value(both.control_server.statistics(), "refusals_total", ("control", "not_ready")) >= 3)
    assert len(both.loop.of(both.control_client, PrefillDown)) == 1
    both.control_server.ready(OFFER)
    assert both.up
    both.loop.close()


def test_a_mismatch_is_reported_with_both_values(context: Any) -> None:
    both = Both(context, ready=False)
    both.control_server.ready(replace(OFFER, fingerprint="model-2"))
    down = both.loop.wait_for(both.control_client, PrefillDown)
    both.loop.until(lambda: "fingerprint" in both.loop.of(both.control_client, PrefillDown)[-1].reason)
    down = both.loop.of(both.control_client, PrefillDown)[-1]
    assert down.session is None
    assert down.reason == "fingerprint_mismatch: fingerprint: model-2 here, model-1 there"
    both.loop.close()


def test_a_restarted_prefill_server_at_the_same_address_is_down_then_up(context: Any) -> None:
    with zmq_context() as first_process:  # ends without a goodbye: it was killed
        both = Both(context, control_context=first_process)
        first = both.up
    control_server = ControlServer(replace(CONFIG, control_port=both.control_server.port), context)
    control_server.ready(replace(OFFER, instance="q" * 32, data_ports=(7002,)))
    loop = Loop(control_server, both.control_client)
    second = loop.wait_for(both.control_client, PrefillUp)
    [down] = loop.of(both.control_client, PrefillDown)
    assert down.session == first.session
    assert loop.events[both.control_client].index(down) < loop.events[both.control_client].index(second)
    assert second.endpoints == ("tcp://127.0.0.1:7002",)
    loop.close()


def test_goodbyes_end_the_session_on_the_other_side_at_once(both: Both, context: Any) -> None:
    session = both.up.session
    both.loop.apply(both.control_client, DisconnectPrefill(name="p"))
    assert both.loop.wait_for(both.control_server, PeerGone).reason == "goodbye: hung up"
    assert both.loop.of(both.control_client, PrefillDown)[-1].session == session
    assert both.control_client.sockets() == []

    other = Both(context)
    assert other.up
    other.control_server.close()
    loop = Loop(other.control_client)
    assert loop.wait_for(other.control_client, PrefillDown).reason == "goodbye: the server ends"
    loop.close()


def test_asking_on_a_session_that_has_ended_is_answered_here(both: Both) -> None:
    session = "x" * 32
    [failed] = both.control_client.apply(
        AskReserve(session=session, ticket="t", generation=1, prompt_tokens=1, cached_tokens=0, pages=pack([1]), row=0),
        CLOCK.now(),
    )
    assert isinstance(failed, TicketFailed)
    assert failed.error.code == "peer_gone"
    cancel = AskCancel(session=session, ticket="t", generation=1, reason="")
    assert both.control_client.apply(cancel, CLOCK.now()) == []  # no promise of anybody


def test_nobody_is_dialled_before_the_control_client_knows_what_to_say(context: Any) -> None:
    control_client = ControlClient(CONFIG, context)
    control_client.apply(ConnectPrefill(name="p", endpoint="tcp://127.0.0.1:9"), CLOCK.now())
    assert (control_client.sockets(), control_client.next_deadline()) == ([], None)
    control_client.ready(hello())
    assert control_client.next_deadline() is not None
    control_client.tick(CLOCK.now())
    assert len(control_client.sockets()) == 1
    control_client.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3))
@example([PEER.encode(hello())[:-1]])
@example([PEER.encode(hello()), b""])
@example([CONTROL.encode(Pong(number=1))])
@example([b""])
def test_rubbish_at_the_control_endpoint_is_refused_and_disturbs_nobody(both: Both, frames: list[bytes]) -> None:
    session = both.up.session
    stranger = Stranger(both.context, both)
    answer = stranger.ask(*frames)
    assert isinstance(answer, Refuse)
    assert answer.code == "bad_message"
    both.loop.raw.remove(stranger.socket)
    stranger.socket.close(linger=0)
    assert not both.loop.of(both.control_server, PeerGone)
    assert both.up.session == session


def test_oversized_frames_are_refused_and_far_larger_ones_cut_off(both: Both) -> None:
    session = both.up.session
    stranger = Stranger(both.context, both)
    answer = stranger.ask(b"x" * (CONTROL_FRAME_BYTES + 1))
    assert isinstance(answer, Refuse)
    assert value(both.control_server.statistics(), "malformed_frames_total", ("control",)) == 1
    cut_off = Stranger(both.context, both)
    cut_off.socket.send(b"x" * (4 * CONTROL_FRAME_BYTES))
    assert both.reserve("still here").session == session
    assert value(both.control_server.statistics(), "malformed_frames_total", ("control",)) == 1


def test_a_session_survives_its_own_bad_frame(both: Both) -> None:
    stranger = Stranger(both.context, both)
    answer = stranger.ask(PEER.encode(hello(instance="e" * 32)))
    assert isinstance(answer, Welcome)
    assert isinstance(stranger.ask(b"\x81"), Refuse)
    assert stranger.ask(PEER.encode(Ping(number=3))) == Pong(number=3)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""])
def test_bytes_that_are_not_zmq_disturb_nobody(both: Both, data: bytes) -> None:
    session = both.up.session
    with sockets.create_connection(("127.0.0.1", both.control_server.port)) as connection:
        connection.sendall(data)
        assert both.reserve().session == session


@given(st.binary(max_size=400))
def test_decoders_return_a_bounded_message_or_raise_decode_error(data: bytes) -> None:
    try:
        message = PEER.decode(data)
    except DecodeError:
        return
    assert not isinstance(message, Hello) or len(message.name) <= 256
