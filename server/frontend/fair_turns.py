"""Turns at something that only a few may do at a time, such that no client keeps others from it."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.shares import Shares
from headrace.core.types import refusals


class FairTurns:
    """So many turns at a time, one of which is left for other clients. Clients that wait come in turn, each with what
    it asked for first. Used in one event loop."""

    def __init__(self, what: str, *, at_a_time: int, most_waiting: int) -> None:
        """what: for messages. most_waiting: of all clients; one with less than an equal share of them may always."""
        self._what, self._at_a_time, self._most_waiting = what, at_a_time, most_waiting
        self._running = Shares()
        self._waiting = Shares()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = (
            OrderedDict()
        )  # by client; who is next comes first

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it. Raises HeadraceError (429) if too many wait."""
        waiting = self._waiting
        if not waiting.admits(client, 1, self._most_waiting):
            raise refusals.CLIENT_WAITS.raised(own=waiting.used(client), what=self._what, total=waiting.total)
        begun = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(begun)
        waiting.add(client, 1)
        self._begin()
        try:
            await begun
        except asyncio.CancelledError:
            if begun.cancelled() or not begun.done():
                self._leave(client, begun)
            else:
                self._end(client)
            raise
        try:
            yield
        finally:
            self._end(client)

    def _begin(self) -> None:
        """Give turns to those who may have one."""
        for client in list(self._queues):
            if self._running.total >= self._at_a_time:
                return
            if self._running.used(client) < max(1, self._at_a_time - 1):
                begun = self._queues[client][0]
                self._leave(client, begun)
                if client in self._queues:
                    self._queues.move_to_end(client)
                self._running.add(client, 1)
                begun.set_result(None)

    def _leave(self, client: str, begun: "asyncio.Future[None]") -> None:
        self._queues[client].remove(begun)
        self._waiting.add(client, -1)
        if not self._queues[client]:
            del self._queues[client]

    def _end(self, client: str) -> None:
        self._running.add(client, -1)
        self._begin()
