"""The state of one scheduler: the tables that its parts share. Each table keeps its own counts and checks itself."""

from collections.abc import Sequence

from headrace.core.config import SchedulerConfig
from headrace.core.types.kv_tiers import Tier
from headrace.core.types.request import FetchFrom
from headrace.scheduler.costs.backlog import rank_of
from headrace.scheduler.costs.cost_model import CostModel
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.policies.policy import make_policy
from headrace.scheduler.requests.record import Phase, Request
from headrace.scheduler.requests.request_table import RequestTable
from headrace.scheduler.state.copy_table import CopyTable
from headrace.scheduler.state.deadlines import Deadlines
from headrace.scheduler.state.engine_status import EngineStatus
from headrace.scheduler.state.events import Effects
from headrace.scheduler.state.held_pages import HeldPages
from headrace.scheduler.state.measurements import Measurements
from headrace.scheduler.state.peer_tables import DecodePeerTable, PrefillTable
from headrace.scheduler.state.plan_table import PlanTable
from headrace.scheduler.state.queues import Queues
from headrace.scheduler.state.tickets import TicketTable
from headrace.scheduler.state.ttft_prediction import TtftPredictor


class State:
    """What the scheduler knows, and the effects that it has decided on.

    requests ──► queues: what may be planned next      plans: what is being computed
        │        held: computed before a peer reserves   cache, metadata_rows: what they hold
        │                                                copies: pages on their way between the tiers of the cache
        └──────► tickets, peers, prefills: which server their KV goes to or comes from

    Raises ConfigError for an unknown policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.out = Effects()
        self.deadlines = Deadlines()
        self.metrics = Measurements(len(config.layout.ranks))
        self.engine = EngineStatus(config)
        self.costs = CostModel(config.stages, config.chunk_tokens)
        """Predicts what computing takes."""

        self.draining = False
        """New requests are refused."""

        self.cache_events = CacheEventLog(config.page_size) if config.kv_events else None
        """What the prefix cache gains and loses, where routers follow it."""

        self.cache = KvCache(
            config.kv_pages,
            config.page_size,
            config.prefix_cache,
            self.cache_events,
            config.eviction,
            disk_turn=config.disk_admission_turn,
        )
        self.copies = CopyTable(config)
        self.metadata_rows = PageAllocator(config.metadata_rows)
        self.requests = RequestTable()
        self.queues = Queues(make_policy(config), make_policy(config), self.costs, self.cache, rank_of(config.policy))
        self.plans = PlanTable()
        self.predictor = TtftPredictor(config, self.costs, self.queues.backlog, self.queues.policy, self.plans)
        self.held = HeldPages(self.cache, config.hold_percent)
        self.tickets = TicketTable(config.max_queued_requests)
        self.peers = DecodePeerTable()
        self.prefills = PrefillTable()

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """Move a request to another phase and its queue, and measure the phase that it leaves."""
        left, since = request.phase, request.since
        self.queues.move(request, phase, now)
        self.metrics.phase_left(request, left, since, now, self.peer_of(request))

    def peer_of(self, request: Request) -> str:
        """The name of the server that the request's KV goes to or comes from; "" where there is none (yet)."""
        if request.outgoing is None:
            return request.route.prefill if isinstance(request.route, FetchFrom) else ""
        peer = self.peers.get(request.outgoing.session)
        return "" if peer is None else peer.hello.name

    def loads(self, before: int, tiers: Sequence[Tier]) -> int:
        """How many of the cached pages that follow the first pages of a prompt are to be loaded from their tiers,
        because that is faster than computing them."""
        nearest = next((index for index, tier in enumerate(tiers) if tier != tiers[0]), len(tiers))
        seconds = [self.metrics.rate.seconds_for(count * self.config.page_size) for count in (len(tiers), nearest)]
        return self.copies.worthwhile(tiers, *seconds)

    def drop(self, reason: str) -> None:
        """Count a message that came too late, twice, or for nothing that is known."""
        self.metrics.drop(reason)
