"""The numbered stream of orders from the scheduler to every stage, and what stages report back (ZMQ, msgpack).

Forwards are executed in stream order. A SendChunk names the Forward that computes its pages, and waits for no other;
the rest of the orders act at once. Every stage of a group gets the same stream, from BeginEpoch to ShutdownStage; each
Heartbeat says how many
orders it had so far and gives a digest of them (core/runtime/order_log.py), which the stage compares with its own.
"""

import msgspec

from headrace.core.stats import Stats
from headrace.core.types.backends import ZMQ, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.core.types.request import FirstToken, SamplingParams, TokenLogprob


class PlanRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's part of a plan: positions [start, start + count).

    request: the scheduler's serial number of the request, unique for its life.
    tokens: packed int32 ids of the positions, or b"" when count is 1 and the token is the one that this
        pipeline sampled last for the request (it may not have been reported yet).
    pages: packed int32 page ids covering [0, start + count).
    sample: set when the row's last position is to be sampled.
    feeds: a later row with tokens b"" will take the token sampled here.
    prompt_logprobs: alternatives to report for the row's own prompt tokens; next_token is the prompt token
        after the row's last position (None when the row ends the prompt).
    generated: tokens of the request sampled before this row (for SamplingParams.min_tokens).
    """

    request: int
    start: int
    count: int
    pages: bytes
    tokens: bytes = b""
    sample: SamplingParams | None = None
    feeds: bool = False
    prompt_logprobs: int | None = None
    next_token: int | None = None
    generated: int = 0


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the stream. seq rises by one from order to order."""

    seq: int


class BeginEpoch(Order, frozen=True, kw_only=True):
    """The first order to a group of stages, once all of them are ready. epoch: its start. What was ordered before this
    was meant for the group before it, and reaches nobody."""

    epoch: int


class Forward(Order, frozen=True, kw_only=True):
    """The plan: one forward pass over the rows (one microbatch)."""

    rows: tuple[PlanRow, ...]


class SendChunk(Order, frozen=True, kw_only=True):
    """Hand tokens [start, start + count) of a request to a peer's session.

    pages: packed source page ids; the first one holds position start. dst_pages: packed ids in the peer's pool,
    in the peer's page size; the first one holds position start. row: metadata row here, dst_row: at the peer.
    chunk counts from 0; the last one carries the metadata. count may be 0 for a last chunk (all was sent before).
    after: seq of the Forward that computes the last of these tokens.
    """

    request: int
    after: int
    session: str
    ticket: str
    generation: int
    chunk: int
    start: int
    count: int
    pages: bytes
    dst_pages: bytes
    row: int
    dst_row: int
    last: FirstToken | None = None


class CancelSend(Order, frozen=True, kw_only=True):
    """SendChunk nothing more for a request. Answered by SendCancelled once no byte of it is queued anywhere."""

    request: int


class ReleaseRequest(Order, frozen=True, kw_only=True):
    """CancelReceive a request; its pages may belong to another one from the next order on."""

    request: int


class AdmitPeer(Order, frozen=True, kw_only=True):
    """A peer with this session may attach to the data socket. window_bytes: what it lets us have unacknowledged on
    each data connection. geometry: of its first stage; geometries: of all of them (empty: it has but one). backend: how
    bytes go there; memory: its stages' pools, where that writes into them."""

    session: str
    geometry: Geometry
    window_bytes: int
    geometries: tuple[Geometry, ...] = ()
    backend: str = ZMQ
    memory: tuple[PoolMemory, ...] = ()


class DropPeer(Order, frozen=True, kw_only=True):
    """The session has ended: send nothing to it any more, forget it."""

    session: str


class OpenSession(Order, frozen=True, kw_only=True):
    """Open the data connections to a prefill server: one endpoint per stage of it, in stage order.
    session is the secret its control endpoint gave us; geometries are those of its stages. backend: how bytes come.
    server_key: its CURVE public key, "" where connections are in the clear."""

    session: str
    endpoints: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    window_bytes: int
    backend: str = ZMQ
    server_key: str = ""


class CloseSession(Order, frozen=True, kw_only=True):
    """Close the data connections of a session. Answered by SessionClosed once nobody can write through it any more."""

    session: str


class PrepareReceive(Order, frozen=True, kw_only=True):
    """KV of a request will come under (ticket, generation): tokens [start, start + count) into these pages
    (packed ids; the first one holds position start), metadata into row. Answered by ReceivePrepared."""

    request: int
    session: str
    ticket: str
    generation: int
    start: int
    count: int
    pages: bytes
    row: int


class CancelReceive(Order, frozen=True, kw_only=True):
    """Write nothing more for a request. Answered by ReceiveCancelled; its pages may then be used for others."""

    request: int


class Heartbeat(Order, frozen=True, kw_only=True):
    """Liveness probe, not of the stream; answered by StageHeartbeat. orders, digest: of the stream up to here. A
    stage that got another one fails."""

    orders: int
    digest: bytes


class StartRecording(Order, frozen=True, kw_only=True):
    """Note the times of plans and transfers from now on, in buffers of limited size. A stage that does so already for
    this trace goes on; one that does for another begins anew."""

    trace: int


