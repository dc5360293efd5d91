"""FrameRouter: connections of local stages, with routing ids, replaced, closed and slow."""

import socket
from collections.abc import Iterator

import pytest

from headrace.core.runtime.frames import ConnectionClosed, FrameSocket, connect, make_door
from headrace.server.launch.stage_connections import ACCEPT_PAUSE_S, FrameRouter
from tests.scarcity import no_descriptors


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    inner, outer = make_door()
    with inner, outer:
        yield inner, outer


@pytest.fixture
def door(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    """Its outer end."""
    return ends[1]


@pytest.fixture
def router(ends: tuple[socket.socket, socket.socket]) -> Iterator[FrameRouter]:
    made = FrameRouter(ends[0])
    yield made
    made.close()


def named(door: socket.socket, name: bytes) -> FrameSocket:
    connection = connect(door)
    connection.send(name)
    return connection


def received(router: FrameRouter, count: int) -> list[tuple[bytes, bytes]]:
    messages: list[tuple[bytes, bytes]] = []
    for _ in range(1000):
        messages += [(name, frame) for name, [frame] in router.receive(0.0)]
        if len(messages) >= count:
            break
    return messages


def test_messages_have_the_routing_id_of_their_connection(door: socket.socket, router: FrameRouter) -> None:
    one, other = named(door, b"one"), named(door, b"other")
    one.send(b"1")
    other.send(b"2")
    one.send(b"3")
    assert sorted(received(router, 3)) == [(b"one", b"1"), (b"one", b"3"), (b"other", b"2")]
    router.send(b"other", b"for the other")
    assert other.receive() == [b"for the other"]
    assert one.receive() == []
    assert len(router.sockets()) == 3
    one.close()
    other.close()


def test_a_later_connection_takes_over_the_routing_id(door: socket.socket, router: FrameRouter) -> None:
    before = named(door, b"stage")
    before.send(b"1")
    assert received(router, 1) == [(b"stage", b"1")]
    after = named(door, b"stage")
    after.send(b"2")
    assert received(router, 1) == [(b"stage", b"2")]
    router.send(b"stage", b"an order")
    assert after.receive() == [b"an order"]
    with pytest.raises(ConnectionClosed):
        before.receive()
    before.close()
    after.close()


def test_sending_to_a_closed_connection_raises(door: socket.socket, router: FrameRouter) -> None:
    with pytest.raises(ConnectionClosed, match="not connected"):
        router.send(b"stage", b"an order")
    connection = named(door, b"stage")
    connection.send(b"the last one")
    connection.close()
    nameless = connect(door)
    nameless.close()
    assert received(router, 2) == [(b"stage", b"the last one")]
    with pytest.raises(ConnectionClosed):
        router.send(b"stage", b"an order")
    assert len(router.sockets()) == 1


def test_a_slow_stage_does_not_delay_others(door: socket.socket, router: FrameRouter) -> None:
    slow, other = named(door, b"slow"), named(door, b"other")
    for connection in (slow, other):
        connection.send(b"here")
    received(router, 2)
    router.send(b"slow", bytes(4 << 20))
    router.send(b"other", b"at once")
    assert router.unsent
    assert other.receive() == [b"at once"]
    messages: list[bytes] = []
    while not messages:
        router.flush(0.0)
        messages = slow.receive()
    assert messages == [bytes(4 << 20)]
    assert not router.unsent
    slow.close()
    other.close()


def test_connecting_to_a_process_that_has_ended_raises(door: socket.socket, router: FrameRouter) -> None:
    router.close()
    with pytest.raises(ConnectionClosed, match="no process is behind the door"):
        connect(door)


def test_a_connection_that_was_not_admitted_ends_with_the_process(door: socket.socket, router: FrameRouter) -> None:
    waiting = named(door, b"waiting")
    router.close()
    with pytest.raises(ConnectionClosed):
        waiting.receive()
    waiting.close()


def test_a_stage_comes_in_when_there_are_descriptors_again(
    door: socket.socket, router: FrameRouter, caplog: pytest.LogCaptureFixture
) -> None:
    known = named(door, b"known")
    assert received(router, 0) == []
    listening = len(router.sockets())
    waiting = named(door, b"waiting")
    waiting.send(b"1")
    with no_descriptors():
        for turn in range(3):
            now = 10.0 + turn * ACCEPT_PAUSE_S
            known.send(b"%d" % turn)
            assert list(router.receive(now)) == [(b"known", [b"%d" % turn])], "those that are in are heard"
            assert len(router.sockets()) == listening - 1, "the listener would wake the loop again and again"
            assert router.next_deadline() == now + ACCEPT_PAUSE_S
            assert list(router.receive(now)) == [], "and is not tried before its time"
            router.flush(now + ACCEPT_PAUSE_S)
            assert (len(router.sockets()), router.next_deadline()) == (listening, None)
    assert received(router, 1) == [(b"waiting", b"1")]
    assert [(sample.name, sample.value) for sample in router.statistics()] == [("accept_failures_total", 3)]
    assert [record.message for record in caplog.records] == [
        "cannot accept the connection of a stage, trying again: Too many open files"
    ], "said once"
    known.close()
    waiting.close()


def test_the_door_is_looked_at_only_when_a_connection_waits(router: FrameRouter) -> None:
    with no_descriptors():
        assert list(router.receive(0.0)) == []
    assert router.next_deadline() is None


def test_a_connection_that_is_gone_before_it_is_admitted(door: socket.socket, router: FrameRouter) -> None:
    connect(door).close()
    assert received(router, 0) == []
    assert len(router.sockets()) == 1
