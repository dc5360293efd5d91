"""Orders: the numbered stream from the scheduler to every stage (ZMQ or a pair of sockets, msgpack).

    BeginEpoch ─► Forward, SendChunk, ReleaseRequest, … ─► ShutdownStage

Every rank of a data-parallel replica gets the same stream: the orders to all ranks and those to its replica, so that
with several replicas each stream lacks some numbers. With one, every stage gets all orders. Forwards are executed in
stream order. A SendChunk waits for the Forward that computes its pages, and for no other order. StorePages and
DropPages are executed in stream order among themselves, beside the Forwards; a StorePages of pool pages waits for the
Forwards before it. A LoadPages overtakes them; for the library tier it is executed apart
from all others. All other orders act at once. Each Heartbeat carries the number and a
digest of the orders sent so far (core/runtime/codec.py); a stage compares them with its own and fails if they
differ.

What stages report back: core/messages/stage_events.py. Lists of token and page ids are packed little-endian int32
(core/types/packed.py).
"""

import msgspec

from headrace.core.types.kv.kv_digests import DigestPages
from headrace.core.types.kv.kv_tiers import PageHeader, Tier
from headrace.core.types.packed import unpack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.ranks.coordinate import Agreement
from headrace.core.types.requests.constraint import GrammarStart
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.core.types.requests.images import ImageInput
from headrace.core.types.requests.request import FirstToken, SamplingParams, TokenHistory


class PlanRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's part of a plan: positions [start, start + count) of its sequence."""

    request: int
    """Serial number that the scheduler gave the request; unique for the scheduler's life."""
    start: int
    """First position to compute; KV of the positions before it is in the pool."""
    count: int
    """Positions to compute: the chunk's tokens, or 1 for a decoding row."""
    pages: bytes
    """Packed page ids covering [0, start + count)."""
    tokens: bytes = b""
    """Packed ids of the count tokens. b"" (with count 1): the token that this pipeline sampled last for the request,
    which may not have been reported to the scheduler yet."""
    sample: SamplingParams | None = None
    """Set when a token is to be sampled from the row's last position."""
    feeds: bool = False
    """A later row of this request has tokens b"" and takes the token sampled here."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each of the row's own prompt tokens; None reports no prompt logprobs."""
    next_token: int | None = None
    """For prompt_logprobs: the prompt token after the row's last position; None when the row ends the prompt."""
    prompt_logprobs_start: int = 0
    """For prompt_logprobs: the first prompt position to report."""
    generated: int = 0
    """Tokens sampled for the request before this row (for SamplingParams.min_tokens)."""
    hidden: int = 0
    """The row's last positions, so many, whose hidden states are reported."""
    draft_top_k: int = 0
    """Most likely tokens to report with their probabilities beside the sampled one."""
    grammar: GrammarStart | None = None
    """Set in the first row under this number of a request with a constraint: tokens sampled for it from now on match
    it."""
    adapter: str = ""
    """Fingerprint of the LoRA adapter that the row goes through; "" for none."""
    images: tuple[ImageInput, ...] = ()
    """Set in the first row under this number that computes tokens of an image: those of the images that it and later
    rows compute."""
    rotary: bytes = b""
    """Packed rotary positions, one axis after the other; b"" where they are the row's positions."""
    history: TokenHistory | None = None
    """Set in the first row under this number that samples for a request with penalties. What is sampled from then on,
    the last stage counts itself."""
    slot: int = -1
    """Where the request's states are in the pools of the stages; -1 where the model keeps none."""
    resume: int = -1
    """The slot of a checkpoint with the states before the row's first position; -1: they are in the slot itself, or the
    request begins."""
    checkpoint: int = -1
    """A slot into which the states behind the row's last position are copied; -1 for none."""

    def prompt_targets(self) -> tuple[int, list[int]]:
        """The prompt positions whose logprobs this row gives: the first one, and the tokens from there on. They are
        computed at the position before: the row's own first token has none, and the one after the row has."""
        following = () if self.next_token is None else (self.next_token,)
        first = max(self.start + 1, self.prompt_logprobs_start)
        return first, [*unpack(self.tokens).tolist(), *following][first - self.start :]


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of orders."""

    seq: int
    """Rises from order to order, by one over all of them; 0 where an order is used outside the stream."""


class BeginEpoch(Order, frozen=True, kw_only=True):
    """First order to a group of stages, once all of them are ready. Orders queued for the previous group are
    discarded."""

    epoch: int
    """Counts the starts of the group."""


class Forward(Order, frozen=True, kw_only=True):
    """A plan: one forward pass over the rows (one microbatch)."""

    rows: tuple[PlanRow, ...]
    """Rows of this replica; () where it is idle in a pass of lockstep replicas."""
    agreement: Agreement | None = None
    """What lockstep replicas do alike in this pass, the Forwards of one seq; None where replicas share nothing."""
    digest: DigestPages | None = None
    """KV that is digested once it is computed, and reported in PlanDone."""


class CancelForward(Order, frozen=True, kw_only=True):
    """Nobody needs what a Forward computes any more: its layers need not be run to the end. PlanDone answers it all the
    same. Only for stages that can (StageReady.cancels)."""

    forward: int
    """seq of the Forward."""


class SendChunk(Order, frozen=True, kw_only=True):
    """Send the KV of positions [start, start + count) of a request to a peer."""

    request: int
    after: int
    """seq of the Forward that computes the last of these positions."""
    session: str
    ticket: str
    generation: int
    chunk: int
    """Chunks of a request count from 0."""
    start: int
    count: int
    """Positions to send; 0 for a last chunk when everything was sent before."""
    pages: bytes
    """Packed source page ids; the first holds position start."""
    dst_pages: bytes
    """Packed page ids in the peer's pool, in the peer's page size; the first holds position start."""
    row: int
    """Metadata row of the request on this server."""
    dst_row: int
    """Metadata row of the request at the peer."""
    slot: int = -1
    """Where the request's states are in the pools of this server, -1 where it has none; the last chunk carries them."""
    dst_slot: int = -1
    """Where they go in the peer's pools."""
    last: FirstToken | None = None
    """Set on the last chunk, which carries the metadata row."""


