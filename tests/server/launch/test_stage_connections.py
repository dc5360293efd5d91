"""FrameRouter: connections of local stages, with routing ids, replaced, closed and slow."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headrace.core.runtime.frames import ConnectionClosed, FrameSocket, connect
from headrace.server.launch.stage_connections import FrameRouter


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
        messages += [(name, frame) for name, [frame] in router.receive()]
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
        router.flush()
        messages = slow.receive()
    assert messages == [bytes(4 << 20)]
    assert not router.unsent
    slow.close()
    other.close()


def test_connecting_to_a_path_without_a_listener_raises(folder: Path) -> None:
    with pytest.raises(ConnectionClosed, match="no process listens"):
        connect(str(folder / "stages"), timeout_s=0.05)
