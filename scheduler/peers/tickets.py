"""The tickets of this server's control endpoint: which requests use them, and what is remembered of ended ones."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.core.incoming import TransferKey
from headrace.core.messages.peers import PeerReserved
from headrace.core.shares import Shares
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import FirstToken, SendTo
from headrace.scheduler.requests.record import Request


@dataclass(slots=True)
class EndedTicket:
    """How the last use of a ticket ended."""

    session: str | None
    """Session of the peer that reserved it; None while no peer has, so that one that does is told."""

    generation: int
    error: ErrorInfo | None
    """Why it failed; None if it did not."""

    first: FirstToken | None = None
    """The first token of a request that ended with it before a peer had reserved."""

    until: float = 0.0
    """A peer that reserves before this time is told the first token."""


class TicketTable:
    """Uses of tickets. One use is a (session, generation); a use that has ended is never revived.

    prompt first:       claim() ─► match() ─► end() ─► forget()
    reservation first:  reserve_early() ─► pop_early() ─► claim(), match() ─► …

    limit bounds each of: reservations whose prompt has not come (shared by the owners of the peers, see Shares), ended
    tickets, abandoned tickets.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: dict[str, Request] = {}
        self._matched: dict[TransferKey, Request] = {}
        self._early: dict[str, PeerReserved] = {}
        self._owners: dict[str, str] = {}  # of early reservations, by ticket
        self._shares = Shares()  # of early reservations
        self._ended: OrderedDict[str, EndedTicket] = OrderedDict()
        self._abandoned: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def full(self, owner: str) -> bool:
        """No more reservations of this owner may wait for their prompts: there are as many as may, and it has an equal
        share of them."""
        return not self._shares.admits(owner, 1, self._limit)

    @property
    def early_reservations(self) -> list[PeerReserved]:
        """Reservations whose prompt has not come."""
        return list(self._early.values())

    def holder(self, ticket: str) -> Request | None:
        """The live request that uses the ticket."""
        return self._active.get(ticket)

    def claim(self, ticket: str, request: Request) -> None:
        """A new use begins. How the last one ended is forgotten if no peer has asked for it."""
        self._active[ticket] = request
        ended = self._ended.get(ticket)
        if ended is not None and ended.session is None:
            del self._ended[ticket]

    def reserve_early(self, event: PeerReserved, owner: str) -> None:
        """Keep a reservation whose prompt has not come. owner: of the peer."""
        ticket = event.reservation.ticket
        self._early[ticket] = event
        self._owners[ticket] = owner
        self._shares.add(owner, 1)

    def early(self, ticket: str) -> PeerReserved | None:
        """The reservation that waits for the ticket's prompt."""
        return self._early.get(ticket)

    def pop_early(self, ticket: str) -> None:
        """The reservation does not wait any more: its prompt has come, or it has failed."""
        if self._early.pop(ticket, None) is not None:
            self._shares.add(self._owners.pop(ticket), -1)

    def match(self, key: TransferKey, request: Request) -> None:
        """A peer has reserved pages for the request, which is found by this key until forget()."""
        self._matched[key] = request

    def find(self, session: str, ticket: str, generation: int) -> Request | None:
        """The request of that use, live or still holding pages."""
        return self._matched.get((session, ticket, generation))

    def forget(self, key: TransferKey) -> None:
        """The request with this key holds nothing any more."""
        self._matched.pop(key, None)

    def end(self, ticket: str, ended: EndedTicket) -> None:
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
        early = self._early.get(ticket)
        if early is not None:
            seen.append((early.session, early.reservation.generation))
        return any(session == other and generation <= latest for other, latest in seen)

    def reserved(self, ticket: str) -> bool:
        """A peer has reserved the ticket, and that use has not ended."""
        request = self._active.get(ticket)
        return ticket in self._early or (request is not None and request.outgoing is not None)

    def unreported_end(self, ticket: str) -> EndedTicket | None:
        """How the ticket's request ended, if that was before any peer reserved."""
        ended = self._ended.get(ticket)
        return ended if ended is not None and ended.session is None else None

    def first_tokens_until(self, now: float) -> float:
        """Until when peers may ask for first tokens with which requests ended before any peer had reserved; now if
        there are none."""
        known = (each for each in self._ended.values() if each.session is None and each.error is None)
        return max((each.until for each in known if each.first is not None), default=now)

    def abandon(self, ticket: str, reason: str, until: float) -> None:
        """A peer will not reserve the ticket. Remembered for a prompt that comes before that time."""
        self._abandoned.pop(ticket, None)
        self._abandoned[ticket] = (reason, until)
        while len(self._abandoned) > self._limit:
            self._abandoned.popitem(last=False)

    def pop_abandoned(self, ticket: str, now: float) -> str | None:
        """Why no peer will reserve the ticket, None if one may. The answer is forgotten once it is given."""
        reason, until = self._abandoned.pop(ticket, ("", now))
        return reason if now < until else None

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests that are not found by their ticket, and tickets of requests that are gone."""
        active: dict[str, Request] = {}
        matched: dict[TransferKey, Request] = {}
        for request in requests:
            if isinstance(request.route, SendTo) and not request.ended:
                active[request.route.ticket] = request
            if request.outgoing is not None:
                matched[request.outgoing.key] = request
        if active != self._active:
            yield f"tickets {set(self._active)} are active; requests use {set(active)}"
        if matched != self._matched:
            yield f"handoffs {set(self._matched)} are listed; there are {set(matched)}"
        if both := self._active.keys() & self._early.keys():
            yield f"reservations for {both} wait for prompts that are here"
        if not self._shares.total == len(self._early) == len(self._owners):
            yield f"{self._shares.total} early reservations counted, {len(self._owners)} with an owner"
