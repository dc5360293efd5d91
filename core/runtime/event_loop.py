"""The waiting part of an event loop over EventSources.

         ┌───────────── one turn ─────────────┐
sockets ─┤ wait() ──► events(): receive, tick ├─► the owner handles events, and applies commands
         └────────────────────────────────────┘
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headrace.core.runtime.clock import Clock
from headrace.core.runtime.event_source import EventSource
from headrace.core.runtime.polling import Poll, Poller

MAX_WAIT_S = 1.0

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
