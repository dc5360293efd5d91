"""TicketTable of this server's control endpoint: who uses which, which peers came too early, and how recent ones
ended."""

from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.messages.peers import PeerReserved
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.request import FirstToken
from headrace.scheduler.state.record import Request

Key = tuple[str, str, int]  # session, ticket, generation


@dataclass(slots=True)
class Ended:
    """How a ticket's last use ended. session is None while no peer has come for it; error None: it went well.
    first: of a held request that its first token ended; a peer may come to hear of it until that time."""

    session: str | None
    generation: int
    error: ErrorInfo | None
    first: FirstToken | None = None
    until: float = 0.0


class TicketTable:
    """One use of a ticket is a (session, generation). A use that has ended is never revived.

    early: reservations whose prompt has not come. limit bounds them, and what is remembered of ended tickets and of
    those that nobody will come for.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: dict[str, Request] = {}
        self._handoffs: dict[Key, Request] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._unwanted: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.early: dict[str, PeerReserved] = {}

    @property
    def full(self) -> bool:
        return len(self.early) >= self._limit

    def holder(self, ticket: str) -> Request | None:
        """The live request that uses the ticket."""
        return self._active.get(ticket)

    def claim(self, ticket: str, request: Request) -> None:
        """A new use begins. An end that no peer came to hear of is forgotten."""
        self._active[ticket] = request
        ended = self._ended.get(ticket)
        if ended is not None and ended.session is None:
            del self._ended[ticket]

    def match(self, key: Key, request: Request) -> None:
        """A peer has come for the request; it is found by this key until forget()."""
        self._handoffs[key] = request

    def find(self, session: str, ticket: str, generation: int) -> Request | None:
        """The request of that use, live or still holding pages."""
        return self._handoffs.get((session, ticket, generation))

    def forget(self, key: Key) -> None:
        self._handoffs.pop(key, None)

    def end(self, ticket: str, ended: Ended) -> None:
        """The use is over; the ticket may be used again."""
        self._active.pop(ticket, None)
        self._ended.pop(ticket, None)
        self._ended[ticket] = ended
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def stale(self, session: str, ticket: str, generation: int) -> bool:
        """This generation, or a later one, of the session has been seen here."""
        ended = self._ended.get(ticket)
        seen = [(ended.session, ended.generation)] if ended is not None else []
        request = self._active.get(ticket)
        if request is not None and request.outgoing is not None:
            seen.append((request.outgoing.session, request.outgoing.generation))
        early = self.early.get(ticket)
        if early is not None:
            seen.append((early.session, early.generation))
        return any(session == other and generation <= latest for other, latest in seen)

    def taken(self, ticket: str) -> bool:
        """Some peer has come for the ticket, and its use has not ended."""
        request = self._active.get(ticket)
        return ticket in self.early or (request is not None and request.outgoing is not None)

    def unheard(self, ticket: str) -> Ended | None:
        """How the ticket's request ended before any peer came for it."""
        ended = self._ended.get(ticket)
        return ended if ended is not None and ended.session is None else None

    def abandon(self, ticket: str, reason: str, until: float) -> None:
        """A peer will not come for the ticket. Remembered for a prompt that comes before that time."""
        self._unwanted.pop(ticket, None)
        self._unwanted[ticket] = (reason, until)
        while len(self._unwanted) > self._limit:
            self._unwanted.popitem(last=False)

    def pop_abandoned(self, ticket: str, now: float) -> str | None:
        """Why no peer will come for the ticket, None if one may. Asked once: it is forgotten with the answer."""
        reason, until = self._unwanted.pop(ticket, ("", now))
        return reason if now < until else None

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def handoffs(self) -> int:
        return len(self._handoffs)
