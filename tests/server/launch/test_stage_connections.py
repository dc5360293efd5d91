"""FrameRouter: connections of local stages, with routing ids, replaced, closed and slow."""

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headrace.core.runtime.frames import ConnectionClosed, FrameSocket, connect
from headrace.server.launch.stage_connections import ACCEPT_PAUSE_S, FrameRouter
from tests.scarcity import no_descriptors


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:  # a short one: the kernel bounds the paths of sockets
        yield Path(made)


@pytest.fixture
def router(folder: Path) -> Iterator[FrameRouter]:
    made = FrameRouter(str(folder / "stages"))
    yield made
    made.close()


def named(folder: Path, name: bytes) -> FrameSocket:
    connection = connect(str(folder / "stages"))
    connection.send(name)
    return connection


def received(router: FrameRouter, count: int) -> list[tuple[bytes, bytes]]:
    messages: list[tuple[bytes, bytes]] = []
    for _ in range(1000):
        messages += [(name, frame) for name, [frame] in router.receive(0.0)]
        if len(messages) >= count:
            break
    return messages


def test_messages_have_the_routing_id_of_their_connection(folder: Path, router: FrameRouter) -> None:
    one, other = named(folder, b"one"), named(folder, b"other")
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


def test_a_later_connection_takes_over_the_routing_id(folder: Path, router: FrameRouter) -> None:
    before = named(folder, b"stage")
    before.send(b"1")
    assert received(router, 1) == [(b"stage", b"1")]
    after = named(folder, b"stage")
    after.send(b"2")
    assert received(router, 1) == [(b"stage", b"2")]
    router.send(b"stage", b"an order")
    assert after.receive() == [b"an order"]
    with pytest.raises(ConnectionClosed):
        before.receive()
    before.close()
    after.close()


def test_sending_to_a_closed_connection_raises(folder: Path, router: FrameRouter) -> None:
    with pytest.raises(ConnectionClosed, match="not connected"):
        router.send(b"stage", b"an order")
    connection = named(folder, b"stage")
    connection.send(b"the last one")
    connection.close()
    nameless = connect(str(folder / "stages"))
    nameless.close()
    assert received(router, 2) == [(b"stage", b"the last one")]
    with pytest.raises(ConnectionClosed):
        router.send(b"stage", b"an order")
    assert len(router.sockets()) == 1


def test_a_slow_stage_does_not_delay_others(folder: Path, router: FrameRouter) -> None:
    slow, other = named(folder, b"slow"), named(folder, b"other")
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


def test_connecting_to_a_path_without_a_listener_raises(folder: Path) -> None:
    with pytest.raises(ConnectionClosed, match="no process listens"):
        connect(str(folder / "stages"), timeout_s=0.05)


def test_a_stage_comes_in_when_there_are_descriptors_again(
    folder: Path, router: FrameRouter, caplog: pytest.LogCaptureFixture
) -> None:
    known = named(folder, b"known")
    assert received(router, 0) == []
    listening = len(router.sockets())
    waiting = named(folder, b"waiting")
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


def test_accept_is_called_only_when_a_connection_waits(router: FrameRouter) -> None:
    with no_descriptors():
        assert list(router.receive(0.0)) == []
    assert router.next_deadline() is None


def test_a_connection_that_is_gone_before_it_is_accepted(folder: Path, router: FrameRouter) -> None:
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(str(folder / "stages"))
    gone.close()
    assert received(router, 0) == []
    assert len(router.sockets()) == 1
