"""A peer's session at the control endpoint: its tickets, its limits, the check of reservations, and the final reply of
a ticket. Pure.

One peer may take so much of a server beyond the numbers of peers and tickets that are configured. These limits are far
above what an honest peer needs: they bound what a broken or hostile one costs the others.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.messages.peers import TellCancelled, TellFailed, TellFinished
from headrace.core.runtime.rate_limit import TokenBucket
from headrace.core.types import refusals
from headrace.core.types.errors import TICKET_IN_USE, ErrorInfo
from headrace.core.types.packed import packed_length, unpack
from headrace.transfer.protocol import messages, metadata
from headrace.transfer.protocol.layout import pages_for
from headrace.transfer.protocol.matching import BackendOffer
from headrace.transfer.protocol.messages import Cancelled, ControlMessage, Failed, Finished, Hello, Reserve, Welcome

MESSAGES_PER_S = 5000.0
BURST = 10_000.0
RENEWALS = 4  # pings with as many tickets as one may name, in the time between two heartbeats
RESERVED_PAGES = 1 << 22  # 16 MiB of page ids
ENDED_KEPT = 4096  # ended tickets remembered per peer, to know late duplicates of their reservations


class MessageSender(NamedTuple):
    """Who a message is from, as its connection shows it."""

    key: str = ""
    """Name of its CURVE public key; "" where connections are in the clear."""
    host: str = ""
    """Its address; "" if it is not known."""

    @property
    def owner(self) -> str:
        """Whose sessions count together."""
        return f"key {self.key}" if self.key else f"host {self.host}"


UNKNOWN = MessageSender()


@dataclass(slots=True)
class OpenTicket:
    """A reservation that has not ended."""

    generation: int
    pages: int
    """Number of pages that are reserved in the peer's pool."""
    cancelling: bool = False
    """Whether the peer has cancelled it and waits for the reply."""


@dataclass(slots=True)
class PeerSession:
    """The open session of a peer."""

    route: bytes
    """ZMQ routing id of its connection."""
    hello: Hello
    offer: BackendOffer
    """What this server offered when the session began."""
    welcome: Welcome
    sender: MessageSender
    last_heard: float
    """Time of the peer's last message, seconds."""
    last_active: float
    """Time at which it joined, or last had a ticket that began or ended, seconds."""
    rate: TokenBucket
    """Limits its messages per second."""
    renewals: TokenBucket
    """Limits the tickets that it renews per second."""
    tickets: dict[str, OpenTicket] = field(default_factory=dict)
    """Open tickets by name."""
    ended: dict[str, int] = field(default_factory=dict)
    """By ticket, the last generation that ended; the ticket that ended first comes first."""
    pages: int = 0
    """Pages of all open tickets."""

    @property
    def owner(self) -> str:
        """Whose sessions count together."""
        return self.sender.owner

    @property
    def session(self) -> str:
        """Secret of the session."""
        return self.welcome.session

    def end(self, ticket: str, generation: int) -> None:
        """Close the ticket; later messages of this generation or an earlier one are stale."""
        current = self.tickets.get(ticket)
        if current is not None and current.generation == generation:
            self.pages -= current.pages
            del self.tickets[ticket]
        self.ended[ticket] = max(generation, self.ended.pop(ticket, 0))
        while len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]


def renewal_limit(now: float, heartbeat_s: float) -> TokenBucket:
    """Limits the tickets that a peer renews: each costs the scheduler a look-up."""
    tickets = RENEWALS * messages.MAX_RENEWALS
    return TokenBucket(now, tickets / heartbeat_s, 2 * tickets)


def page_limit(hello: Hello) -> int:
    """Pages in all open tickets of a peer together. Twice its pool: it learns of a ticket's end before the control
    endpoint does, and may have given the pages to another one already."""
    return min(2 * hello.kv_pages, RESERVED_PAGES)


def reservation_refusal(peer: PeerSession, reserve: Reserve, limit: int) -> ErrorInfo | None:
    """Why a reservation is refused: by the limits of this server, or by the peer's own hello; None if it is not.
    limit: of open tickets."""
    current = peer.tickets.get(reserve.ticket)
    if current is not None:
        text = f"generation {current.generation} of this ticket has not ended; {reserve.generation} came"
        return ErrorInfo(code=TICKET_IN_USE, message=text, status=409)
    if len(peer.tickets) >= limit:
        return refusals.TICKETS_OPEN.error(open=len(peer.tickets), limit=limit)
    if peer.pages + packed_length(reserve.pages) > page_limit(peer.hello):
        return refusals.TICKET_PAGES.error(pages=peer.pages, limit=page_limit(peer.hello))
    text = _reservation_error(peer.hello, peer.welcome.max_model_len, reserve)
    return ErrorInfo(code=messages.BAD_RESERVATION, message=text, status=400) if text else None


def _reservation_error(hello: Hello, max_model_len: int, reserve: Reserve) -> str:
    """How a reservation does not fit the hello, naming both values; "" when it does.

    The scheduler relies on it: of a reservation it compares only the prompt with its own.
    """
    tokens, cached = reserve.prompt_tokens, reserve.cached_tokens
    if tokens > max_model_len:
        return f"{tokens} prompt tokens, and the limit of the two servers is {max_model_len}"
    if cached >= tokens:
        return f"{cached} cached tokens of {tokens}: at least one has to be computed"
    if reserve.row >= hello.metadata_rows:
        return f"metadata row {reserve.row}, and the hello named {hello.metadata_rows} rows"
    if (reserve.slot >= 0) is not any(geometry.state_bytes for geometry in hello.geometries):
        return (
            f"slot {reserve.slot} for states, which the hello's components {'' if reserve.slot < 0 else 'do not '}name"
        )
    page_size = hello.geometries[0].page_size
    needed = pages_for(page_size, cached, tokens - cached)
    if len(reserve.pages) != 4 * needed:
        found = packed_length(reserve.pages)
        return (
            f"{found} pages ({len(reserve.pages)} bytes); positions {cached} to {tokens} need {needed} of {page_size}"
        )
    pages = unpack(reserve.pages)
    if min(pages) < 0 or max(pages) >= hello.kv_pages:
        return f"page ids {min(pages)} to {max(pages)}, and the hello named {hello.kv_pages} pages"
    if len(set(pages)) != len(pages):
        return "a page id occurs twice"
    return ""


def failed(ticket: str, generation: int, error: ErrorInfo) -> Failed:
    """The Failed message of an error."""
    return Failed(
        ticket=ticket,
        generation=generation,
        code=error.code,
        message=messages.text(error.message),
        status=error.status,
        retry_after_s=None if error.retry_after_s is None else min(error.retry_after_s, messages.MAX_RETRY_S),
        stage=error.stage,
    )


def final_reply(effect: TellFailed | TellFinished | TellCancelled) -> ControlMessage:
    """The message that ends a ticket. A first token that no metadata row can hold ends it by Failed."""
    ticket, generation = effect.ticket, effect.generation
    match effect:
        case TellFailed():
            return failed(ticket, generation, effect.error)
        case TellCancelled():
            return Cancelled(ticket=ticket, generation=generation)
        case TellFinished():
            if effect.first is None:
                return Finished(ticket=ticket, generation=generation)
            try:
                row = metadata.encode(ticket, generation, effect.first)
            except ValueError as error:
                return failed(ticket, generation, ErrorInfo(code=messages.BAD_METADATA, message=str(error), status=500))
            return Finished(ticket=ticket, generation=generation, metadata=row)
