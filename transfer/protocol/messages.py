"""Messages of protocol version 1, as docs/protocol.md specifies them. Each is one msgpack map with a "type" key.

Control connection: peer (DEALER) to control endpoint (ROUTER). Data connection: peer (DEALER) to one stage (ROUTER).
The peer dials both. Every string, list and number that comes from outside is bounded here or in
transfer/protocol/matching.py.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.core.types.backends import NixlAccess, PoolMemory
from headrace.core.types.geometry import MAX_COMPONENTS, Geometry
from headrace.core.types.packed import ITEM_BYTES

VERSION = 1

MAX_TICKET_CHARS = 256
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1024
MAX_STAGES = 64
MAX_RETRY_S = 86400.0  # before which a peer is told to try again
MAX_RENEWALS = 1024  # tickets in one ping
MAX_PAGES = 1 << 20  # in one page list
CONTROL_FRAME_BYTES = 5 << 20  # one control message, or the header of a chunk: a full page list and some air
ANSWER_FRAME_BYTES = 16 << 10  # what a peer sends to a stage: Attach, Ack, Nack, Ping

# Codes of Refuse and Nack beside those in headrace.core.types.errors.
NO_SESSION = "no_session"
BAD_MESSAGE = "bad_message"
WRONG_STAGE = "wrong_stage"
TOO_MANY_PEERS = "too_many_peers"
TOO_MANY_TICKETS = "too_many_tickets"
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
    """KV beside keys and values (of a draft model, an MLA latent), over all stages of a side: for each token elements
    of dtype in the shape [layers, planes, kv_heads, head_dim]. The stages' geometries say who has what of it."""

    name: Code
    dtype: Code
    shape: Shape


Components = Annotated[tuple[ComponentShape, ...], Meta(max_length=MAX_COMPONENTS)]


class Hello(Message, frozen=True, kw_only=True):
    """Peer to control endpoint, first. instance: random id of the peer's process, 128 bits or more. geometries: one
    per stage of the peer. kv_pages and metadata_rows bound the page ids and row numbers of its reservations.
    window_bytes: what it accepts unacknowledged on each data connection. protocols, checksums, backends: what it can
    speak. components: what its pools hold beside keys and values. memory: how each stage's pool may be written; none:
    by nobody else."""

    protocols: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=16)]
    instance: Id
    name: Name
    role: Code
    fingerprint: Name
    geometries: Annotated[tuple[Geometry, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    kv_pages: Positive
    max_model_len: Positive
    metadata_version: Natural
    metadata_bytes: Size
    metadata_rows: Positive
    window_bytes: Positive
    checksums: Kinds
    backends: Kinds
    components: Components = ()
    memory: Annotated[tuple[PoolMemory, ...], Meta(max_length=MAX_STAGES)] = ()


class StageInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stage of the prefill server: its rank, the port of its data socket, the shape of its pool. data_host: of
    its data socket; "" is the host where the peer dialled the control endpoint."""

    rank: Size
    data_port: PortNumber
    geometry: Geometry
    data_host: Host = ""


class Welcome(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the session stands. session: 128-bit secret that opens the data connections. instance:
    of the prefill server's process. max_model_len, window_bytes, checksum, backend: what both sides will keep to.
    The peer pings every heartbeat_s; either side calls the other gone after timeout_s of silence. components: those of
    the prefill server, equal to the peer's."""

    protocol: Natural
    session: Id
    instance: Id
    fingerprint: Name
    stages: Annotated[tuple[StageInfo, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    max_model_len: Positive
    max_tickets: Positive
    window_bytes: Positive
    checksum: Code
    backend: Code
    heartbeat_s: Seconds
    timeout_s: Seconds
    components: Components = ()


class Refuse(Message, frozen=True, kw_only=True):
    """Control endpoint or stage to peer: a hello, an attach or a frame is not accepted. message names both values."""

    code: Code
    message: Text


class Reserve(Message, frozen=True, kw_only=True):
    """Peer to control endpoint: pages are ready for a ticket. pages: packed ids in the peer's pool covering positions
    [cached_tokens, prompt_tokens); the first one holds position cached_tokens. row: its metadata row. wait: for a
    prompt that has not come yet; False has a ticket that nobody knows answered by Failed at once. prompt_hash: SHA-256
    of the prompt's token ids as packed int32, in hexadecimal; "" leaves the comparison out."""

    ticket: Ticket
    generation: Natural
    prompt_tokens: Positive
    cached_tokens: Size
    pages: PageList
    row: Size
    wait: bool = True
    prompt_hash: Annotated[str, Meta(max_length=64)] = ""


class Failed(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the ticket has failed; no byte follows. status: an HTTP status. stage: which one
    failed."""

    ticket: Ticket
    generation: Natural
    code: Code
    message: Text
    status: Annotated[int, Meta(ge=100, le=599)]
    retry_after_s: Annotated[float, Meta(ge=0, le=MAX_RETRY_S)] | None = None
    stage: Size | None = None


class Finished(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: the ticket has ended well. metadata: the row of a request that its first token ended,
    for which no KV moves; empty when every chunk was acknowledged."""

    ticket: Ticket
    generation: Natural
    metadata: RowBytes = b""


class Cancel(Message, frozen=True, kw_only=True):
    """Peer to control endpoint: the ticket is taken back, or given up before it was reserved. Always answered by
    Cancelled."""

    ticket: Ticket
    generation: Natural
    reason: Text = ""


class Cancelled(Message, frozen=True, kw_only=True):
    """Control endpoint to peer: no byte of this generation is queued or being written any more, and none follows."""

    ticket: Ticket
    generation: Natural


class Ping(Message, frozen=True, kw_only=True):
    """Peer to control endpoint or stage: a sign of life. renew (to the control endpoint): held tickets whose leases
    are to begin anew."""

    number: Natural
    renew: Annotated[tuple[Ticket, ...], Meta(max_length=MAX_RENEWALS)] = ()


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping, with its number."""

    number: Natural


class Goodbye(Message, frozen=True, kw_only=True):
    """Either side of the control connection: the session ends now."""

    reason: Text = ""


class Attach(Message, frozen=True, kw_only=True):
    """Peer to stage, first on a data connection. checksum: the kind the peer insists on ("none" if it does not).
    checksum_shm: it insists also where the stage writes through shared memory. peer_stage: which of the geometries of
    its hello the connection is for. nixl: how the stage can write into that pool by NIXL, in this session."""

    session: Id
    stage: Size
    checksum: Code
    peer_stage: Size = 0
    checksum_shm: bool = False
    nixl: NixlAccess | None = None


class Attached(Message, frozen=True, kw_only=True):
    """Stage to peer: chunks may come on this connection."""

    stage: Size


class Chunk(Message, frozen=True, kw_only=True):
    """Stage to peer: header of tokens [start, start + count) of a ticket. After it come the metadata row, if total
    is set, and one payload frame per source page. chunk counts from 0; total is 0 but in the last chunk, where it
    is chunk + 1. pages: packed destination ids; the first one holds position start. checksum: of all frames after
    the header; absent when none was agreed. written: the payload is in the pages already, and no frame brings it."""

    ticket: Ticket
    generation: Natural
    chunk: Size
    start: Size
    count: Size
    pages: PageList
    row: Size
    payload_bytes: Natural
    checksum: int | None = None
    total: Size = 0
    written: bool = False


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
    """Cut a sentence to the length that messages allow."""
    return value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 1] + "…"
