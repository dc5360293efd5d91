"""The uses of tickets that are open, and the prefill servers that they belong to."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from core.allowed import Rules
from core.arrays import pack
from integrations.peer.commands import Load, TicketRef


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """fingerprint: of the model here. rules: prefill servers that may be dialled. pages: of the staging area.
    connect_timeout_s: without a session; load_timeout_s: without a chunk."""

    fingerprint: str
    rules: Rules
    pages: int
    connect_timeout_s: float = 10.0
    load_timeout_s: float = 120.0


class Phase(Enum):
    KEPT = auto()
    QUEUED = auto()
    RESERVED = auto()
    ARRIVED = auto()
    LEAVING = auto()


@dataclass(slots=True)
class Record:
    """One use of a ticket. load: None while it is only kept. begun: when the load was asked for. session, generation,
    row, page: of its reservation; pages: of the staging area, from page on."""

    id: str
    ticket: TicketRef
    serial: int
    phase: Phase
    deadline: float = math.inf
    begun: float = 0.0
    load: Load | None = None
    session: str = ""
    generation: int = 0
    row: int = 0
    page: int = 0
    pages: int = 0

    @property
    def page_list(self) -> bytes:
        return pack(range(self.page, self.page + self.pages))


@dataclass(slots=True)
class Server:
    """A prefill server's desk. session: None while there is none. reason: why, for messages."""

    endpoint: str
    idle_since: float
    session: str | None = None
    reason: str = "it has not answered yet"
    records: dict[str, Record] = field(default_factory=dict)


def endpoint_of(ticket: TicketRef) -> str:
    host = ticket.host
    return f"tcp://[{host}]:{ticket.port}" if ":" in host else f"tcp://{host}:{ticket.port}"
