"""What the control endpoint (prefill side) and the control client (decode side) tell the scheduler, and what it has
them say.

These pass inside one process, as values. The wire messages behind them are in transfer/protocol/messages.py; whatever
gets this far has been checked against what the peer said in its hello.
"""

import msgspec

from headrace.core.types.backends import ZMQ, PoolMemory
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.geometry import Geometry
from headrace.core.types.request import FirstToken


class PeerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of events from the control endpoint and the control client."""


class PeerJoined(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: a decode peer was welcomed. name is what it calls itself, for logs. geometry: of its first
    stage; geometries: of all of them (empty: it has but one). backend: how bytes go there, and why that one; memory:
    its stages' pools, where it writes into them."""

    session: str
    name: str
    geometry: Geometry
    window_bytes: int
    geometries: tuple[Geometry, ...] = ()
    backend: str = ZMQ
    backend_reason: str = ""
    memory: tuple[PoolMemory, ...] = ()


class PeerGone(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: the peer said goodbye, restarted, or was silent for peer_timeout_s."""

    session: str
    reason: str


class PeerReserved(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: the peer has pages for a ticket. pages: packed ids in its pool; the first holds position
    cached_tokens, and they cover the rest of prompt_tokens. row: its metadata row. wait: for a prompt that has not
    come yet; otherwise that is a failure. prompt_hash: of the prompt that the peer has (see
    headrace.core.types.packed); "" if it does not say."""

    session: str
    ticket: str
    generation: int
    prompt_tokens: int
    cached_tokens: int
    pages: bytes
    row: int
    wait: bool = True
    prompt_hash: str = ""


class PeerRenewed(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: the peer will come for these tickets; their leases begin anew."""

    session: str
    tickets: tuple[str, ...]


class PeerCancelled(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: the peer takes a ticket back; to be answered by TellCancelled."""

    session: str
    ticket: str
    generation: int
    reason: str


class PeerReleased(PeerEvent, frozen=True, kw_only=True):
    """Control endpoint: the peer cancels a ticket that it has not reserved: nobody will come for it."""

    session: str
    ticket: str
    reason: str


class PrefillUp(PeerEvent, frozen=True, kw_only=True):
    """Control client: a prefill server welcomed us. backend: how bytes will come. server_key: its CURVE public key, ""
    where connections are in the clear."""

    name: str
    session: str
    endpoints: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    window_bytes: int
    backend: str = ZMQ
    server_key: str = ""


class PrefillDown(PeerEvent, frozen=True, kw_only=True):
    """Control client: a prefill server refused us or fell silent. session is None if it never welcomed us. unfit: the
    two do not fit each other, so that trying again does not help."""

    name: str
    session: str | None
    reason: str
    unfit: bool = False


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
    """Control client: answer to AskCancel; no byte is written for it any more. None comes when the session ends
    before."""

    session: str
    ticket: str
    generation: int


class PeerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of effects for the control endpoint and the control client."""


class TellFailed(PeerEffect, frozen=True, kw_only=True):
    """Control endpoint: the ticket has failed."""

    session: str
    ticket: str
    generation: int
    error: ErrorInfo


class TellFinished(PeerEffect, frozen=True, kw_only=True):
    """Control endpoint: the ticket is finished. first is set when the request ended with its first token and no KV
    moved; None when every chunk was acknowledged (the end of the ticket at both sides)."""

    session: str
    ticket: str
    generation: int
    first: FirstToken | None = None


class TellCancelled(PeerEffect, frozen=True, kw_only=True):
    """Control endpoint: no byte follows for this generation."""

    session: str
    ticket: str
    generation: int


class EndPeer(PeerEffect, frozen=True, kw_only=True):
    """Control endpoint: end the session, since nobody can vouch any more that its pages are not written."""

    session: str
    reason: str


class ConnectPrefill(PeerEffect, frozen=True, kw_only=True):
    """Control client: keep a connection to this control endpoint (server_key as in PrefillUp)."""

    name: str
    endpoint: str
    server_key: str = ""


class DisconnectPrefill(PeerEffect, frozen=True, kw_only=True):
    """Control client: close the connection."""

    name: str


class AskReserve(PeerEffect, frozen=True, kw_only=True):
    """Control client: announce pages for a ticket (fields as in PeerReserved)."""

    session: str
    ticket: str
    generation: int
    prompt_tokens: int
    cached_tokens: int
    pages: bytes
    row: int
    wait: bool = True
    prompt_hash: str = ""


class AskRenew(PeerEffect, frozen=True, kw_only=True):
    """Control client: renew a held ticket with every heartbeat, until it is reserved or cancelled."""

    session: str
    ticket: str


class AskCancel(PeerEffect, frozen=True, kw_only=True):
    """Control client: take a ticket back; answered by TicketCancelled or PrefillDown."""

    session: str
    ticket: str
    generation: int
    reason: str


ControlServerEffect = TellFailed | TellFinished | TellCancelled | EndPeer
ControlClientEffect = ConnectPrefill | DisconnectPrefill | AskReserve | AskRenew | AskCancel