class CancelSend(Order, frozen=True, kw_only=True):
    """Stop sending for a request. Answered by SendCancelled once no byte of it is queued or being written."""

    request: int


class ReleaseRequest(Order, frozen=True, kw_only=True):
    """Drop what the stage keeps for a request. Its pages may belong to another request from the next order on."""

    request: int


class AdmitPeer(Order, frozen=True, kw_only=True):
    """Accept data connections of a peer's session."""

    terms: PeerTerms


class DropPeer(Order, frozen=True, kw_only=True):
    """The session has ended: send nothing more to it and release its state."""

    session: str


class OpenSession(Order, frozen=True, kw_only=True):
    """Open the data connections to a prefill server, one per stage of it."""

    terms: PrefillTerms


class CloseSession(Order, frozen=True, kw_only=True):
    """Close the data connections of a session. Answered by SessionClosed once nothing can be written through it."""

    session: str


class PrepareReceive(Order, frozen=True, kw_only=True):
    """Expect the KV of positions [start, start + count) of a request under (ticket, generation). Answered by
    ReceivePrepared."""

    request: int
    session: str
    ticket: str
    generation: int
    start: int
    count: int
    pages: bytes
    """Packed page ids in this stage's pool; the first holds position start."""
    row: int
    """Metadata row to be filled."""
    slot: int = -1
    """Where the request's states go; -1 where it has none."""
    draft: DraftTerms = NO_DRAFT
    """Draft data that was asked for: no other may come."""
    prefix: bool = False
    """The KV comes from a prefix cache, and no first token with it; otherwise it comes with one."""


class CancelReceive(Order, frozen=True, kw_only=True):
    """Write nothing more for a request. Answered by ReceiveCancelled; its pages may be reused after that."""

    request: int


