"""Malformed frames at the control endpoint: each is refused, and the sessions of others go on."""

import socket as sockets

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.core.messages.peers import PeerGone
from headrace.core.runtime.codec import DecodeError
from headrace.transfer.protocol.messages import CONTROL_FRAME_BYTES, Hello, Ping, Pong, Refuse, Welcome
from tests.transfer.control.harness import CONTROL, PEER, Both, Stranger
from tests.transfer.control.session_table import hello
from tests.transfer.harness import value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3))
@example([PEER.encode(hello())[:-1]])
@example([PEER.encode(hello()), b""])
@example([CONTROL.encode(Pong(number=1))])
@example([b""])
def test_rubbish_at_the_control_endpoint_is_refused_and_disturbs_no_session(lasting: Both, frames: list[bytes]) -> None:
    session = lasting.up.session
    stranger = Stranger(lasting.context, lasting)
    answer = stranger.ask(*frames)
    assert isinstance(answer, Refuse)
    assert answer.code == "bad_message"
    lasting.loop.raw.remove(stranger.socket)
    stranger.socket.close(linger=0)
    assert not lasting.loop.of(lasting.control_server, PeerGone)
    assert lasting.up.session == session


def test_oversized_frames_are_refused_and_far_larger_ones_cut_off(lasting: Both) -> None:
    session = lasting.up.session
    stranger = Stranger(lasting.context, lasting)
    answer = stranger.ask(b"x" * (CONTROL_FRAME_BYTES + 1))
    assert isinstance(answer, Refuse)
    assert value(lasting.control_server.statistics(), "malformed_frames_total", ("control",)) == 1
    cut_off = Stranger(lasting.context, lasting)
    cut_off.socket.send(b"x" * (4 * CONTROL_FRAME_BYTES))
    assert lasting.reserve("still here").session == session
    assert value(lasting.control_server.statistics(), "malformed_frames_total", ("control",)) == 1


def test_a_session_survives_its_own_bad_frame(lasting: Both) -> None:
    stranger = Stranger(lasting.context, lasting)
    answer = stranger.ask(PEER.encode(hello(instance="e" * 32)))
    assert isinstance(answer, Welcome)
    assert isinstance(stranger.ask(b"\x81"), Refuse)
    assert stranger.ask(PEER.encode(Ping(number=3))) == Pong(number=3)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""])
def test_bytes_that_are_not_zmq_disturb_no_session(lasting: Both, data: bytes) -> None:
    session = lasting.up.session
    with sockets.create_connection(("127.0.0.1", lasting.control_server.port)) as connection:
        connection.sendall(data)
        assert lasting.reserve().session == session


@given(st.binary(max_size=400))
def test_decoders_return_a_bounded_message_or_raise_decode_error(data: bytes) -> None:
    try:
        message = PEER.decode(data)
    except DecodeError:
        return
    assert not isinstance(message, Hello) or len(message.name) <= 256
