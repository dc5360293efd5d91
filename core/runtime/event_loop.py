"""The waiting part of an event loop over EventSources, which own sockets and connect it to other processes.

         ┌───────────── one turn ─────────────┐
sockets ─┤ wait() ──► events(): receive, tick ├─► the owner handles events, and applies commands
         └────────────────────────────────────┘

Poll waits for sockets to become readable, with a timeout in seconds. A Wakeup ends such a wait from another thread.
"""

import contextlib
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from select import POLLIN
from typing import Any, Protocol, TypeVar

from headrace.core.runtime.clock import Clock

Event = TypeVar("Event", covariant=True)
Command = TypeVar("Command", contravariant=True)
MAX_WAIT_S = 1.0


class Poller(Protocol):
    """select.poll, or zmq.Poller."""

    def register(self, socket: Any, flags: int) -> None:
        """Add a socket to those that are polled."""
        ...

    def poll(self, timeout: int) -> Iterable[tuple[Any, int]]:
        """Wait for a socket. timeout: in milliseconds."""
        ...


class Poll:
    """Polls for reading. Makes a new poller only when the sockets differ from those of the previous call."""

    def __init__(self, make: Callable[[], Poller]) -> None:
        self._make = make
        self._poller = make()
        self._sockets: tuple[Any, ...] = ()

    def readable(self, sockets: Iterable[Any], timeout_s: float) -> set[Any]:
        """Returns those of the ZMQ sockets and file descriptors that are readable, after timeout_s at the latest."""
        wanted = tuple(sockets)
        if wanted != self._sockets:
            self._sockets, self._poller = wanted, self._make()
            for socket in wanted:
                self._poller.register(socket, POLLIN)
        # Rounded up: a wait that ended before its deadline would be repeated, with nothing to do.
        timeout_ms = max(0, math.ceil(1000 * timeout_s))
        return {socket for socket, _ in self._poller.poll(timeout_ms)}


class EventSource(Protocol[Event, Command]):
    """Owns sockets on behalf of one EventLoop, in that loop's thread. No call blocks.

    The loop polls sockets() for reading, calls receive() when one is readable, apply() for each command, and
    tick() when next_deadline() has passed. Each returns the resulting events, in order.
    """

    def sockets(self) -> Sequence[Any]:
        """ZMQ sockets and file descriptors to poll for reading; may change from call to call."""
        ...

    def receive(self, now: float) -> Sequence[Event]:
        """Read what has arrived, a bounded amount per call."""
        ...

    def apply(self, command: Command, now: float) -> Sequence[Event]:
        """Carry out a command."""
        ...

    def tick(self, now: float) -> Sequence[Event]:
        """Do what is due: heartbeats, retries, timeouts."""
        ...

    def next_deadline(self) -> float | None:
        """When tick() is to be called, in the clock's seconds; None when nothing is timed."""
        ...

    def close(self) -> None:
        """Close the sockets."""
        ...


AnySource = EventSource[Any, Any]


class EventLoop:
    """Waits for event sources and for further sockets and deadlines of its owner, and collects the sources' events."""

    def __init__(
        self,
        sources: Iterable[AnySource],
        make_poller: Callable[[], Poller],
        clock: Clock,
        on_wait: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """on_wait: called with the longest time of each wait, in seconds; LoopClock.wait, for one."""
        self._sources = tuple(sources)
        self._poll = Poll(make_poller)
        self._clock = clock
        self._on_wait = on_wait
        self._readable: set[Any] = set()

    def wait(
        self, sockets: Iterable[Any] = (), deadlines: Iterable[float | None] = (), longest_s: float = MAX_WAIT_S
    ) -> set[Any]:
        """Wait until a socket is readable or a deadline has passed, longest_s at most.

        sockets, deadlines: the owner's, besides those of the sources. Returns the readable sockets.
        """
        own = [socket for source in self._sources for socket in source.sockets()]
        due = [*deadlines, *(source.next_deadline() for source in self._sources)]
        now = self._clock.now()
        timeout_s = min([longest_s, *(deadline - now for deadline in due if deadline is not None)])
        self._on_wait(timeout_s)
        self._readable = self._poll.readable([*sockets, *own], timeout_s)
        return self._readable

    def events(self) -> Iterator[tuple[AnySource, Sequence[Any]]]:
        """Receive from the sources that are readable since wait(), then tick those whose deadline has passed.

        Yields each source with its events. The next source is asked when the events of the one before were handled.
        """
        ready = [source for source in self._sources if not self._readable.isdisjoint(source.sockets())]
        for source in ready:
            yield source, source.receive(self._clock.now())
        for source in self._sources:
            now = self._clock.now()
            if is_due(source.next_deadline(), now):
                yield source, source.tick(now)


def is_due(deadline: float | None, now: float) -> bool:
    """Whether a deadline has passed; None never does."""
    return deadline is not None and deadline <= now


class Wakeup:
    """A descriptor that is readable once it was set. The waiting thread polls fileno(), clears it, and closes it."""

    def __init__(self) -> None:
        self._send, self._receive = socket.socketpair()
        for end in (self._send, self._receive):
            end.setblocking(False)

    def fileno(self) -> int:
        """To be polled for reading."""
        return self._receive.fileno()

    def set(self) -> None:
        """Wake the thread. Called by any thread, also after close()."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: the thread is awake; closed: it has ended
            self._send.send(b"\0")

    def clear(self) -> None:
        """Wait for the next set(). Before the thread looks at what it was woken for."""
        with contextlib.suppress(BlockingIOError):
            self._receive.recv(4096)

    def close(self) -> None:
        """Close the descriptor."""
        self._send.close()
        self._receive.close()
