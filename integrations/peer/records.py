"""The uses of tickets that are open, and the prefill servers that they belong to."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import AskReserve, ConnectPrefill
from headrace.core.types.addresses import url
from headrace.core.types.allow_list import Rules, is_allowed
from headrace.core.types.packed import pack
from headrace.integrations.peer.commands import Discover, LoadKv, TicketRef
from headrace.transfer.sockets.curve_keys import ServerKeys


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """fingerprint: of the model here. rules: prefill servers that may be dialled. pages: of the staging area.
    connect_timeout_s: without a session; load_timeout_s: without a chunk. server_keys: CURVE keys of prefill servers,
    by the host and port that tickets name; None dials in the clear."""

    fingerprint: str
    rules: Rules
    pages: int
    connect_timeout_s: float = 10.0
    load_timeout_s: float = 120.0
    server_keys: ServerKeys | None = None

    def key_of(self, ticket: TicketRef) -> str:
        """The public key of the ticket's server; "" where there is none."""
        return "" if self.server_keys is None else self.server_keys.of(name_of(ticket))

    def barred(self, ticket: TicketRef) -> str:
        """Why the ticket's server may not be dialled; "" if it may."""
        if not is_allowed(self.rules, ticket.host, ticket.port):
            return f"{name_of(ticket)} is not among the prefill servers that may be dialled (allow_prefill)"
        if self.server_keys is not None and not self.key_of(ticket):
            return f"no public key is known of {name_of(ticket)} (curve_server_keys), and nothing goes in the clear"
        return ""


class LoadPhase(Enum):
    KEPT = auto()
    QUEUED = auto()
    RESERVED = auto()
    ARRIVED = auto()
    LEAVING = auto()


@dataclass(slots=True)
class TicketRecord:
    """One use of a ticket. load: None while it is only kept. begun: when the load was asked for. session, generation,
    row, page: of its reservation; pages: of the staging area, from page on."""

    id: str
    ticket: TicketRef
    serial: int
    phase: LoadPhase
    deadline: float = math.inf
    begun: float = 0.0
    load: LoadKv | None = None
    session: str = ""
    generation: int = 0
    row: int = 0
    page: int = 0
    pages: int = 0

    @property
    def page_list(self) -> bytes:
        return pack(range(self.page, self.page + self.pages))

    def expect(self) -> PrepareReceive:
        """The order for the receiver, once there is a place."""
        assert self.load is not None, "only loads have a place"
        return PrepareReceive(
            seq=0,
            request=self.serial,
            session=self.session,
            ticket=self.ticket.name,
            generation=self.generation,
            start=self.load.start,
            count=self.load.count,
            pages=self.page_list,
            row=self.row,
        )

    def reserve(self) -> AskReserve:
        """The message to the control endpoint, once the receiver is ready."""
        assert self.load is not None, "only loads have a place"
        return AskReserve(
            session=self.session,
            ticket=self.ticket.name,
            generation=self.generation,
            prompt_tokens=self.load.tokens,
            cached_tokens=self.load.start,
            pages=self.page_list,
            row=self.row,
            wait=self.ticket.wait,
            prompt_hash=self.load.prompt_hash,
        )


@dataclass(slots=True)
class PrefillRecord:
    """A prefill server. ticket: one that names it. key: its CURVE key, "" for connections in the clear. session: None
    while there is none; reason: why, for messages; unfit: trying again does not help. next_lookup: when its HTTP port
    is to be asked again; infinite while nothing is to be asked."""

    name: str
    ticket: TicketRef
    key: str
    idle_since: float
    session: str | None = None
    reason: str = "it has not answered yet"
    unfit: bool = False
    next_lookup: float = math.inf
    records: dict[str, TicketRecord] = field(default_factory=dict)

    def approach(self) -> Discover | ConnectPrefill:
        """The first step towards a session."""
        if self.ticket.http:
            return Discover(name=self.name, host=self.ticket.host, port=self.ticket.port)
        return self.dial(self.ticket.port)

    def dial(self, control_port: int) -> ConnectPrefill:
        """To the control endpoint, once its port is known."""
        return ConnectPrefill(name=self.name, endpoint=url("tcp", self.ticket.host, control_port), server_key=self.key)


def name_of(ticket: TicketRef) -> str:
    """Of the server that has the ticket: the endpoint of its control endpoint, or its URL."""
    return url("http" if ticket.http else "tcp", ticket.host, ticket.port)