class StorePages(Order, frozen=True, kw_only=True):
    """Copy KV pages to slots of a tier. Answered by PagesStored; until then the sources are not changed and the slots
    are not read. Slots are numbered from 0 in each tier, by the scheduler, the same on every stage."""

    tier: Tier
    """Where the copies go."""
    sources: bytes
    """Packed pages of the pool, or packed slots of the host tier, see from_host."""
    slots: bytes
    """Packed slots of the tier, one for each source."""
    from_host: bool = False
    """The sources are slots of the host tier (and the tier is the disk). False: they are pages of the pool, and are
    copied once the Forwards ordered before have been computed."""
    headers: tuple[PageHeader, ...] = ()
    """For the disk tier: what is written beside each page. Parents are in a slot already, or come before."""


class LoadPages(Order, frozen=True, kw_only=True):
    """Copy slots of a tier to pages of the pool, and verify them. Answered by PagesLoaded; until then the pages are not
    used and the slots are not dropped."""

    tier: Tier
    slots: bytes
    """Packed slots."""
    pages: bytes
    """Packed pages of the pool, one for each slot."""


class DropPages(Order, frozen=True, kw_only=True):
    """Forget slots of a tier. A later StorePages may use them again."""

    tier: Tier
    slots: bytes
    """Packed slots."""


class OpenKvFile(Order, frozen=True, kw_only=True):
    """The slots [first, first + pages) of the library tier are the pages of a KV file from now on. It is read when its
    pages are loaded."""

    first: int
    pages: int
    location: str
    """Path of a file, or its URL."""
    digest: bytes
    """SHA-256 of the file's header: what a header with another one describes is not loaded."""


class CloseKvFile(Order, frozen=True, kw_only=True):
    """Forget the KV file with this first slot: its pages cannot be loaded any more."""

    first: int


class Heartbeat(Order, frozen=True, kw_only=True):
    """Liveness probe outside the numbered stream; answered by StageHeartbeat. A stage whose own counts or digests
    differ fails."""

    orders: int
    """Orders sent so far to the stage's replica."""
    digest: bytes
    """Digest over them, see core/runtime/codec.py."""
    passes: int = 0
    """Passes of lockstep replicas so far; 0 where replicas share nothing."""
    pass_digest: bytes = b""
    """Digest over their numbers and agreements (pass_frame), the same for all replicas; b"" where there were none."""


class StartRecording(Order, frozen=True, kw_only=True):
    """Record the times of plans and transfers from now on, in buffers of limited size. A stage that records this trace
    already goes on; one that records another starts over."""

    trace: int


class StopRecording(Order, frozen=True, kw_only=True):
    """End a recording; answered by RecordingStopped, at once and even when nothing was being recorded."""

    trace: int


class ShutdownStage(Order, frozen=True, kw_only=True):
    """End the stage process."""


AnyOrder = (
    BeginEpoch
    | Forward
    | CancelForward
    | SendChunk
    | CancelSend
    | ReleaseRequest
    | AdmitPeer
    | DropPeer
    | OpenSession
    | CloseSession
    | PrepareReceive
    | CancelReceive
    | StorePages
    | LoadPages
    | DropPages
    | OpenKvFile
    | CloseKvFile
    | Heartbeat
    | StartRecording
    | StopRecording
    | ShutdownStage
)


class ReplicaOrder(Order, frozen=True, kw_only=True):
    """An order to the ranks of one of several data-parallel replicas, inside the scheduler process: they are sent what
    it contains. All other orders go to all ranks."""

    replica: int
    order: AnyOrder


def pass_frame(order: Forward) -> bytes:
    """What all replicas have in common of a pass, encoded: its number and the agreement."""
    return msgspec.msgpack.encode((order.seq, order.agreement))


def stage_identity(stage: int, epoch: int = 0, session: str = "") -> bytes:
    """Routing id of a stage on the scheduler's order socket.

    epoch: start of the stage's group. session: secret of the group, so that others who reach the socket cannot guess
    the id; "" on a socket of this machine.
    """
    name = f"stage-{epoch}-{stage}"
    return (f"{name}-{session}" if session else name).encode()
