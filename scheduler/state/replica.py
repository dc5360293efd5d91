"""One data-parallel replica: its KV pool, its queues, and the plans that its ranks compute; and how requests are bound.

State ── requests, tickets, peers, metadata rows      of the server
  ├── replica 0 ── cache, queues, plans, costs …      of one KV pool
  └── replica 1 ── cache, queues, plans, costs …

Each request is bound to the replica whose load with it is least (bind()):

    load with it = what is bound there and not planned + the prompt less what that replica's prefix cache has of it

So a prompt follows its prefix until the replica that has it is busier by more than the prefix saves. Longest prefix
first, without the load, would send prompts that share a system prompt to one replica alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.config import SchedulerConfig
from headrace.core.messages.orders import AnyOrder, ReplicaOrder
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.images import ImageInput
from headrace.scheduler.costs.backlog import rank_of
from headrace.scheduler.costs.cost_model import CostModel, Load
from headrace.scheduler.costs.decoding_load import DecodingLoad
from headrace.scheduler.costs.short_passes import PiecePasses
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.copy_table import CopyTable
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.node import PageLoad, in_use
from headrace.scheduler.policies.policy import make_policy
from headrace.scheduler.queues.held_pages import HeldPages
from headrace.scheduler.queues.queues import QueuedShares, Queues
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.events import Effects
from headrace.scheduler.state.plan_table import PlanTable
from headrace.scheduler.state.ttft_prediction import Prediction, TtftPredictor
from headrace.scheduler.telemetry.bubbles import Bubbles
from headrace.scheduler.telemetry.measurements import Measurements

RUNNING = (Phase.RUNNING, Phase.FETCHING, Phase.GENERATING)


class Replica:
    """What belongs to one KV pool. Raises ConfigError for an unknown policy."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: int,
        out: Effects,
        metrics: Measurements,
        awaiting_row: dict[int, Request],
        tenants: QueuedShares,
    ) -> None:
        """out: takes its orders. awaiting_row: requests of all replicas that need a metadata row, see Queues. tenants:
        what tenants have queued at all replicas."""
        layout = config.layout
        self.index = index
        self._out = out
        self._alone = config.dp == 1
        self.ranks = layout.replica_ranks(index)
        """Ranks of all its stages, in ascending order."""

        self.first_stage = layout.rank(0, index)
        """The rank that computes a plan first."""

        self.sampler = layout.sampler(index)
        """The rank whose report ends a plan."""

        self.costs = CostModel(config.stages, config.chunk_tokens)
        """Predicts what computing takes."""

        self.cache_events = CacheEventLog(config.page_size) if config.kv_events else None
        """What the prefix cache gains and loses, where routers follow it."""

        self.cache = KvCache(
            config.kv_pages,
            config.page_size,
            config.prefix_cache,
            self.cache_events,
            config.eviction,
            disk_turn=config.disk_admission_turn,
            retain_percent=config.retain_percent,
        )
        self.copies = CopyTable(config, self.ranks)
        self.queues = Queues(
            make_policy(config),
            make_policy(config),
            make_policy(config),
            self.costs,
            self.cache,
            rank_of(config.policy),
            awaiting_row,
            tenants,
        )
        self.plans = PlanTable(self.first_stage)
        self.predictor = TtftPredictor(config, self.costs, self.queues.backlog, self.queues.policy, self.plans)
        self.decoding = DecodingLoad()
        """The requests that decode, now and on average."""

        self.piece_passes = PiecePasses(config)
        """How long passes with pieces of open prompts are."""

        self.held = HeldPages(self.cache, config.hold_percent)
        self.moves: dict[int, Request] = {}
        """Requests that only move KV from or to the prefix cache, by arrival number, until their pages are given back.
        They end when another request needs pages."""

        self.bubbles = Bubbles(self.ranks, metrics.counters)

    def order(self, order: AnyOrder) -> None:
        """Order something of its ranks."""
        self._out.add(order if self._alone else ReplicaOrder(seq=order.seq, replica=self.index, order=order))

    @property
    def running(self) -> int:
        """Requests that have pages and have not ended."""
        return sum(self.queues.requests[phase] for phase in RUNNING)

    def delayed(self, prediction: Prediction, work_s: float, now: float) -> float:
        """Requests whose next token comes later by so many seconds of work on a prompt: other prompts, and those that
        decode meanwhile."""
        return prediction.delayed + self.decoding.delayed(work_s, now)

    @property
    def loads_for_none(self) -> bool:
        """Pages are being loaded that no request uses any more: they can be evicted as soon as they are."""
        loads = (pending.copy for pending in self.copies.pending())
        return any(isinstance(load, PageLoad) and not in_use(load.nodes[-1]) for load in loads)

    def pages_lacking(self, request: Request) -> int:
        """Pages neither free nor cached, of those that a request needs beside its prompt's cached ones, as it was
        last looked up; 0 or less for none."""
        cache = self.cache
        needed = cache.pages_for(request.target) - request.queued.expected_cached // cache.page_size
        return needed - cache.free - cache.cached

    def load_with(self, load: Load, seconds: bool) -> float:
        """What is left to compute with this load added: predicted seconds, or tokens."""
        found = self.queues.load.plus(load)
        return self.costs.load_s(found) if seconds else found.tokens

    def kept_with(self, tokens: int) -> int:
        """Positions that are in use or waited for, with so many more."""
        return self.queues.unplanned + self.cache.leased * self.cache.page_size + tokens


class Binding(NamedTuple):
    """Where a request goes."""

    replica: int
    cached: int | None
    """Positions that the replica's prefix cache has of the prompt; None: they were not looked up."""


def bind(
    replicas: Sequence[Replica],
    tokens: bytes | bytearray,
    salt: str,
    images: Sequence[ImageInput] = (),
    *,
    pinned: int | None = None,
    cacheable: int | None = None,
    to_fetch: bool = False,
    open_prompt: bool = False,
) -> Binding:
    """The replica with the least load; of equal ones that with fewer running requests, then the lower number. A piece
    of an open prompt goes where most of it is cached.

    Loads are seconds once every replica's cost model predicts them, tokens before. Those of requests whose KV is
    fetched are the positions that the pool keeps: they are not computed.

    tokens: packed. pinned: the replica that the client asks for. cacheable: positions that cached pages may
    serve; None: all.
    """
    if len(replicas) == 1 or pinned is not None:
        return Binding(pinned or 0, None)
    length = packed_length(tokens)
    seconds = all(replica.costs.trusted for replica in replicas)
    cached = [replica.cache.cached_positions(tokens, salt, images, cacheable) for replica in replicas]

    def cost(replica: Replica) -> tuple[float, int, int]:
        found = cached[replica.index]
        if open_prompt:
            return -found, len(replica.queues.open), replica.index
        kept = replica.kept_with(length - found)
        load = kept if to_fetch else replica.load_with(Load.between(found, length), seconds)
        return load, replica.running, replica.index

    best = min(replicas, key=cost).index
    return Binding(best, cached[best])
