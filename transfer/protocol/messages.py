"""Messages of protocol version 1, as docs/protocol.md specifies them. Each is one msgpack map with a "type" key.

Control connection: peer (DEALER) to control endpoint (ROUTER). Data connection: peer (DEALER) to one stage (ROUTER).
The peer opens both. Every string, list and number that comes from outside is bounded here or in
transfer/protocol/matching.py.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.core.types.kv.backends import NixlAccess, PoolMemory
from headrace.core.types.kv.geometry import MAX_COMPONENTS, Geometry
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.draft import MAX_DRAFT_TOKENS, DraftTerms
from headrace.core.types.requests.reservation import Reservation

VERSION = 1

MAX_TICKET_CHARS = 256
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1024
MAX_STAGES = 64
MAX_RETRY_S = 86400.0  # longest retry_after_s
MAX_RENEWALS = 1024  # tickets in one ping
MAX_PAGES = 1 << 20  # in one page list
CONTROL_FRAME_BYTES = 5 << 20  # one control message, or the header of a chunk: a full page list and some room
ANSWER_FRAME_BYTES = 16 << 10  # what a peer sends to a stage: Attach, Ack, Nack, Ping

# Codes of Refuse and Nack beside those in headrace.core.types.errors.
NO_SESSION = "no_session"
BAD_MESSAGE = "bad_message"
WRONG_STAGE = "wrong_stage"
TOO_MANY_PEERS = "too_many_peers"
BAD_RESERVATION = "bad_reservation"
UNKNOWN_TICKET = "unknown_ticket"
BAD_CHUNK = "bad_chunk"
BAD_METADATA = "bad_metadata"
RESTARTED = "restarted"

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
PortNumber = Annotated[int, Meta(ge=1, le=65535)]
Slot = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]  # of a request's states in a pool; -1: it has none
Host = Annotated[str, Meta(max_length=253, pattern=r"^([0-9A-Za-z:][0-9A-Za-z.:_-]*)?\Z")]  # a name or an address
Code = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Id = Annotated[str, Meta(min_length=16, max_length=64)]
Ticket = Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_CHARS)]
PageList = Annotated[bytes, Meta(max_length=MAX_PAGES * ITEM_BYTES)]
RowBytes = Annotated[bytes, Meta(max_length=4096)]
Shape = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=8)]
Kinds = Annotated[tuple[Code, ...], Meta(max_length=16)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages. Fields added later carry defaults; a reader skips keys that it does not know."""


class ComponentShape(msgspec.Struct, frozen=True, order=True):
    """Shape of KV beside keys and values (draft model KV, MLA latent), over all stages of a side."""

    name: Code
    dtype: Code
    shape: Shape
    """Per token [layers, planes, kv_heads, head_dim]; the stages' geometries say which stage has which part."""
    per_request: bool = False
    """It is a state of a request: shape is that of one state."""
    window: int = 0
    """Of a state that is a ring of a request's last positions: how many; shape is that of one position."""


Components = Annotated[tuple[ComponentShape, ...], Meta(max_length=MAX_COMPONENTS)]


