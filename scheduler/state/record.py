"""The record of one request: everything the scheduler knows about it, and the phase it is in.

SUBMITTED ─► BOOTSTRAP ─► WAITING ─► RUNNING ──► INFLIGHT ───► DONE         (SendTo)
                          WAITING ─► RUNNING ──► GENERATING ─► DONE         (DecodeHere)
                          WAITING ─► FETCHING ─► GENERATING ─► DONE         (FetchFrom)
                             ▲────── preempted ──────┘
                          WAITING ─► RUNNING ──► INFLIGHT ───► DONE         (SendTo, held)
any of them ─► FAILED, which is absorbing and keeps the first reason
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.messages.frontend import Submit
from headrace.core.messages.peers import ControlServerEffect
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import ITEM_BYTES, pack, unpack
from headrace.core.types.request import (
    AnyRoute,
    FetchFrom,
    FinishReason,
    FirstToken,
    HandoffStats,
    SendTo,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.scheduler.kv.lease import Lease


class Phase(Enum):
    BOOTSTRAP = "bootstrap"  # a peer has to reserve pages, or a metadata row to come free
    WAITING = "waiting"  # may be started
    RUNNING = "running"  # some chunk planned, first token not known
    INFLIGHT = "inflight"  # computed; held for a peer, or not every stage's bytes acknowledged
    FETCHING = "fetching"  # KV is coming from a prefill server
    GENERATING = "generating"  # decoding here
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """The way out by wire: what a peer reserved, and how far its bytes are.

    dst_pages: ids in the peer's pool; the first holds position cached_tokens. sent: positions below it are sent or
    cached at the peer. unacked: stages whose acknowledgement is missing, by chunk. armed: highest chunk that stages
    have certainly reached; silent_since: when one of these was last heard of.
    """

    session: str
    ticket: str
    generation: int
    dst_pages: "array[int]"
    dst_page_size: int
    dst_row: int
    cached_tokens: int
    sent: int
    chunks: int = 0
    unacked: dict[int, set[int]] = field(default_factory=dict)
    armed: int = -1
    silent_since: float = 0.0
    bytes: int = 0
    final: bool = False  # the last chunk has been ordered
    farewell: ControlServerEffect | None = None  # the last word to the peer, said when no byte can follow it

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.session, self.ticket, self.generation)

    @property
    def overdue(self) -> bool:
        """A chunk that stages have reached is unacknowledged."""
        return bool(self.unacked) and next(iter(self.unacked)) <= self.armed


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """The way in by wire. open: stages may write into our pages. reserved: the prefill server has been told.
    ended: the prefill server needs no cancel (it ended the ticket, or is gone). direct: the prefill server writes into
    our pages itself; exposed: it may do so now, whatever our stages want."""

    session: str
    ticket: str
    generation: int
    unready: set[int]  # stages that have not answered Expect
    missing: set[int]  # stages whose KV has not arrived
    pages: int
    open: bool = True
    reserved: bool = False
    ended: bool = False
    direct: bool = False
    exposed: bool = False
    bytes: int = 0
    chunks: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.session, self.ticket, self.generation)


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    arrival: its number in order of arrival, kept for life. serial: the number stages know it by; a preempted request
    gets a new one, so nothing late can land on it. tokens: packed ids of the prompt and of what was generated.
    target: tokens to prefill (all there were when it was last started). planned: positions [0, planned) are in some
    plan; computed: their plan is done. in_flight: plans in flight that contain it. sampled_here: the token at position
    planned is sampled by this pipeline. token_limit: prompt and generated tokens together. awaiting: stages that still
    have to answer Cancel or Forget. first: what the metadata row is to say, once it is known. computed_by: number of
    the plan that gave it. ahead: it leaves by wire and may be computed before its peer has come. lease_limit: no
    renewal keeps a held request beyond this time.
    """

    submit: Submit
    arrival: int
    serial: int
    arrived: float
    token_limit: int
    phase: Phase
    since: float = 0.0
    spent: dict[Phase, float] = field(default_factory=dict)
    tokens: bytearray = field(default_factory=bytearray)
    prompt_tokens: int = 0
    target: int = 0
    planned: int = 0
    computed: int = 0
    in_flight: int = 0
    sampled_here: bool = False
    lease: Lease | None = None
    cached_tokens: int = 0
    row: int | None = None
    first: FirstToken | None = None
    computed_by: int = 0
    ahead: bool = False
    lease_limit: float = 0.0
    outgoing: OutgoingTransfer | None = None
    incoming: IncomingTransfer | None = None
    awaiting: set[int] = field(default_factory=set)
    ordered: bool = False  # stages have heard of it
    preempting: bool = False
    error: ErrorInfo | None = None
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    route: AnyRoute = field(init=False)
    decodes_here: bool = field(init=False)

    def __post_init__(self) -> None:
        self.route = self.submit.route
        self.decodes_here = self.route.decodes_here
        self.since = self.arrived
        self.tokens = bytearray(self.submit.prompt)
        self.prompt_tokens = self.target = self.length

    @property
    def rid(self) -> str:
        return self.submit.rid

    @property
    def ticket(self) -> str:
        """The ticket of a request whose KV is sent or fetched; "" for the others."""
        return self.route.ticket if isinstance(self.route, SendTo | FetchFrom) else ""

    @property
    def held(self) -> bool:
        """The client asked to have its KV held for a peer."""
        return isinstance(self.route, SendTo) and self.route.hold

    @property
    def length(self) -> int:
        """Tokens known: the prompt, and what was generated and reported."""
        return len(self.tokens) // ITEM_BYTES

    @property
    def generated(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens it may generate."""
        return self.token_limit - self.prompt_tokens

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def unplanned(self) -> int:
        """Tokens whose KV nobody has planned to compute or to fetch."""
        return 0 if self.ended else max(0, self.target - self.planned)

    @property
    def unclaimed(self) -> bool:
        """Its pages are, or are going to be, taken for a peer that has not come."""
        return self.ahead and self.outgoing is None and not self.ended

    @property
    def salt(self) -> str:
        return self.submit.cache_salt

    def packed(self, start: int, end: int) -> bytes:
        """Token ids [start, end), packed."""
        return bytes(self.tokens[start * ITEM_BYTES : end * ITEM_BYTES])

    def token_at(self, position: int) -> int:
        return unpack(self.packed(position, position + 1))[0]

    def append(self, token: int) -> FinishReason | None:
        """Add a generated token; say whether the request ends with it."""
        self.tokens += pack((token,))
        sampling = self.submit.sampling
        if token in sampling.stop_token_ids and self.generated >= sampling.min_tokens:
            return "stop"
        return "length" if self.length >= self.token_limit else None

    def enter(self, phase: Phase, now: float) -> float:
        """Change the phase; return the seconds spent in the one before."""
        elapsed = now - self.since
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + elapsed
        self.phase = phase
        self.since = now
        return elapsed

    def timing(self) -> Timing:
        """Seconds by phase, of the phases that were left."""
        return Timing(
            bootstrap_s=self.spent.get(Phase.BOOTSTRAP, 0.0),
            queue_s=self.spent.get(Phase.WAITING, 0.0),
            forward_s=self.spent.get(Phase.RUNNING, 0.0),
            transfer_s=self.spent.get(Phase.INFLIGHT, 0.0) + self.spent.get(Phase.FETCHING, 0.0),
            decode_s=self.spent.get(Phase.GENERATING, 0.0),
        )

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.generated, self.cached_tokens)

    def handoff(self, page_size: int) -> HandoffStats:
        """What crossed the wire, out or in."""
        if self.outgoing is not None and self.outgoing.chunks:
            first = self.outgoing.cached_tokens // page_size
            pages = -(-self.outgoing.sent // page_size) - first
            return HandoffStats(pages, self.outgoing.bytes, self.outgoing.chunks)
        if self.incoming is not None and self.incoming.chunks:
            return HandoffStats(self.incoming.pages, self.incoming.bytes, self.incoming.chunks)
        return HandoffStats()

    def first_token(self, token: int, logprob: TokenLogprob | None, reason: str) -> FirstToken:
        return FirstToken(token, self.prompt_tokens, self.cached_tokens, logprob, reason)

    def all_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """One entry per prompt token (None for the first), or nothing when none were computed."""
        if not self.prompt_logprobs:
            return ()
        return tuple(self.prompt_logprobs.get(position) for position in range(self.prompt_tokens))
