"""Stages without a model, in virtual time: every forward pass takes what the cost model says.

    Forward ─► stage 0 ├─ f ─┤─► stage 1 ├─ f ─┤─► PlanDone        a stage computes one pass at a time, in order
    SendChunk          the peers fetch it when it is computed, at once or at a set rate ─► ChunkAcked
    StorePages   when the passes ordered before it are computed, and the stores before it are done ─► PagesStored
    LoadPages    when the loads before it are done ─────────────────────────────────────────────────► PagesLoaded

A pass's times follow when it is ordered, as nothing that is ordered later can delay it.
"""

from collections.abc import Callable, Sequence

from headrace.core.messages.orders import CancelSend, Forward, LoadPages, Order, PlanRow, SendChunk, StorePages
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    ChunkAcked,
    PagesLoaded,
    PagesStored,
    PlanDone,
    SampledToken,
    SendCancelled,
    StageReady,
)
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES
from headrace.scheduler.costs.chunking import Cost
from headrace.testing.world import World
from headrace.tools.simulate.replay.costs import pass_seconds
from headrace.tools.simulate.replay.workload import VOCABULARY

TOKEN = 0  # what requests sample whose answer is not known


class TimedHostTier:
    """The host tiers of all stages of a replica, without memory, which copy at the same time: copies take what a rate
    says, in both directions at once."""

    def __init__(
        self, world: World, stages: int, page_size: int, tokens_s: float | None, report: Callable[[AnyStageEvent], None]
    ) -> None:
        """tokens_s: tokens a second whose KV is copied in each direction; None: at once. report: takes the stages'
        events."""
        self._world = world
        self._stages = range(stages)
        self._token_s = 0.0 if tokens_s is None else 1 / tokens_s
        self._page_size = page_size
        self._report = report
        self._stored_at = 0.0
        self._loaded_at = 0.0

    def store(self, order: StorePages, computed_at: float) -> None:
        """Copy pages out of the pool. computed_at: when the passes ordered before are computed."""
        self._stored_at = max(self._world.now, computed_at, self._stored_at) + self._seconds(order.slots)
        self._answer(self._stored_at, [PagesStored(stage=stage, seq=order.seq) for stage in self._stages])

    def load(self, order: LoadPages) -> None:
        """Copy pages into the pool."""
        self._loaded_at = max(self._world.now, self._loaded_at) + self._seconds(order.slots)
        self._answer(self._loaded_at, [PagesLoaded(stage=stage, seq=order.seq) for stage in self._stages])

    def _seconds(self, slots: bytes) -> float:
        return len(slots) // ITEM_BYTES * self._page_size * self._token_s

    def _answer(self, at: float, events: list[AnyStageEvent]) -> None:
        for event in events:
            self._world.at(at, lambda event=event: self._report(event))  # type: ignore[misc]


class TimedPipeline:
    """The stages of one replica, and the link over which decode peers fetch."""

    def __init__(
        self,
        world: World,
        costs: Sequence[Cost],
        fetch_tokens_s: float | None,
        host: TimedHostTier,
        report: Callable[[AnyStageEvent], None],
        read_s: float = 0.0,
        sampled: Callable[[PlanRow], int] = lambda _row: TOKEN,
    ) -> None:
        """costs: of each stage. fetch_tokens_s: tokens a second whose KV leaves each stage; None: at once. report:
        takes the stages' events. read_s: seconds that all stages add to a pass for each token whose KV is read by a
        request that decodes. sampled: the token that a row samples."""
        self._world = world
        self._costs = costs
        self._fetch_tokens_s = fetch_tokens_s
        self._host = host
        self._report = report
        self._read_s = read_s / len(costs)
        self._sampled = sampled
        self._free_at = [0.0] * len(costs)
        self._link_free_at = 0.0
        self._done_at: dict[int, float] = {}  # by order number, of passes whose end is to come
        self.busy_s = [0.0] * len(costs)
        """Seconds of computing, by stage."""

        self.plans = 0
        """Forward passes ordered."""

    def start(self, pages: int, page_size: int, host_pages: int) -> None:
        """Report every stage as ready."""
        geometry = Geometry("float32", 1, 1, 1, page_size)
        for stage, cost in enumerate(self._costs):
            self._report(
                StageReady(
                    stage=stage,
                    geometry=geometry,
                    fingerprint="modelled",
                    data_port=1,
                    kv_pages=pages,
                    host_pages=host_pages,
                    vocab_size=VOCABULARY,
                    cost=cost,
                )
            )

    def order(self, order: Order) -> None:
        """Act on an order, as all stages do. Orders that take no time are ignored."""
        match order:
            case Forward():
                self._forward(order)
            case SendChunk():
                self._send(order)
            case CancelSend():
                self._world.at(self._world.now, lambda: self._send_cancelled(order))
            case StorePages():
                self._host.store(order, self._free_at[-1])
            case LoadPages():
                self._host.load(order)
            case _:
                pass

    def _forward(self, order: Forward) -> None:
        self.plans += 1
        at, last = self._world.now, len(self._costs) - 1
        read_s = self._read_s * sum(row.start for row in order.rows if row.generated) if self._read_s else 0.0
        for stage, cost in enumerate(self._costs):
            seconds = pass_seconds(cost, order.rows) + read_s
            at = self._free_at[stage] = max(at, self._free_at[stage]) + seconds
            self.busy_s[stage] += seconds
            samples = self._samples(order) if stage == last else ()
            event = PlanDone(stage=stage, seq=order.seq, duration_s=seconds, samples=samples)
            self._world.at(at, lambda event=event: self._computed(event))  # type: ignore[misc]
        self._done_at[order.seq] = at

    def _samples(self, order: Forward) -> tuple[SampledToken, ...]:
        rows = (row for row in order.rows if row.sample is not None)
        return tuple(SampledToken(row.request, self._sampled(row)) for row in rows)

    def _computed(self, event: PlanDone) -> None:
        if event.stage == len(self._costs) - 1:
            del self._done_at[event.seq]
        self._report(event)

    def _send(self, order: SendChunk) -> None:
        """The chunk leaves when it is computed and the chunks before it have left."""
        at = max(self._world.now, self._done_at.get(order.after, 0.0))
        if self._fetch_tokens_s is not None:
            at = self._link_free_at = max(at, self._link_free_at) + order.count / self._fetch_tokens_s
        self._world.at(at, lambda: self._acknowledge(order))

    def _send_cancelled(self, order: CancelSend) -> None:
        for stage in range(len(self._costs)):
            self._report(SendCancelled(stage=stage, request=order.request))

    def _acknowledge(self, order: SendChunk) -> None:
        for stage in range(len(self._costs)):
            self._report(ChunkAcked(stage=stage, request=order.request, chunk=order.chunk, bytes=4 * order.count))
