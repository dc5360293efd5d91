"""Records of the peer library: open uses of tickets, their prefill servers, and the limits of both."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from headrace.core.incoming import IncomingTransfer
from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import ConnectPrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.packed import pack
from headrace.core.types.peers.addresses import url
from headrace.core.types.peers.allow_list import Rules, canonical, is_allowed
from headrace.core.types.requests.request import FirstToken
from headrace.core.types.requests.reservation import Reservation
from headrace.peer.commands import (
    Loaded,
    LoadKv,
    LookUpControlPort,
    ServerAddress,
    TicketRef,
)
from headrace.peer.staging import PAGE_TOKENS
from headrace.transfer.sockets.curve_keys import ServerKeys


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer may connect to, and its timeouts."""

    fingerprint: str
    """Fingerprint of the peer's own model."""
    model: str = ""
    """Its name, for texts of refusals."""
    rules: Rules
    """Prefill servers that may be connected to."""
    pages: int
    """Pages of the staging area."""
    page_tokens: int = PAGE_TOKENS
    """Tokens of each."""
    connect_timeout_s: float = 10.0
    """A queued load fails after this long without a session with its prefill server."""
    load_timeout_s: float = 120.0
    """A load fails after this long without a chunk."""
    server_keys: ServerKeys | None = None
    """CURVE public keys of prefill servers, by the host and port that tickets name; None connects in the clear."""

    def key_of(self, address: ServerAddress) -> str:
        """CURVE public key of a server that tickets name; "" for a connection in the clear, or an unknown server."""
        return "" if self.server_keys is None else self.server_keys.of(server_name(address))

    def why_denied(self, address: ServerAddress) -> str:
        """Reason why a server that tickets name may not be connected to; "" if it may."""
        name = server_name(address)
        if not is_allowed(self.rules, address.host, address.port):
            return f"{name} is not among the allowed prefill servers (allow_prefill)"
        if self.server_keys is not None and not self.key_of(address):
            return f"no public key of {name} is configured (curve_server_keys), so it cannot be encrypted"
        return ""


RECEIVER = 0  # the one stage of a peer
NO_ANSWER_YET = "it has not answered yet"


class LoadPhase(Enum):
    """Phases of a TicketRecord; the transitions are drawn in loader.py."""

    LEASED = auto()  # no load asked for; the lease is renewed
    QUEUED = auto()  # waiting for a session, staging pages or a metadata row
    RESERVED = auto()  # the prefill server may send
    LOADED = auto()  # answered; the owner has not released it yet
    STOPPING = auto()  # answered; the prefill server may still write into its pages
    RELEASING = auto()  # waiting for a session, to release the ticket


@dataclass(slots=True)
class TicketRecord:
    """One use of a ticket. Times are seconds of the monotonic clock."""

    id: str  # of the command
    ticket: TicketRef
    serial: int  # names the load towards the receiver
    phase: LoadPhase
    deadline: float = math.inf
    started: float = 0.0  # when the load was asked for
    load: LoadKv | None = None  # None while only the lease is renewed
    row: int = 0  # metadata row of the reservation
    page: int = 0  # first page in the staging area
    pages: int = 0  # pages in the staging area
    incoming: IncomingTransfer | None = None  # set with the reservation

    def begin(self, session: str, backend: str, generation: int) -> PrepareReceive:
        """Fetch through this session into the page and row that it has. Returns the order for the receiver."""
        assert self.load is not None, "only loads have pages"
        reservation = Reservation(
            ticket=self.ticket.name,
            generation=generation,
            prompt_tokens=self.load.tokens,
            cached_tokens=self.load.start,
            pages=pack(range(self.page, self.page + self.pages)),
            row=self.row,
            wait=self.ticket.wait,
            prompt_hash=self.load.prompt_hash,
            draft=self.load.draft,
        )
        self.incoming = IncomingTransfer.begin(session, backend, reservation, (RECEIVER,))
        return self.incoming.prepare(0, self.serial)

    def loaded(self, first: FirstToken, page_tokens: int, now: float) -> Loaded:
        """The result, once all KV is in the staging area."""
        assert self.load is not None, "only loads have pages"
        return Loaded(
            id=self.id,
            at=self.page * page_tokens + self.load.start % page_tokens,
            start=self.load.start,
            count=self.load.count,
            first=first,
            seconds=now - self.started,
        )


@dataclass(slots=True)
class PrefillRecord:
    """A prefill server that tickets or the owner name. Times are seconds of the monotonic clock."""

    name: str  # see server_name()
    address: ServerAddress
    key: str  # CURVE public key; "" for connections in the clear
    idle_since: float  # when its last record was closed
    session: str | None = None
    backend: str = ZMQ  # of the session
    reason: str = NO_ANSWER_YET  # why there is no session
    unfit: bool = False  # model, dtype or version do not match: trying again does not help
    next_lookup: float = math.inf  # when to ask its HTTP port again; infinite while nothing is to be asked
    records: dict[str, TicketRecord] = field(default_factory=dict)
    told: dict[str, PrefillState] = field(default_factory=dict)  # by AddPrefill's name, what the owner knows

    @property
    def wanted(self) -> bool:
        """Whether it is to stay connected, or to be looked for."""
        return bool(self.records or self.told)

    def state(self, name: str) -> PrefillState:
        """What the owner that calls it by this name is to know."""
        up = self.session is not None
        return PrefillState(name=name, up=up, reason="" if up else self.reason, unfit=self.unfit)

    def first_step(self) -> LookUpControlPort | ConnectPrefill:
        """The effect that begins to open a session."""
        if self.address.http:
            return LookUpControlPort(name=self.name, host=self.address.host, port=self.address.port)
        return self.connect(self.address.port)

    def connect(self, control_port: int) -> ConnectPrefill:
        """Connect to the control endpoint at this port."""
        return ConnectPrefill(name=self.name, endpoint=url("tcp", self.address.host, control_port), server_key=self.key)


def server_name(address: ServerAddress) -> str:
    """Name of the prefill server at an address, however that is spelled: tcp://HOST:PORT of its control endpoint, or
    its HTTP URL."""
    return url("http" if address.http else "tcp", canonical(address.host), address.port)