class Hello(Message, frozen=True, kw_only=True):
    """Peer to control endpoint, first on the connection: what the peer is and what it supports."""

    protocols: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=16)]
    """Protocol versions it speaks."""
    instance: Id
    """Random id of the peer's process, 128 bits or more."""
    name: Name
    role: Code
    fingerprint: Name
    """Names the model; equal for every dtype, stage and file format of the same weights."""
    geometries: Annotated[tuple[Geometry, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    """Pool shapes, one per stage of the peer."""
    kv_pages: Positive
    """Bound of the page ids in its reservations."""
    max_model_len: Positive
    metadata_version: Natural
    metadata_bytes: Size
    metadata_rows: Positive
    """Bound of the row numbers in its reservations."""
    window_bytes: Positive
    """Payload it accepts unacknowledged on each data connection."""
    checksums: Kinds
    backends: Kinds
    components: Components = ()
    """What its pools hold beside keys and values."""
    memory: Annotated[tuple[PoolMemory, ...], Meta(max_length=MAX_STAGES)] = ()
    """How each stage's pool may be written by the sender; empty: only the peer writes into its pools."""
    model: Name = ""
    """What people call its model: for texts of refusals. "" where it does not say."""


class StageInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stage of the prefill server, as Welcome describes it."""

    rank: Size
    data_port: PortNumber
    geometry: Geometry
    data_host: Host = ""
    """Host of its data socket; "" is the host at which the peer connected to the control endpoint."""
    replica: Size = 0
    """Data-parallel replica: the stages of each have every head of every layer once, and a ticket comes from one."""


class Welcome(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the session is open, on these terms."""

    protocol: Natural
    session: Id
    """128-bit secret that opens the data connections."""
    instance: Id
    """Random id of the prefill server's process."""
    fingerprint: Name
    stages: Annotated[tuple[StageInfo, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    max_model_len: Positive
    max_tickets: Positive
    window_bytes: Positive
    """Payload in flight on each data connection at most: the smaller of both sides' windows."""
    checksum: Code
    backend: Code
    heartbeat_s: Seconds
    """The peer pings this often."""
    timeout_s: Seconds
    """Silence after which either side considers the other gone."""
    components: Components = ()
    """Those of the prefill server, equal to the peer's."""
    model: Name = ""
    """What people call its model: for texts of refusals. "" where it does not say."""


class Refuse(Message, frozen=True, kw_only=True):
    """Control endpoint or stage to peer: a hello, an attach or a frame is not accepted."""

    code: Code
    message: Text
    """Names both values and who has which."""


class Reserve(Message, frozen=True, kw_only=True):
    """Peer to control endpoint: destination pages are ready for a ticket."""

    ticket: Ticket
    generation: Natural
    prompt_tokens: Positive
    cached_tokens: Size
    """Leading tokens of the prompt that the peer has already."""
    pages: PageList
    """Packed ids in the peer's pool for positions [cached_tokens, prompt_tokens); the first holds cached_tokens."""
    row: Size
    """Its metadata row."""
    slot: Slot = -1
    """Where the request's states go in its pools, if the components name any."""
    wait: bool = True
    """Wait for a prompt that has not come yet; False has an unknown ticket answered by Failed at once."""
    prompt_hash: Annotated[str, Meta(max_length=64)] = ""
    """SHA-256 of the prompt's token ids as packed int32, in hexadecimal; "" skips the comparison."""
    adapter: Annotated[str, Meta(max_length=64)] = ""
    """Fingerprint of the LoRA adapter that the prompt goes through; "" for none."""
    hidden: bool = False
    """Send the hidden state of the last prompt token, in a draft frame."""
    draft_top_k: Size = 0
    """Send so many of the most likely first tokens, in a draft frame."""

    @classmethod
    def of(cls, reservation: Reservation) -> "Reserve":
        """The message that asks for a reservation."""
        return cls(
            ticket=reservation.ticket,
            generation=reservation.generation,
            prompt_tokens=reservation.prompt_tokens,
            cached_tokens=reservation.cached_tokens,
            pages=reservation.pages,
            row=reservation.row,
            slot=reservation.slot,
            wait=reservation.wait,
            prompt_hash=reservation.prompt_hash,
            adapter=reservation.adapter,
            hidden=reservation.draft.hidden,
            draft_top_k=reservation.draft.top_k,
        )

    @property
    def reservation(self) -> Reservation:
        """What the message asks for; more draft tokens than there can be are as many as there can be."""
        return Reservation(
            ticket=self.ticket,
            generation=self.generation,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            pages=self.pages,
            row=self.row,
            slot=self.slot,
            wait=self.wait,
            prompt_hash=self.prompt_hash,
            adapter=self.adapter,
            draft=DraftTerms(self.hidden, min(self.draft_top_k, MAX_DRAFT_TOKENS)),
        )


class Failed(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the ticket has failed; no byte follows."""

    ticket: Ticket
    generation: Natural
    code: Code
    message: Text
    status: Annotated[int, Meta(ge=100, le=599)]
    """HTTP status for the client."""
    retry_after_s: Annotated[float, Meta(ge=0, le=MAX_RETRY_S)] | None = None
    stage: Size | None = None
    """Rank of the stage that failed, if one did."""


class Finished(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the ticket has ended well."""

    ticket: Ticket
    generation: Natural
    metadata: RowBytes = b""
    """Metadata row of a request that ended with its first token, so that no KV moves; empty when chunks were sent."""


class Cancel(Message, frozen=True, kw_only=True):
    """Peer to control endpoint: cancels a ticket, reserved or not. Always answered by Cancelled."""

    ticket: Ticket
    generation: Natural
    reason: Text = ""


class Cancelled(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: no byte of this generation is queued or being written any more, and none follows."""

    ticket: Ticket
    generation: Natural


class Ping(Message, frozen=True, kw_only=True):
    """Peer to control endpoint or stage: heartbeat."""

    number: Natural
    renew: Annotated[tuple[Ticket, ...], Meta(max_length=MAX_RENEWALS)] = ()
    """To the control endpoint: held tickets whose leases start anew."""


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping, with its number."""

    number: Natural


class Goodbye(Message, frozen=True, kw_only=True):
    """Either side of the control connection: the session ends now."""

    reason: Text = ""


class Attach(Message, frozen=True, kw_only=True):
    """Peer to stage, first on a data connection."""

    session: Id
    stage: Size
    checksum: Code
    """Kind of checksum the peer insists on; "none" if it does not."""
    peer_stage: Size = 0
    """Index into the geometries of its hello: the pool that this connection is for."""
    checksum_shm: bool = False
    """Insists on checksums also where the stage writes through shared memory."""
    nixl: NixlAccess | None = None
    """How the stage can write into that pool by NIXL, in this session."""


class Attached(Message, frozen=True, kw_only=True):
    """Stage to peer: chunks may come on this connection."""

    stage: Size


class Chunk(Message, frozen=True, kw_only=True):
    """Stage to peer: header of tokens [start, start + count) of a ticket.

    The metadata row follows it if total is set, then a draft frame if draft_bytes is set, and one payload frame per
    source page unless written is set.
    """

    ticket: Ticket
    generation: Natural
    chunk: Size
    """Counts from 0."""
    start: Size
    count: Size
    pages: PageList
    """Packed destination page ids; the first one holds position start."""
    row: Size
    slot: Slot = -1
    """Where the states go that the last chunk carries."""
    payload_bytes: Natural
    checksum: int | None = None
    """Of all frames after the header; absent when none was agreed."""
    total: Size = 0
    """0 but in the last chunk, where it is chunk + 1."""
    written: bool = False
    """The payload is in the pages already (shared memory, CUDA IPC, NIXL)."""
    draft_bytes: Size = 0
    """Size of the draft frame that follows the metadata row; 0: there is none."""


class Ack(Message, frozen=True, kw_only=True):
    """Peer to stage: the chunk is written (now or before), its checksum right. Opens the window by its bytes."""

    ticket: Ticket
    generation: Natural
    chunk: Size


class Nack(Message, frozen=True, kw_only=True):
    """Peer to stage: the chunk was not written and will not be. Opens the window by its bytes."""

    ticket: Ticket
    generation: Natural
    chunk: Size
    code: Code
    message: Text


PeerMessage = Hello | Reserve | Cancel | Ping | Goodbye  # on the control connection
ControlMessage = Welcome | Refuse | Failed | Finished | Cancelled | Pong | Goodbye
AnswerMessage = Attach | Ack | Nack | Ping  # on a data connection, from the peer
StageMessage = Attached | Refuse | Chunk | Pong


def text(value: str) -> str:
    """Truncates a text to MAX_TEXT_CHARS, the length that messages allow."""
    return value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 1] + "…"
