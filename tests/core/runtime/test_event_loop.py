"""The event loop: waits for sockets and deadlines, and collects events of sources."""

import select
import socket
from collections.abc import Iterator, Sequence

import pytest

from headrace.core.runtime.clock import VirtualClock
from headrace.core.runtime.event_loop import EventLoop


class Source:
    """Reads bytes from a socket pair, and ticks at a deadline."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.deadline: float | None = None
        self.end, self.other = socket.socketpair()

    def sockets(self) -> Sequence[int]:
        return (self.end.fileno(),)

    def receive(self, now: float) -> Sequence[str]:
        return [f"{self.name} received {self.end.recv(16).decode()}"]

    def apply(self, command: str, now: float) -> Sequence[str]:
        self.end.send(command.encode())
        return ()

    def tick(self, now: float) -> Sequence[str]:
        self.deadline = None
        return [f"{self.name} ticked at {now:g}"]

    def next_deadline(self) -> float | None:
        return self.deadline

    def close(self) -> None:
        self.end.close()
        self.other.close()


class RecordingPoller:
    """select.poll that remembers its last timeout and does not wait."""

    def __init__(self, timeouts: list[int]) -> None:
        self._poller = select.poll()
        self._timeouts = timeouts

    def register(self, socket: int, flags: int) -> None:
        self._poller.register(socket, flags)

    def poll(self, timeout: int) -> list[tuple[int, int]]:
        self._timeouts.append(timeout)
        return self._poller.poll(0)


class Bench:
    def __init__(self) -> None:
        self.a, self.b = Source("a"), Source("b")
        self.clock = VirtualClock(100.0)
        self.timeouts: list[int] = []
        self.loop = EventLoop((self.a, self.b), lambda: RecordingPoller(self.timeouts), self.clock)

    def events(self) -> list[str]:
        return [event for _, events in self.loop.events() for event in events]

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_receives_from_readable_sources_and_ticks_due_ones(bench: Bench) -> None:
    bench.b.other.send(b"x")
    bench.a.deadline = 100.0
    bench.b.deadline = 101.0
    bench.loop.wait()
    assert bench.events() == ["b received x", "a ticked at 100"]


def test_waits_for_the_earliest_deadline_rounded_up_to_milliseconds(bench: Bench) -> None:
    bench.a.deadline, bench.b.deadline = 100.5, 100.0011
    bench.loop.wait(deadlines=[None, 100.25])
    bench.loop.wait(deadlines=[99.0])
    bench.b.deadline = None
    bench.loop.wait(deadlines=[None, 100.25])
    bench.a.deadline = None
    bench.loop.wait(longest_s=0.002)
    bench.loop.wait()
    assert bench.timeouts == [2, 0, 250, 2, 1000]


def test_sockets_of_the_owner_wake_the_loop_and_are_left_to_it(bench: Bench) -> None:
    own, other = socket.socketpair()
    with own, other:
        other.send(b"x")
        assert bench.loop.wait([own.fileno()]) == {own.fileno()}
        assert bench.events() == []


def test_a_source_is_asked_after_the_events_before_were_handled(bench: Bench) -> None:
    bench.a.other.send(b"x")
    bench.loop.wait()
    handled: list[str] = []
    for source, events in bench.loop.events():
        handled += events
        if source is bench.a:
            bench.b.deadline = 100.0  # handling an event may make another source due
    assert handled == ["a received x", "b ticked at 100"]
