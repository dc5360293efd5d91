"""The thread that SGLang decode engines speak to, and others: idle connections, descriptors that run out."""

import errno
import mmap
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from headrace.core.types.errors import ErrorInfo
from headrace.gateway.sglang_nixl import room_thread
from headrace.gateway.sglang_nixl.records import RoomLimits
from headrace.gateway.sglang_nixl.room_thread import RoomThread
from tests.e2e.harness import wait_until as wait_for
from tests.gateway.sglang_nixl import decode_frames
from tests.gateway.sglang_nixl.room_bench import GEOMETRY

HERE = "127.0.0.1"
ELSEWHERE = "127.0.0.2"  # another address of this machine, which an engine names although it is at the first one
LIMIT = 8  # connections without a session


@pytest.fixture
def ended() -> dict[str, ErrorInfo | None]:
    return {}


@pytest.fixture
def stale() -> list[str]:
    """Addresses of ranks that have not registered."""
    return []


@pytest.fixture
def registered() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def thread(
    ended: dict[str, ErrorInfo | None],
    stale: list[str],
    registered: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RoomThread]:
    monkeypatch.setattr("headrace.transfer.sockets.connections.max_sessionless", lambda: LIMIT)
    pages = 4
    made = RoomThread(
        GEOMETRY,
        pages,
        memoryview(mmap.mmap(-1, pages * (GEOMETRY.page_bytes + 4096) + 65536)),
        host=HERE,
        limits=RoomLimits(bootstrap_s=30.0),
        make_writer=_no_writer,
        submit=lambda _command: None,
        ended=lambda request, error: ended.update({request: error}),
        is_allowed=lambda address: address in (HERE, ELSEWHERE),
        unregistered=stale.append,
        registered=lambda agent, address: registered.append((agent, address)),
    )
    made.start()
    yield made
    made.stop(10)
    assert not made.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, 20.0, "the thread's turn")


def _no_writer(_rank: Any) -> Any:
    raise AssertionError("nothing is written")


@pytest.fixture
def push(thread: RoomThread) -> Iterator[Any]:
    with zmq.Context() as context:
        sender = context.socket(zmq.PUSH)
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"tcp://{HERE}:{thread.port}")
        yield sender
        sender.close()


def value(thread: RoomThread, name: str) -> float:
    samples = (*thread.statistics().samples, *thread.connections().samples)
    return sum(one.value for one in samples if one.name == name)


def taken(thread: RoomThread, push: Any, room: int) -> Callable[[], bool]:
    """Ask for a room, which is refused and counted."""
    before = value(thread, "rooms_ended_total")
    push.send_multipart(decode_frames.room(room, [], agent="nobody"))
    return lambda: value(thread, "rooms_ended_total") > before


def test_idle_connections_give_way_and_a_registered_rank_stays(thread: RoomThread, push: Any) -> None:
    push.send_multipart(decode_frames.registration(kv=()))  # it does not fit, but its connection is known
    wait_until(taken(thread, push, 1))
    with ExitStack() as idle:
        connections = [idle.enter_context(socket.create_connection((HERE, thread.port))) for _ in range(40)]
        wait_until(lambda: value(thread, "connections_closed_total") >= 40 - LIMIT)
        assert value(thread, "connections") == LIMIT + 1
        shut = [connection for connection in connections if _is_shut(connection)]
        assert shut == connections[: len(shut)], "the oldest"
        push.setsockopt(zmq.IMMEDIATE, 1)
        wait_until(taken(thread, push, 2))
        assert thread.is_alive()


def _is_shut(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        while data := connection.recv(1000):
            assert data.startswith(b"\xff"), "libzmq's greeting"
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, zmq.EMTHREAD])
def test_without_descriptors_an_engine_is_not_told_and_the_thread_goes_on(
    number: int, thread: RoomThread, push: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refused(_context: Any, address: Any) -> Any:
        tries.append(address)
        raise zmq.ZMQError(number)

    with monkeypatch.context() as patched:
        patched.setattr(room_thread, "_connect", refused)
        for room in range(3):
            push.send_multipart(decode_frames.abort(room))
        wait_until(lambda: len(tries) == 3)
    wait_until(taken(thread, push, 7))
    assert thread.is_alive()
    assert len(tries) == 3, "they are connected to again"


def test_what_is_no_message_ends_nothing(
    thread: RoomThread, push: Any, ended: dict[str, ErrorInfo | None], caplog: pytest.LogCaptureFixture
) -> None:
    for frames in ([b""], [b"ABORT"], [b"ABORT", b"x"], [b"\x1b]0;title\x07"], [decode_frames.GUARD, b"None"]):
        push.send_multipart(frames)
    wait_until(taken(thread, push, 7))
    assert ended == {}
    assert len(caplog.records) == 1, "one line a minute"
    assert "\x1b" not in caplog.text


def test_an_engine_that_has_not_registered_is_known_by_where_its_messages_come_from(
    thread: RoomThread, push: Any, stale: list[str]
) -> None:
    """It asks /health from there, whatever address it names."""
    push.send_multipart(decode_frames.room(7, [], agent="nobody", host=ELSEWHERE))
    wait_until(lambda: bool(stale))
    assert stale == [HERE]


def test_a_room_waits_until_its_engine_has_said_how_it_is_set_up(
    thread: RoomThread, push: Any, ended: dict[str, ErrorInfo | None], registered: list[tuple[str, str]]
) -> None:
    thread.expect("r", 7)
    for _ in range(2):
        push.send_multipart(decode_frames.registration(host=ELSEWHERE))
    push.send_multipart(decode_frames.room(7, [1, 2, 3], host=ELSEWHERE))
    wait_until(taken(thread, push, 8))
    assert registered == [("agent-1", ELSEWHERE)], "it is asked once"
    assert ended == {}
    thread.verified("agent-1", "--page-size is 1")
    wait_until(lambda: "r" in ended)
    error = ended["r"]
    assert error is not None
    assert (error.code, error.status) == ("unfit", 502)
    assert "--page-size is 1" in error.message
