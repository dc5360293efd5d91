"""What the parts of the scheduler share: the books. Each part owns the rules for some of the moves between them."""

from collections import OrderedDict
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.stats import Counters, Histograms
from headrace.core.types.backends import ZMQ, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.core.types.request import FetchFrom
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.lease import KvCache
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.state.bubbles import Bubbles
from headrace.scheduler.state.chunking import Cost
from headrace.scheduler.state.deadlines import Deadlines, Timer
from headrace.scheduler.state.events import Effects
from headrace.scheduler.state.metrics import QUEUES
from headrace.scheduler.state.policy import make_policy
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.tickets import TicketTable
from headrace.scheduler.state.trace_log import TraceLog

RATE_SMOOTHING = 0.2  # weight of the newest plan in the throughput estimate


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A decode peer that was welcomed. geometry: of its first stage; geometries: of all. backend: how KV goes there;
    memory: its stages' pools, where that writes into them. requests: live ones that leave to it, by arrival."""

    name: str
    geometry: Geometry
    window_bytes: int
    last_ack: float
    geometries: tuple[Geometry, ...] = ()
    backend: str = ZMQ
    memory: tuple[PoolMemory, ...] = ()
    requests: dict[int, Request] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """A prefill server we dial. session is None while it is down. backend: how KV comes. requests: live ones that come
    from it."""

    name: str
    session: str | None = None
    endpoints: tuple[str, ...] = ()
    geometries: tuple[Geometry, ...] = ()
    window_bytes: int = 0
    backend: str = ZMQ
    server_key: str = ""
    requests: dict[int, Request] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PlannedRow:
    """What a plan does for one request: positions [start, end) computed, and perhaps the next token sampled."""

    request: Request
    serial: int
    end: int
    sampled: bool


@dataclass(slots=True, eq=False)
class Plan:
    """A Forward in flight. reported: stages that have computed it. sends: chunks that stages reach once it is done."""

    seq: int
    tokens: int
    rows: tuple[PlannedRow, ...]
    reported: set[int] = field(default_factory=set)
    sends: list[tuple[Request, int]] = field(default_factory=list)


class PlanRate:
    """Tokens per second, smoothed over recent plans."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens <= 0 or seconds <= 0:
            return
        newest = tokens / seconds
        self._rate = newest if self._rate is None else self._rate + RATE_SMOOTHING * (newest - self._rate)

    def seconds_for(self, tokens: int) -> float:
        """How long so many tokens will take; one second while nothing is known."""
        return 1.0 if self._rate is None else tokens / self._rate


class State:
    """The books of one scheduler.

    records: every request until its pages are back, by the serial that stages know; arrivals: the same by their
    arrival number, which deadlines and queues use; rids: the live ones by name.
    The queues, by arrival number: awaiting_row (held, computing or computed; its peer has come, and there was no metadata
    row), waiting (WAITING), prefilling (RUNNING, not wholly planned), decoding (may get decode rows, least recently
    planned first). Whoever is in none of them waits for somebody else, under a deadline. preempting: requests on their
    way back to waiting. unplanned: prompt tokens admitted and not yet planned. awaiting_peer, held_pages: requests to be
    held for a peer that has not come, and the pages they take at most. ready: every stage is up. costs: what computing
    takes each stage; empty when chunks are to have one length. journal: of the prefix cache, when somebody wants to
    know.
    trace_log: what a recording notes, while there is one. revoking: sessions that have ended while their prefill server
    might write into our pages, with the stages that have not ruled that out yet.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.out = Effects()
        self.deadlines = Deadlines()
        self.counters = Counters()
        self.histograms = Histograms()
        self.bubbles = Bubbles(config.stages, self.counters)
        self.trace_log: TraceLog | None = None
        self.rate = PlanRate()
        self.ready = False
        self.costs: tuple[Cost, ...] = ()
        self.draining = False
        self.vocab_size = config.vocab_size
        self.journal = CacheEventLog(config.page_size) if config.kv_events else None
        self.cache = self._empty_cache(config.kv_pages)
        self.metadata_rows = PageAllocator(config.metadata_rows)
        self.records: dict[int, Request] = {}
        self.arrivals: dict[int, Request] = {}
        self.rids: dict[str, Request] = {}
        self.awaiting_row: dict[int, Request] = {}
        self.waiting = make_policy(config.policy)
        self.prefilling: dict[int, Request] = {}
        self.decoding: OrderedDict[int, Request] = OrderedDict()
        self.plans: dict[int, Plan] = {}
        self.tickets = TicketTable(config.max_queued_requests)
        self.peers: dict[str, DecodePeer] = {}
        self.prefills: dict[str, PrefillPeer] = {}
        self.fetches: dict[tuple[str, str, int], Request] = {}
        self.revoking: dict[str, set[int]] = {}
        self.preempting = 0
        self.unplanned = 0
        self.awaiting_peer: dict[int, Request] = {}
        self.held_pages = 0
        self.queue_requests = dict.fromkeys(QUEUES, 0)
        self.queue_tokens = dict.fromkeys(QUEUES, 0)
        self._serials = 0

    @property
    def stages(self) -> range:
        return range(self.config.stages)

    def new_serial(self) -> int:
        self._serials += 1
        return self._serials

    def new_cache(self, pages: int) -> None:
        """Start over with an empty pool: the one before is gone with its engine."""
        self.cache = self._empty_cache(pages)
        if self.journal is not None:
            self.journal.cleared()

    def _empty_cache(self, pages: int) -> KvCache:
        return KvCache(pages, self.config.page_size, self.config.prefix_cache, self.journal)

    def count(self, request: Request) -> None:
        """Count a new request in its phase."""
        self.queue_requests[request.phase] += 1
        self.queue_tokens[request.phase] += request.prompt_tokens

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """Move a request to another phase, and keep the counts and durations."""
        left, since = request.phase, request.since
        self.queue_requests[left] -= 1
        self.queue_tokens[left] -= request.prompt_tokens
        self.histograms.observe("phase_duration_seconds", request.enter(phase, now), (left.value,))
        if not request.ended:
            self.count(request)
        if self.trace_log is not None:
            self.trace_log.phase(request, left, since, now, self.peer_of(request))

    def peer_of(self, request: Request) -> str:
        """What the server is called that the request's KV goes to or comes from; "" where there is none (yet)."""
        if request.outgoing is None:
            return request.route.prefill if isinstance(request.route, FetchFrom) else ""
        peer = self.peers.get(request.outgoing.session)
        return "" if peer is None else peer.name

    @property
    def max_held_pages(self) -> int:
        """Pages that requests may take while they are held for a peer that has not come."""
        return self.cache.total * self.config.hold_percent // 100

    def hold(self, request: Request) -> None:
        """Count a request as one to be held for a peer that has not come."""
        self.awaiting_peer[request.arrival] = request
        self.held_pages += self.cache.pages_for(request.prompt_tokens)

    def unhold(self, request: Request) -> None:
        """A peer has come for it, or it has ended."""
        if self.awaiting_peer.pop(request.arrival, None) is not None:
            self.held_pages -= self.cache.pages_for(request.prompt_tokens)
        self.deadlines.clear(Timer.LEASE, request.arrival)

    def drop(self, reason: str) -> None:
        """Count a message that came too late, twice, or for nobody."""
        self.counters.add("dropped_messages_total", labels=(reason,))
