"""Stage events: what stages report to the scheduler (ZMQ or a pair of sockets, msgpack).

Some answer an order, each order of these kinds once:

    CancelSend ─► SendCancelled        PrepareReceive ─► ReceivePrepared       Heartbeat ─► StageHeartbeat
    Forward ─► PlanDone                CancelReceive ─► ReceiveCancelled       StopRecording ─► RecordingStopped
    StorePages ─► PagesStored          CloseSession ─► SessionClosed           LoadPages ─► PagesLoaded

The orders: core/messages/orders.py.
"""

import msgspec

from headrace.core.stats import Stats
from headrace.core.types.kv.backends import ZMQ, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_digests import DigestPart
from headrace.core.types.kv.kv_files import KvComputation
from headrace.core.types.kv.kv_tiers import PageHeader, Tier
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.requests.constraint import GrammarRejection
from headrace.core.types.requests.draft import DraftTokens, HiddenStates
from headrace.core.types.requests.prompt_logprobs import LogprobRun
from headrace.core.types.requests.request import FirstToken, TokenLogprob

GIB = 1 << 30


class StageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of stage events."""

    stage: int
    """The reporting rank; without tensor parallelism it is the number of the stage."""


class StageLoading(StageEvent, frozen=True, kw_only=True):
    """How far a stage is that is not ready yet, sent about once a second."""

    epoch: int = 0
    """Counts the starts of the group of stages."""
    done_bytes: int = 0
    """Bytes of the weights that are read."""
    total_bytes: int = 0
    left_s: float | None = None
    """Until all weights are read, as it looks now; None while that is not known."""
    loaded: bool = False
    """The weights are; the stage warms up."""

    def __str__(self) -> str:
        if self.loaded:
            return "warms up"
        done, total = self.done_bytes / GIB, self.total_bytes / GIB
        left = f", {self.left_s:.0f} s left" if self.left_s is not None else ""
        return f"reads weights: {done:.1f} of {total:.1f} GiB ({done / total if total else 0:.0%}{left})"


class StageReady(StageEvent, frozen=True, kw_only=True):
    """Weights are loaded, the KV pool is allocated and the stage is warmed up."""

    geometry: Geometry
    """Shape of this rank's KV pool."""
    offered: tuple[Geometry, ...] | None = None
    """What of the pool is offered to peers: one geometry, or none where other ranks offer the same KV; None for all of
    the pool."""
    fingerprint: str
    """Names what the model computes, the same on every stage (engine/model/fingerprint.py)."""
    adapters: dict[str, str] = {}
    """Fingerprints of the LoRA adapters of --lora by name, the same on every stage."""
    data_port: int
    """Port where peers attach to this stage."""
    kv_pages: int
    """Pages in the pool."""
    vocab_size: int
    host_pages: int = 0
    """Slots of the host tier; 0 without one."""
    disk_pages: int = 0
    """Slots of the disk tier; 0 without one."""
    data_host: str = ""
    """Host where peers attach to this stage."""
    epoch: int = 0
    """Counts the starts of the group of stages."""
    cost: tuple[float, float, float] | None = None
    """(a, b, c) of the a·l² + b·l + c seconds that a prompt of l tokens takes here; None where it was not measured."""
    backends: tuple[str, ...] = (ZMQ,)
    """Transfer backends that work here, best first."""
    cancels: bool = False
    """A pass ends soon after CancelForward."""
    host: str = ""
    """Token of the host's shared memory; "" where there is none."""
    nixl: str = ""
    """Version of NIXL; "" where it is not used."""
    unreachable_gpus: tuple[str, ...] = ()
    """UUIDs of GPUs of the host whose memory this stage's GPU cannot write into."""
    same_bits: bool | None = None
    """Whether a trial at the start gave the same bits in chunks and beside another request; None: none was made."""
    computation: KvComputation | None = None
    """What its bits depend on beside the model; None where that is not told."""
    reproducible: bool = False
    """They depend on nothing else: not on chunks, on the batch, or on what is cached."""
    memory: PoolMemory | None = None
    """How peers may write into the pool; None where they may not."""

    @property
    def offers(self) -> Geometry | None:
        """The part of the pool that is offered to peers; None where there is none."""
        if self.offered is None:
            return self.geometry
        return self.offered[0] if self.offered else None


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token sampled for a row."""

    request: int
    token: int
    logprob: TokenLogprob | None = None
    draft: DraftTokens | None = None


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of prompt tokens that a row has computed."""

    request: int
    runs: tuple[LogprobRun, ...]


class RowHidden(msgspec.Struct, frozen=True):
    """Hidden states of a row's last positions."""

    request: int
    states: HiddenStates


class PlanDone(StageEvent, frozen=True, kw_only=True):
    """A Forward has been computed on this stage."""

    seq: int
    """seq of the Forward."""
    duration_s: float
    """Seconds from the start of the stage's layers to the end of sampling or passing on; waiting is not included."""
    samples: tuple[SampledToken, ...] = ()
    """One for each row that samples and is finite, in row order; from the last stage only."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Logprobs of prompt tokens, from the last stage only."""
    hidden: tuple[RowHidden, ...] = ()
    """One for each row that asks for them, in row order; from the last stage only."""
    nonfinite: tuple[int, ...] = ()
    """Requests whose rows came out NaN or infinite, at any stage; from the last stage only. They have no sample, and
    the KV of their rows must not be used."""
    rejected: tuple[GrammarRejection, ...] = ()
    """Requests whose grammar does not allow their tokens, or gives no mask; from the last stage only. They have no
    sample."""
    digest: tuple[DigestPart, ...] = ()
    """Of this rank's KV of the positions that the Forward names."""