class StopRecording(Order, frozen=True, kw_only=True):
    """End the recording; answered by RecordingStopped, at once and whether or not there was one."""

    trace: int


class ShutdownStage(Order, frozen=True, kw_only=True):
    """End the stage process."""


class StageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what a stage reports."""

    stage: int


class StageReady(StageEvent, frozen=True, kw_only=True):
    """Weights loaded, pool allocated, warmed up. geometry: of this stage's pool. data_host, data_port: where peers
    attach. epoch: counts the starts of the group of stages. cost: a, b, c of the a·l² + b·l + c seconds that l tokens
    take here, where they were measured. backends: ways to move KV that work here, best first. host: token of the
    host's shared memory, "" where there is none. nixl: version of NIXL, "" where it is not used. memory: how peers may
    write into the pool."""

    geometry: Geometry
    fingerprint: str
    data_port: int
    kv_pages: int
    vocab_size: int
    data_host: str = ""
    epoch: int = 0
    cost: tuple[float, float, float] | None = None
    backends: tuple[str, ...] = (ZMQ,)
    host: str = ""
    nixl: str = ""
    memory: PoolMemory | None = None


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token sampled for a row."""

    request: int
    token: int
    logprob: TokenLogprob | None = None


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of prompt tokens at positions [start, start + len(entries))."""

    request: int
    start: int
    entries: tuple[TokenLogprob, ...]


class PlanDone(StageEvent, frozen=True, kw_only=True):
    """The Forward with this seq has been computed here. Only the last stage reports samples."""

    seq: int
    duration_s: float
    samples: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ChunkAcked(StageEvent, frozen=True, kw_only=True):
    """Every stage of the peer that shares KV with this one has written a chunk, checksum right. bytes: of its
    payload, over all of them."""

    request: int
    chunk: int
    bytes: int


class SendFailed(StageEvent, frozen=True, kw_only=True):
    """The peer refused a chunk (checksum, bounds) or the chunk could not be sent. code "cancelled": the peer does not
    expect it any more."""

    request: int
    code: str
    message: str


class PeerLost(StageEvent, frozen=True, kw_only=True):
    """A write into a peer's pages was lost on its way, and nobody can say when the last of its bytes will have come.
    The session has to end."""

    session: str
    reason: str


class SendCancelled(StageEvent, frozen=True, kw_only=True):
    """Answer to CancelSend."""

    request: int


class ReceivePrepared(StageEvent, frozen=True, kw_only=True):
    """Answer to PrepareReceive."""

    request: int


class KvReceived(StageEvent, frozen=True, kw_only=True):
    """Every chunk of a request from every stage of the prefill server that shares KV with this one has been written,
    and the metadata row."""

    request: int
    first: FirstToken
    bytes: int
    chunks: int


class ChunkReceived(StageEvent, frozen=True, kw_only=True):
    """A chunk has been written: the prefill server is not silent about this request."""

    request: int


class ReceiveFailed(StageEvent, frozen=True, kw_only=True):
    """Incoming KV was bad (checksum, bounds, metadata of another ticket)."""

    request: int
    code: str
    message: str


class ReceiveCancelled(StageEvent, frozen=True, kw_only=True):
    """Answer to CancelReceive."""

    request: int


class SessionClosed(StageEvent, frozen=True, kw_only=True):
    """Answer to CloseSession: whoever sent through this session cannot write into this stage's pool any more. It may
    take as long as a stopped process of the other side stays stopped."""

    session: str


class StageHeartbeat(StageEvent, frozen=True, kw_only=True):
    """Answer to Heartbeat, with the stage's counters."""

    stats: Stats


class RecordingStopped(StageEvent, frozen=True, kw_only=True):
    """Answer to StopRecording. spans: an encoded headrace.core.trace.StageTrace, which the scheduler passes on as it
    is."""

    trace: int
    spans: bytes


class StageFailed(StageEvent, frozen=True, kw_only=True):
    """The stage cannot go on; its process ends after this."""

    message: str


AnyOrder = (
    BeginEpoch
    | Forward
    | SendChunk
    | CancelSend
    | ReleaseRequest
    | AdmitPeer
    | DropPeer
    | OpenSession
    | CloseSession
    | PrepareReceive
    | CancelReceive
    | Heartbeat
    | StartRecording
    | StopRecording
    | ShutdownStage
)
AnyStageEvent = (
    StageReady
    | PlanDone
    | ChunkAcked
    | SendFailed
    | PeerLost
    | SendCancelled
    | ReceivePrepared
    | KvReceived
    | ChunkReceived
    | ReceiveFailed
    | ReceiveCancelled
    | SessionClosed
    | StageHeartbeat
    | RecordingStopped
    | StageFailed
)


def stage_identity(stage: int, epoch: int = 0, session: str = "") -> bytes:
    """The routing id under which a stage connects to the scheduler's order socket; epoch: its group's start. Where
    others could reach the socket, the session keeps them from guessing it."""
    name = f"stage-{epoch}-{stage}"
    return (f"{name}-{session}" if session else name).encode()
