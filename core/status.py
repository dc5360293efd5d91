"""What the scheduler says of itself for GET /status: requests, queue bounds, KV pages, peers, recent plans of stages.

All times are seconds, or milliseconds where a name ends in _ms, before the moment of the reply: the scheduler's clock
leaves out pauses, and no other process shares it.
"""

import msgspec


class PhaseLoad(msgspec.Struct, frozen=True):
    """The requests of one phase."""

    phase: str
    requests: int
    tokens: int
    """Prompt tokens of theirs."""


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended."""

    rid: str
    phase: str
    age_s: float
    """Since its admission."""
    phase_s: float
    """Since it entered its phase."""
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens whose KV is here."""
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    transfer_bytes: int
    """Payload that was acknowledged by its decode server, or that has arrived from its prefill server."""
    held: bool
    """Its KV is held for a peer that has not reserved it."""
    peer: str
    """Where its KV goes to or comes from; "" where there is none yet."""


class QueueBound(msgspec.Struct, frozen=True):
    """What is queued, and the limit above which requests are refused."""

    name: str
    """requests, tokens or seconds"""
    queued: float
    limit: float
    """0: there is none."""


class TierPages(msgspec.Struct, frozen=True):
    """Pages of a tier of the prefix cache behind the pool."""

    tier: str
    used: int
    total: int


class KvPages(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages by state, of all replicas. total = free + cached + leased."""

    total: int
    free: int
    cached: int
    leased: int
    held: int
    """Leased pages for prompts that are computed before a peer reserves them."""
    quarantined: int
    """Leased pages that a prefill server may still write into though their request has ended."""
    tiers: tuple[TierPages, ...] = ()


class PlanSpan(msgspec.Struct, frozen=True, array_like=True):
    """One plan on a stage, or several short ones, and the gaps between them."""

    begun_ms: int
    ended_ms: int
    busy_ms: int
    """Computing; less than ended - begun where there were gaps."""
    plans: int
    tokens: int
    decode_rows: int
    """Rows that generate a token."""


class StageSpans(msgspec.Struct, frozen=True):
    """What a rank has computed in the last seconds."""

    rank: int
    name: str
    spans: tuple[PlanSpan, ...]
    """Oldest first."""


class PeerLink(msgspec.Struct, frozen=True, kw_only=True):
    """A server with which KV is exchanged."""

    name: str
    role: str
    """The role of that server: prefill or decode."""
    up: bool
    backend: str = ""
    """How KV moves; "" while it is down."""
    backend_reason: str = ""
    """Why that backend was chosen, where it is known."""
    requests: int = 0
    """Open requests whose KV goes there or comes from there."""
    joined_s: float | None = None
    """Since its session began; None while there is none."""


class PeerNote(msgspec.Struct, frozen=True):
    """A session of a decode server has begun or ended."""

    ago_s: float
    peer: str
    up: bool
    text: str


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler at one moment."""

    phases: tuple[PhaseLoad, ...] = ()
    requests: tuple[OpenRequest, ...] = ()
    """Those that are not waiting first, then the oldest; at most as many as were asked for."""
    bounds: tuple[QueueBound, ...] = ()
    kv: KvPages | None = None
    stages: tuple[StageSpans, ...] = ()
    """Empty at the first look: recording begins with it."""
    window_s: float = 0.0
    """How far back the stages' spans go at most."""
    plans_in_flight: int = 0
    peers: tuple[PeerLink, ...] = ()
    notes: tuple[PeerNote, ...] = ()
    """Newest first."""
