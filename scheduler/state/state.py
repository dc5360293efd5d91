"""The state of one scheduler: the tables that its parts share. Each table keeps its own counts and checks itself."""

from collections.abc import Sequence

from headrace.core.config import SchedulerConfig
from headrace.core.types.kv.kv_tiers import Tier
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.kv.conversations import Conversations
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.peers.peer_tables import DecodePeerTable, PrefillTable
from headrace.scheduler.peers.tickets import TicketTable
from headrace.scheduler.peers.unacknowledged import Unacknowledged
from headrace.scheduler.promises.promises import Promises
from headrace.scheduler.queues.deadlines import Deadlines
from headrace.scheduler.queues.page_digests import PageDigests
from headrace.scheduler.queues.queues import QueuedShares
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.request_table import RequestTable
from headrace.scheduler.state.events import Effects
from headrace.scheduler.state.replica import Replica, bind
from headrace.scheduler.telemetry.measurements import Measurements
from headrace.scheduler.telemetry.metrics import QUEUES, WAIT_TOKENS


class EngineStatus:
    """Whether the stages are up, and what they said of their model."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.stages = config.layout.ranks
        """All ranks: what is said of a stage elsewhere holds for each of them."""

        self.offering: tuple[int, ...] = tuple(self.stages)
        """Ranks that offer KV to peers: of those that have the same KV, one."""

        self.ready = False
        """Every stage has loaded and warmed up, and none has failed since."""

        self.vocab_size = config.vocab_size
        """Token ids are below this; 0 while it is not known."""

        self.cancels = False
        """Every stage ends a pass soon that is cancelled."""

        self.costs: tuple[Cost, ...] = ()
        """What computing takes each stage; empty when all chunks of a prompt have one length."""

        self.silent: dict[int, str] = {}
        """What stages do that are up and do not answer, by rank."""

        self.silent_until: dict[int, float] = {}
        """When a stage was last known not to answer, by rank: what peers say to it is not read then."""

    def start(self, vocab_size: int, costs: tuple[Cost, ...], offering: tuple[int, ...], *, cancels: bool) -> None:
        """Every stage is up."""
        self.offering = offering
        self.cancels = cancels
        self.ready = True
        self.vocab_size = vocab_size
        self.costs = costs

    def stop(self) -> None:
        """A stage has failed, or all were told to end."""
        self.ready = False
        self.silent.clear()
        self.silent_until.clear()


class State:
    """What the scheduler knows, and the effects that it has decided on.

    requests ──► replicas ──► queues: what may be planned next       plans: what is being computed
        │                     held: computed before a peer reserves  cache: the KV pages that they hold
        │                                                            copies: pages on their way between tiers
        └──────► tickets, peers, prefills: which server their KV goes to or comes from; metadata_rows: what they hold

    Raises ConfigError for an unknown policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.out = Effects()
        self.deadlines = Deadlines()
        self.metrics = Measurements()
        self.promises = Promises(config.promise, self.metrics.counters, self.metrics.histograms)
        self.engine = EngineStatus(config)
        self.draining = False
        """New requests are refused."""

        self.metadata_rows = PageAllocator(config.metadata_rows)
        self.requests = RequestTable()
        self.awaiting_row: dict[int, Request] = {}
        """Requests that need a metadata row since a peer has reserved, in the order of the reservations."""

        self.starting_over: dict[int, Request] = {}
        """Requests whose KV was to be fetched again, and which are to begin anew: nothing writes into their pages."""

        self.queued_by_tenant = QueuedShares()
        self.replicas = tuple(
            Replica(config, index, self.out, self.metrics, self.awaiting_row, self.queued_by_tenant)
            for index in range(config.dp)
        )
        self.conversations = Conversations()
        self.digests = PageDigests(config.page_size)
        self.tickets = TicketTable(config.max_queued_requests)
        self.peers = DecodePeerTable()
        self.unacknowledged = Unacknowledged(
            self.peers, config.kv_pages * config.dp, config.metadata_rows, config.page_size
        )
        self.prefills = PrefillTable()

    def enter(self, request: Request, phase: Phase, now: float) -> None:
        """Move a request to another phase and its queue, and measure the phase that it leaves."""
        left, since = request.phase, request.since
        replica = self.of(request)
        replica.queues.move(request, phase, now)
        if Phase.GENERATING in (left, phase):
            replica.decoding.changed(replica.queues.requests[Phase.GENERATING], left is Phase.GENERATING, now)
        self.metrics.phase_left(request, left, since, now, self.peer_of(request))

    def count_unacknowledged(self, request: Request, now: float) -> None:
        """The KV of a request is here, and its peer has reserved. Others of the same owner may have to wait for it."""
        for other in self.unacknowledged.add(request):
            self.enter(other, Phase.BOOTSTRAP, now)

    def of(self, request: Request) -> Replica:
        """The replica that a request is bound to."""
        return self.replicas[request.replica]

    def with_rank(self, rank: int) -> Replica:
        """The replica of a rank."""
        return self.replicas[self.config.layout.place(rank).replica]

    def rebind(self, request: Request) -> None:
        """Bind a request that has no pages anew, as it is about to wait: loads have changed since its admission."""
        if len(self.replicas) == 1:
            return
        self.of(request).queues.withdraw(request)
        request.replica, _ = bind(
            self.replicas,
            request.tokens,
            request.salt,
            request.images,
            pinned=request.terms.replica,
            cacheable=request.cacheable,
            to_fetch=request.to_fetch,
            open_prompt=request.open,
        )
        self.of(request).queues.take_over(request)

    @property
    def unplanned(self) -> int:
        """Tokens of all requests that are in no plan and not being fetched."""
        return sum(replica.queues.unplanned for replica in self.replicas)

    @property
    def unplanned_s(self) -> float:
        """Predicted seconds until the replicas have computed what is left, if they shared it evenly."""
        return sum(replica.costs.load_s(replica.queues.load) for replica in self.replicas) / len(self.replicas)

    @property
    def costs_trusted(self) -> bool:
        """Every replica's cost model predicts seconds, and has been right of late."""
        return all(replica.costs.trusted for replica in self.replicas)

    def waits(self, now: float) -> tuple[tuple[int, float, float], ...]:
        """Prompt tokens; predicted seconds that a prompt of as many, none of them cached, would wait if it came now
        without a priority or an objective, at the replica where it waits least; and how many requests it would delay
        there."""
        found = []
        for tokens in WAIT_TOKENS:
            load, best = Load.between(0, tokens), (float("inf"), 0.0)
            for replica in self.replicas:
                prediction = replica.predictor.predict(0, None, load, 0, now)
                delayed = replica.delayed(prediction, replica.costs.load_s(load), now)
                best = min(best, (max(0.0, prediction.ttft_s - prediction.alone_s), delayed))
            found.append((tokens, round(best[0], 6), round(best[1], 3)))
        return tuple(found)

    @property
    def phases(self) -> dict[Phase, int]:
        """Requests by phase."""
        return {phase: sum(replica.queues.requests[phase] for replica in self.replicas) for phase in QUEUES}

    @property
    def phase_tokens(self) -> dict[Phase, int]:
        """Prompt tokens of the requests in a phase."""
        return {phase: sum(replica.queues.tokens[phase] for replica in self.replicas) for phase in QUEUES}

    @property
    def plans_in_flight(self) -> int:
        """Plans that were ordered and are not done, of all replicas."""
        return sum(len(replica.plans) for replica in self.replicas)

    def may_plan(self, in_flight: int) -> bool:
        """The stages are up, and a pipeline with so many plans in flight has a credit left."""
        return self.engine.ready and in_flight < self.config.credits

    def peer_of(self, request: Request) -> str:
        """The name of the server that the request's KV goes to or comes from; "" where there is none (yet)."""
        return request.route.prefill if isinstance(request.route, FetchFrom) else self.peers.name_of(request)

    def loads(self, replica: Replica, tiers: Sequence[Tier]) -> int:
        """How many of the cached pages that follow the first pages of a prompt are to be loaded from their tiers,
        because that is faster than computing them."""
        size, rate = self.config.page_size, self.metrics.rate
        return replica.copies.worthwhile(tiers, lambda count: rate.seconds_for(count * size))

    def drop(self, reason: str) -> None:
        """Count a message that came too late, twice, or for nothing that is known."""
        self.metrics.counters.add("dropped_messages_total", labels=(reason,))
