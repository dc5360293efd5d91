"""Messages between the scheduler and the control server (prefill side) or the control client (decode side).

They are passed inside one process, as values. The protocol messages behind them are in transfer/protocol/messages.py.
Events have been checked against the peer's hello.
"""

import msgspec

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.requests.request import FirstToken
from headrace.core.types.requests.reservation import Reservation


class PeerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of events from the control server and the control client."""


class PeerJoined(PeerEvent, frozen=True, kw_only=True):
    """Control server: a decode peer was welcomed."""

    name: str
    """What it calls itself, for logs."""

    key: str = ""
    """Name of the CURVE public key that it has shown; "" where connections are in the clear."""

    host: str = ""
    """Address of its connection; "" if it is not known."""

    backend_reason: str = ""
    """Why the backend of the terms was chosen."""

    terms: PeerTerms

    @property
    def session(self) -> str:
        """The session that begins."""
        return self.terms.session


class PeerGone(PeerEvent, frozen=True, kw_only=True):
    """Control server: the peer said goodbye, restarted, was silent for peer_timeout_s, or gave way to another."""

    session: str
    reason: str
    name: str = ""
    """The peer's name, as in PeerJoined."""
    displaced: bool = False
    """It gave way to a new peer, since there are as many as may be."""


class PeerReserved(PeerEvent, frozen=True, kw_only=True):
    """Control server: the peer has reserved pages for a ticket."""

    session: str
    reservation: Reservation

    @property
    def key(self) -> tuple[str, str, int]:
        """Session, ticket, generation: this use of the ticket."""
        return self.session, self.reservation.ticket, self.reservation.generation


class PeerRenewed(PeerEvent, frozen=True, kw_only=True):
    """Control server: the peer is going to reserve these tickets; the time that they wait for it begins anew."""

    session: str
    tickets: tuple[str, ...]


class PeerCancelled(PeerEvent, frozen=True, kw_only=True):
    """Control server: the peer cancels a ticket that it has reserved; to be answered by TellCancelled."""

    session: str
    ticket: str
    generation: int
    reason: str


class PeerReleased(PeerEvent, frozen=True, kw_only=True):
    """Control server: the peer cancels a ticket that it has not reserved, and that no peer will reserve."""

    session: str
    ticket: str
    reason: str


class PrefillUp(PeerEvent, frozen=True, kw_only=True):
    """Control client: a prefill server welcomed us."""

    name: str
    """The server's name, as in AddPrefill."""

    terms: PrefillTerms
    replica: int = 0
    """Data-parallel replica of ours that the session is of."""

    @property
    def session(self) -> str:
        """The session that begins."""
        return self.terms.session


class PrefillDown(PeerEvent, frozen=True, kw_only=True):
    """Control client: a prefill server refused us or fell silent."""

    name: str
    session: str | None
    """None if it never welcomed us."""

    reason: str
    unfit: bool = False
    """The two servers do not fit each other, so that trying again does not help."""

    silent: bool = False
    """Nothing was heard of it for too long; it may be there."""

    replica: int = 0
    """Data-parallel replica of ours that the connection is of."""


class TicketFailed(PeerEvent, frozen=True, kw_only=True):
    """Control client: the prefill server failed a ticket; no more bytes come for it."""

    session: str
    ticket: str
    generation: int
    error: ErrorInfo


class TicketFinished(PeerEvent, frozen=True, kw_only=True):
    """Control client: the prefill ended the request with its first token; no KV comes."""

    session: str
    ticket: str
    generation: int
    first: FirstToken


class TicketCancelled(PeerEvent, frozen=True, kw_only=True):
    """Control client: the answer to AskCancel: no byte is written for the ticket any more. There is no answer if the
    session ends first."""

    session: str
    ticket: str
    generation: int


class PeerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of effects for the control server and the control client."""


class TellFailed(PeerEffect, frozen=True, kw_only=True):
    """Control server: the ticket has failed."""

    session: str
    ticket: str
    generation: int
    error: ErrorInfo


class TellFinished(PeerEffect, frozen=True, kw_only=True):
    """Control server: the ticket is finished."""

    session: str
    ticket: str
    generation: int
    first: FirstToken | None = None
    """The first token of a request that ended with it, so that no KV is sent. None: every chunk was acknowledged, and
    the ticket has ended at both sides."""


class TellCancelled(PeerEffect, frozen=True, kw_only=True):
    """Control server: no byte follows for this generation."""

    session: str
    ticket: str
    generation: int


class EndPeer(PeerEffect, frozen=True, kw_only=True):
    """Control server: end the session, since it is not certain any more that nothing is written into its pages."""

    session: str
    reason: str
    backend_failed: bool = False
    """A write was lost on its way: the peer's next session should have another backend."""


class ConnectPrefill(PeerEffect, frozen=True, kw_only=True):
    """Control client: connect to this control endpoint, and stay connected (fields as in AddPrefill)."""

    name: str
    endpoint: str
    server_key: str = ""


class DisconnectPrefill(PeerEffect, frozen=True, kw_only=True):
    """Control client: close the connection."""

    name: str


class AskReserve(PeerEffect, frozen=True, kw_only=True):
    """Control client: reserve pages for a ticket."""

    session: str
    reservation: Reservation


class AskRenew(PeerEffect, frozen=True, kw_only=True):
    """Control client: renew the ticket of a prompt that a router has posted, or is about to, with every heartbeat until
    it is reserved or cancelled."""

    session: str
    ticket: str


class AskCancel(PeerEffect, frozen=True, kw_only=True):
    """Control client: cancel a ticket (generation 0: not reserved). Answered by TicketCancelled or PrefillDown."""

    session: str
    ticket: str
    generation: int
    reason: str


ControlServerEvent = PeerJoined | PeerGone | PeerReserved | PeerRenewed | PeerReleased | PeerCancelled
ControlClientEvent = PrefillUp | PrefillDown | TicketFailed | TicketFinished | TicketCancelled
ControlServerEffect = TellFailed | TellFinished | TellCancelled | EndPeer
ControlClientEffect = ConnectPrefill | DisconnectPrefill | AskReserve | AskRenew | AskCancel
