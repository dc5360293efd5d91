"""The record of one request: everything that the scheduler knows about it."""

from dataclasses import dataclass, field

from headrace.core.incoming import IncomingState, IncomingTransfer
from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import Progress
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import pages_spanned
from headrace.core.types.kv.kv_tiers import NONE_LOADED, TierTokens
from headrace.core.types.packed import ITEM_BYTES, pack, prompt_hash, unpack
from headrace.core.types.requests.constraint import GrammarStart
from headrace.core.types.requests.draft import NO_DRAFT, Draft, DraftTerms
from headrace.core.types.requests.images import ImageInput, next_position
from headrace.core.types.requests.request import (
    NO_HANDOFF,
    PREFIX,
    AnyRoute,
    FetchFrom,
    FinishReason,
    FirstToken,
    HandoffStats,
    Promise,
    SendTo,
    Timing,
    TokenHistory,
    TokenLogprob,
    Usage,
)
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.cost_model import NOTHING, Load
from headrace.scheduler.kv.kv_cache import Lease
from headrace.scheduler.requests.parts import (
    Leftover,
    OnStages,
    PromptResult,
    QueueEntry,
    SpanLog,
    TtftPromise,
)
from headrace.scheduler.requests.phase import ENDED, Phase, timing
from headrace.scheduler.requests.transfers import OutgoingTransfer


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its admission until its pages are free."""

    submit: Submit
    arrival: int
    """Its number in order of arrival, kept for life. Queues and deadlines know the request by it."""

    serial: int
    """The number that stages know it by. A preempted request gets a new one, so that late messages do not match."""

    arrived: float
    """Time of its admission, seconds."""

    token_limit: int
    """Prompt and generated tokens together."""

    phase: Phase
    replica: int = 0
    """The data-parallel replica that it is bound to: its pages are of that one's pool."""

    since: float = 0.0
    """Time at which it entered its phase."""

    spent: dict[Phase, float] = field(default_factory=dict)
    """Seconds in each phase that it has left."""

    tokens: bytearray = field(default_factory=bytearray)
    """Packed ids of the prompt and of the generated tokens."""

    prompt_tokens: int = 0
    target: int = 0
    """Tokens to prefill: all that were known when it was last started."""

    queued: QueueEntry = field(default_factory=QueueEntry)
    """What the queues note of it."""

    predicted_ttft_s: float | None = None
    """Seconds to its first token, as predicted at its arrival; None: it is not computed here."""

    promised: TtftPromise | None = None
    """The bound of its time to first token that was promised."""

    planned: int = 0
    """Positions [0, planned) are in some plan, found in the cache or fetched."""

    computed: int = 0
    """Positions [0, computed) have their KV here."""

    in_flight: int = 0
    """Plans in flight that contain it; counted by the PlanTable."""

    lease: Lease | None = None
    """Its KV pages."""

    cached_tokens: int = 0
    """Prompt tokens that were found in a prefix cache, here or at the prefill server."""

    from_tiers: TierTokens = NONE_LOADED
    """Those of cached_tokens that were loaded from tiers."""

    row: int | None = None
    """Its metadata row."""

    preempted: bool = False
    """It gave up its pages once: what the prefix cache has of it since is its own work."""

    kept: int = 0
    """Of a piece of an open prompt: positions that its passes have left in the prefix cache."""

    computes_here: bool = False
    """Route FetchFrom, preempted: its KV is not worth fetching again, or not to be had."""

    fetched: HandoffStats = NO_HANDOFF
    """What was fetched of it before it was preempted."""

    early_prefill: bool = False
    """Route SendTo: computed before a peer has reserved the ticket."""

    hold_until: float = 0.0
    """No renewal keeps a held request beyond this time."""

    outgoing: OutgoingTransfer | None = None
    """Route SendTo: set when a peer has reserved."""

    incoming: IncomingTransfer | None = None
    """Route FetchFrom: set when pages are leased."""

    on_stages: OnStages = field(default_factory=OnStages)
    """What stages have of it."""

    result: PromptResult = field(default_factory=PromptResult)
    """What its prompt has given beside the KV."""

    error: ErrorInfo | None = None
    """Why it has failed."""

    resumed: int = 0
    """Prompt tokens whose KV has come for earlier attempts at it."""

    leftover: Leftover | None = None
    """It has failed, and pages of it are kept for another attempt."""

    span_log: SpanLog | None = None
    """Set for a request that is part of a distributed trace."""

    route: AnyRoute = field(init=False)
    """submit.route"""

    terms: RequestTerms = field(init=False)
    """submit.terms"""

    decodes_here: bool = field(init=False)
    """Tokens after the first one are generated here (kept, since every row of a plan needs it)."""

    penalizes: bool = field(init=False)
    """submit.sampling.penalizes (kept likewise)"""

    open: bool = field(init=False)
    """submit.open: a piece of an open prompt, which counts as no work that others wait for."""

    def __post_init__(self) -> None:
        self.route, self.terms = self.submit.route, self.submit.terms
        self.decodes_here = self.route.decodes_here
        self.penalizes = self.submit.sampling.penalizes
        self.open = self.submit.open
        self.since = self.arrived
        self.tokens = bytearray(self.submit.prompt)
        self.prompt_tokens = self.target = self.length
        if self.from_cache:
            self.planned = self.target
        if self.submit.traceparent:
            self.span_log = SpanLog()

    @property
    def rid(self) -> str:
        """The id that the front end knows it by."""
        return self.submit.rid

    @property
    def follows(self) -> str:
        """The rid of the attempts before it, whose pages it may go on from."""
        return self.submit.follows or self.submit.rid

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
        """Tokens generated and reported."""
        return self.length - self.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens it may generate."""
        return self.token_limit - self.prompt_tokens

    @property
    def ended(self) -> bool:
        """It is done or has failed, and may still hold pages."""
        return self.phase in ENDED

    @property
    def unplanned(self) -> int:
        """Tokens whose KV is in no plan and not being fetched."""
        left = self.target - self.planned
        return left if left > 0 and self.phase not in ENDED and not self.open else 0

    @property
    def to_fetch(self) -> bool:
        """Its KV has to be fetched before it goes on here."""
        return isinstance(self.route, FetchFrom) and self.incoming is None and not self.computes_here

    @property
    def fetches_again(self) -> bool:
        """Its KV is to be fetched, or is being fetched, a second time: it is computed here if that fails."""
        return self.preempted and (self.to_fetch or self.phase is Phase.FETCHING)

    @property
    def starts_over(self) -> bool:
        """Fetching its KV again has failed: it is computed here once nothing can be written into its pages."""
        return self.computes_here and self.phase is Phase.FETCHING

    @property
    def needs_no_prefill(self) -> bool:
        """All of its KV has come from a prefill server, whose response has nothing that it waits for."""
        incoming = self.incoming
        received = incoming is not None and incoming.state is IncomingState.RECEIVED
        sampling = self.submit.sampling
        enough = received or self.computes_here
        return enough and sampling.prompt_logprobs is None and sampling.hidden_states is None

    @property
    def cacheable(self) -> int:
        """Positions that cached pages may serve: prompt logprobs and hidden states need theirs computed, the first
        time."""
        return self.length if self.generated else self.submit.sampling.cacheable(self.prompt_tokens)

    @property
    def objective(self) -> float | None:
        """Time by which its first token should be known; None: no time is better than another."""
        return None if self.terms.slo_ttft_s is None else self.arrived + self.terms.slo_ttft_s

    @property
    def load(self) -> Load:
        """What is left to compute of its prefill: neither planned, nor expected to be cached, nor to be fetched."""
        return NOTHING if self.ended or self.to_fetch or self.open else self.work

    @property
    def work(self) -> Load:
        """What is left of its prefill, whether others wait for it or not."""
        return Load.between(max(self.planned, self.queued.expected_cached), self.target)

    @property
    def has_kv(self) -> bool:
        """It has its pages, and none of them is still being loaded from a tier: it can be planned."""
        return self.lease is not None and self.lease.load is None

    @property
    def from_cache(self) -> bool:
        """Its KV is in the prefix cache, tiers included, and is handed over without computing anything."""
        return isinstance(self.route, SendTo) and self.route.cached

    @property
    def awaiting_peer(self) -> bool:
        """It is computed, or will be, before a peer has reserved its ticket."""
        return self.early_prefill and self.outgoing is None and not self.ended

    @property
    def gives_way(self) -> bool:
        """It is computed in the hope that its peer comes soon: prompts whose peer has come go first, and may have its
        pages."""
        return self.awaiting_peer and not self.held and not self.from_cache

    @property
    def salt(self) -> str:
        """Prompts share cached pages only under the same salt."""
        return self.terms.prefix_salt

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """Of its prompt."""
        return self.submit.images

    @property
    def next_position(self) -> int:
        """The rotary position of its first generated token."""
        return next_position(self.images, self.prompt_tokens)

    @property
    def prompt_hash(self) -> str:
        """Of its prompt; both sides of a handoff compare it."""
        return prompt_hash(self.submit.prompt, self.terms.image_digest)

    def packed(self, start: int, end: int) -> bytes:
        """Token ids [start, end), packed."""
        return bytes(self.tokens[start * ITEM_BYTES : end * ITEM_BYTES])

    def grammar_start(self) -> GrammarStart | None:
        """What stages have to know of its constraint before its next row; None if it has none, or they know."""
        constraint = self.submit.constraint
        if constraint is None or self.on_stages.grammar:
            return None
        self.on_stages.grammar = True
        return GrammarStart(constraint, self.packed(self.prompt_tokens, self.length))

    def image_inputs(self, end: int) -> tuple[ImageInput, ...]:
        """What stages have to know of its images before its next row, which ends before this position; () if that
        computes none of their tokens, or they know."""
        if not self.images or self.on_stages.images:
            return ()
        left = tuple(image for image in self.images if image.end > self.planned)
        self.on_stages.images = bool(left) and left[0].start < end
        return left if self.on_stages.images else ()

    def token_history(self) -> TokenHistory | None:
        """What the stage that samples has to know of its tokens before the next one; None if that needs none, or knows.
        All tokens before the first one that is sampled under a serial are known here."""
        if not self.penalizes or self.on_stages.history:
            return None
        self.on_stages.history = True
        prompt = self.packed(0, self.prompt_tokens) if self.submit.sampling.repetition_penalty != 1.0 else b""
        return TokenHistory(prompt, self.packed(self.prompt_tokens, self.length))

    def draft_wanted(self, end: int) -> DraftTerms:
        """The draft data that is wanted of a row that ends before this position, by the client or by the peer."""
        if end != self.prompt_tokens or self.generated:
            return NO_DRAFT
        sampling = self.submit.sampling
        peer = self.outgoing.draft if self.outgoing is not None else NO_DRAFT
        return DraftTerms(peer.hidden or sampling.hidden_states is not None, max(peer.top_k, sampling.draft_top_k))

    def peer_draft(self) -> Draft | None:
        """What there is of the draft data that the peer asks for; None for nothing."""
        return None if self.outgoing is None else self.result.draft(self.outgoing.draft)

    def hidden_wanted(self, end: int, count: int) -> int:
        """The last positions of a row of count tokens whose hidden states are wanted. end: the one after it."""
        if self.submit.sampling.hidden_states == "all":
            return int(end >= self.target) if self.generated else count
        return int(self.draft_wanted(end).hidden)

    def token_at(self, position: int) -> int:
        """The token id at a known position."""
        return unpack(self.packed(position, position + 1))[0]

    def forget_first_token(self) -> None:
        """Its prompt is going to be computed again. result.first keeps the token, which the client knows."""
        del self.tokens[self.prompt_tokens * ITEM_BYTES :]

    def append(self, token: int) -> FinishReason | None:
        """Add a generated token; return why the request ends with it, None if it does not."""
        self.tokens += pack((token,))
        sampling = self.submit.sampling
        early = self.generated < sampling.min_tokens
        # The sampler takes a stop token before min_tokens only where a grammar has come to its end.
        if token in sampling.stop_token_ids and (not early or sampling.grammar):
            return "stop"
        return "length" if self.length >= self.token_limit else None

    def enter(self, phase: Phase, now: float) -> float:
        """Change the phase; return the seconds spent in the one before."""
        elapsed = now - self.since
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + elapsed
        if self.span_log is not None:
            self.span_log.phase(self.phase.value, self.since, now)
        self.phase = phase
        self.since = now
        return elapsed

    def time_in(self, phase: Phase, now: float) -> float:
        """Seconds that it has spent in a phase, in which it may be."""
        return self.spent.get(phase, 0.0) + (now - self.since if self.phase is phase else 0.0)

    def progress(self, phase: str, done: int) -> Progress:
        """What its client is told that has asked for progress."""
        bound_s = None if self.promised is None else self.promised.bound_s
        return Progress(rid=self.rid, phase=phase, done=done, total=self.prompt_tokens, ttft_bound_s=bound_s)

    def promise(self) -> Promise | None:
        """The promise of its time to first token, and what became of it."""
        if self.promised is None or self.promised.ttft_s is None:
            return None
        return Promise(self.promised.bound_s, self.promised.ttft_s, not self.promised.broken)

    def timing(self) -> Timing:
        """Seconds by phase, of the phases that were left."""
        return timing(self.spent)

    def usage(self) -> Usage:
        """Token counts for the front end."""
        resumed = self.resumed if self.resumed <= self.cached_tokens else 0  # computed for it, and found nowhere
        return Usage(self.prompt_tokens, self.generated, self.cached_tokens - resumed, self.from_tiers)

    def handoff(self, page_size: int) -> HandoffStats:
        """What was sent to the peer or fetched from the prefill server. page_size: tokens of a page here."""
        if self.outgoing is not None and self.outgoing.chunks:
            pages = pages_spanned(self.outgoing.cached_tokens, self.outgoing.sent, page_size)
            return HandoffStats(pages, self.outgoing.bytes, self.outgoing.chunks)
        if self.incoming is not None and self.incoming.chunks:
            return self.fetched.plus(HandoffStats(self.incoming.pages, self.incoming.bytes, self.incoming.chunks))
        return self.fetched

    def found(self, lease: Lease, page_size: int) -> None:
        """Its prompt is in the prefix cache, and this lease keeps it: nothing is left to compute."""
        self.lease = lease
        self.computed = self.cached_tokens = self.target
        self.from_tiers = lease.from_tiers(page_size)
        self.result.first = self.make_first_token(0, None, PREFIX)

    def make_first_token(self, token: int, logprob: TokenLogprob | None, reason: str) -> FirstToken:
        """What the metadata row says of this first token."""
        moved = self.next_position if self.next_position != self.prompt_tokens else 0
        return FirstToken(
            token,
            self.prompt_tokens,
            self.cached_tokens,
            logprob,
            reason,
            from_tiers=self.from_tiers,
            next_position=moved,
        )
