"""The open HTTP connections of a process, bounded, and the tasks that answer on them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Sample

log = logging.getLogger(__name__)


class Connection(Protocol):
    """What is done with a connection from here."""

    transport: asyncio.Transport

    def refuse(self) -> None:
        """Close a new connection, saying why."""

    def close_when_answered(self) -> None:
        """Make the last request that has come the last one of the connection."""

    def cut(self) -> None:
        """Close the connection though its request is not answered."""


class HttpConnections:
    """For a new connection above the limit, the longest idle one is closed; if none is idle, the new one is refused.
    Idle: no request on it whose head has come and which is not answered."""

    def __init__(self, limit: int) -> None:
        self.leaving = False
        """Every connection is closed when its request is answered: the client's next one goes to another server."""
        self._limit = limit
        self._idle: dict[Connection, None] = {}  # longest idle first
        self._busy: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_closed = asyncio.Event()
        self._quiet = LogThrottle()
        self._counters = Counters()
        for reason in ("shed", "refused", "unread", "slow"):
            self._counters.add("connections_closed_total", 0, ("http", reason))

    def add(self, connection: Connection, now: float) -> None:
        """A connection was accepted."""
        if len(self._idle) + len(self._busy) >= self._limit:
            self._counters.add("connections_closed_total", labels=("http", "shed" if self._idle else "refused"))
            self.warn(f"{self._limit} HTTP connections are open, which is the limit: closing the longest idle one", now)
            if not self._idle:
                connection.refuse()
                return
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.transport.abort()
        self._idle[connection] = None
        self._all_closed.clear()

    def busy(self, connection: Connection) -> None:
        """The connection has an open request."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def idle(self, connection: Connection) -> None:
        """All requests of the connection are answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def count(self, reason: str) -> None:
        """A connection is closed: "refused", "unread" or "slow"."""
        self._counters.add("connections_closed_total", labels=("http", reason))

    def abort(self, connection: Connection, reason: str) -> None:
        """Close a connection at once, with what is queued for it."""
        self.count(reason)
        self.remove(connection)
        connection.transport.abort()

    def remove(self, connection: Connection) -> None:
        """The connection is closed. Does nothing if it was removed before."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        if not self._idle and not self._busy:
            self._all_closed.set()

    def warn(self, text: str, now: float) -> None:
        """Log what a client has caused, each text once within a while."""
        if self._quiet.due(text, now):
            log.warning("%s", text)

    def run(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer a request."""
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """Close each connection with its next answer, and say so there."""
        self.leaving = True
        for connection in self._busy:
            connection.close_when_answered()

    def close_idle(self) -> None:
        """Close the idle connections: whatever would come on them is refused."""
        for connection in list(self._idle):
            connection.transport.close()

    def cut(self) -> None:
        """End all requests that are open."""
        for connection in list(self._busy):
            connection.cut()

    async def end(self, timeout_s: float) -> None:
        """Close the idle connections at once, the others with their answer; cancel what is open after the time."""
        self.leave()
        self.close_idle()
        try:
            async with asyncio.timeout(timeout_s):
                if self._idle or self._busy:
                    await self._all_closed.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            for task in self._tasks:
                task.cancel()
            for connection in [*self._busy, *self._idle]:
                connection.transport.abort()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def statistics(self) -> tuple[Sample, ...]:
        """Open connections, and those that were closed."""
        count = len(self._idle) + len(self._busy)
        return (Sample("connections", count, ("http",)), *self._counters.snapshot())