class ChunkAcked(StageEvent, frozen=True, kw_only=True):
    """Every stage of the peer that shares KV with this one has written a chunk, and its checksum was right."""

    request: int
    chunk: int
    bytes: int
    """Payload bytes, summed over the peer's stages."""


class SendFailed(StageEvent, frozen=True, kw_only=True):
    """The peer refused a chunk (checksum, bounds), or the chunk could not be sent."""

    request: int
    code: str
    """Error code; "cancelled" means that the peer does not expect the chunk any more."""
    message: str


class PeerLost(StageEvent, frozen=True, kw_only=True):
    """A write into a peer's pages was lost on its way, so there is no telling when its last byte arrives. The session
    has to end."""

    session: str
    reason: str


class SendCancelled(StageEvent, frozen=True, kw_only=True):
    """Answer to CancelSend: no byte of the request is queued or being written."""

    request: int


class ReceivePrepared(StageEvent, frozen=True, kw_only=True):
    """Answer to PrepareReceive."""

    request: int


class KvReceived(StageEvent, frozen=True, kw_only=True):
    """All KV of a request, from every stage of the prefill server that shares KV with this one, is in the pool, and so
    is the metadata row."""

    request: int
    first: FirstToken
    bytes: int
    """Payload bytes received."""
    chunks: int
    """Chunks received, over all of the prefill server's stages."""


class ChunkReceived(StageEvent, frozen=True, kw_only=True):
    """A chunk of a request has been written to the pool. No deadline of the scheduler depends on it."""

    request: int
    until: int = 0
    """Positions before this one, of those that are fetched, are in the pool of this stage: written, with the right
    checksum, without a gap, from every stage of the prefill server that shares KV with it."""


class ReceiveFailed(StageEvent, frozen=True, kw_only=True):
    """Incoming KV was bad (checksum, bounds, metadata of another ticket)."""

    request: int
    code: str
    message: str


class ReceiveCancelled(StageEvent, frozen=True, kw_only=True):
    """Answer to CancelReceive: the request's pages are not written any more."""

    request: int


class SessionClosed(StageEvent, frozen=True, kw_only=True):
    """Answer to CloseSession: the peer cannot write into this stage's pool through the session any more. Takes as
    long as a stopped process of the peer stays stopped."""

    session: str


class PagesStored(StageEvent, frozen=True, kw_only=True):
    """Answer to StorePages: the sources may be changed, and the slots may be read."""

    seq: int
    """seq of the StorePages."""
    failed: bytes = b""
    """Packed indices, into the order's lists, of the pages that could not be stored; their slots hold nothing."""
    written_bytes: int = 0
    """Bytes that this stage has written to the tier."""


class PagesLoaded(StageEvent, frozen=True, kw_only=True):
    """Answer to LoadPages: the pages have the contents of the slots, and both may be used."""

    seq: int
    """seq of the LoadPages."""
    failed: bytes = b""
    """Packed indices, into the order's lists, of the pages that could not be read or whose checksum was wrong. The
    slots stay taken until they are dropped."""


class PagesLost(StageEvent, frozen=True, kw_only=True):
    """Slots of a tier hold nothing any more on this stage, such as those of a segment that was deleted. They stay taken
    until they are dropped."""

    tier: Tier
    slots: bytes
    """Packed slots."""


class PagesFound(StageEvent, frozen=True, kw_only=True):
    """Pages that the stage found on its disk when it started: sent after StageReady, in one or more parts, by every
    stage that has a disk tier. Nothing is stored on disk before every stage has sent its last part."""

    slots: bytes
    """Packed slots, as the StorePages that wrote the pages named them. Each slot comes once."""
    headers: tuple[PageHeader, ...]
    """The header of each slot's page, in the same order."""
    last: bool = True
    """No further part follows."""


class StageHeartbeat(StageEvent, frozen=True, kw_only=True):
    """Answer to Heartbeat, with the stage's counters."""

    stats: Stats
    experts: ExpertLoad | None = None
    """Rows per expert; None for a stage without experts."""
    steps: int = 0
    """Steps of forward passes so far: layers, and what goes before and after them."""


class RecordingStopped(StageEvent, frozen=True, kw_only=True):
    """Answer to StopRecording."""

    trace: int
    spans: bytes
    """Encoded headrace.core.trace.StageTrace, which the scheduler passes on unread."""


class StageFailed(StageEvent, frozen=True, kw_only=True):
    """The stage cannot go on; its process ends after this."""

    message: str
    elsewhere: bool = False
    """Because of another server, with which this one shares experts."""


class StageSilence(StageEvent, frozen=True, kw_only=True):
    """Made by the scheduler's loop: a stage does not answer and counts as alive, since it is stopped, or kept busy."""

    reason: str
    """What it does, behind its name; "" once it answers again."""


class StageProgress(StageEvent, frozen=True, kw_only=True):
    """Made by the scheduler's loop: a stage has computed something since its last heartbeat."""


AnyStageEvent = (
    StageLoading
    | StageReady
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
    | PagesStored
    | PagesLoaded
    | PagesLost
    | PagesFound
    | StageHeartbeat
    | RecordingStopped
    | StageFailed
)
