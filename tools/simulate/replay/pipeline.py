"""Stages without a model, in virtual time: every forward pass takes what the cost model says.

    Forward ─► stage 0 ├─ f ─┤─► stage 1 ├─ f ─┤─► PlanDone        a stage computes one pass at a time, in order
    SendChunk          the peers fetch it when it is computed, at once or at a set rate ─► ChunkAcked
    StorePages, LoadPages   the host tier copies them (host_tier.py)

A pass's times follow when it is ordered, as nothing that is ordered later can delay it.
"""

from collections.abc import Callable, Sequence

from headrace.core.messages.orders import CancelSend, Forward, LoadPages, Order, SendChunk, StorePages
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    ChunkAcked,
    PlanDone,
    SampledToken,
    SendCancelled,
    StageReady,
)
from headrace.core.types.kv.geometry import Geometry
from headrace.scheduler.costs.chunking import Cost
from headrace.testing.world import World
from headrace.tools.simulate.replay.costs import pass_seconds
from headrace.tools.simulate.replay.host_tier import TimedHostTier
from headrace.tools.simulate.replay.workload import VOCABULARY

TOKEN = 0  # what every request samples


class TimedPipeline:
    """The stages of one replica, and the link over which decode peers fetch."""

    def __init__(
        self,
        world: World,
        costs: Sequence[Cost],
        fetch_tokens_s: float | None,
        host: TimedHostTier,
        report: Callable[[AnyStageEvent], None],
    ) -> None:
        """costs: of each stage. fetch_tokens_s: tokens a second whose KV leaves each stage; None: at once. report:
        takes the stages' events."""
        self._world = world
        self._costs = costs
        self._fetch_tokens_s = fetch_tokens_s
        self._host = host
        self._report = report
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
        for stage, cost in enumerate(self._costs):
            seconds = pass_seconds(cost, order.rows)
            at = self._free_at[stage] = max(at, self._free_at[stage]) + seconds
            self.busy_s[stage] += seconds
            samples = tuple(SampledToken(row.request, TOKEN) for row in order.rows if row.sample is not None)
            event = PlanDone(
                stage=stage, seq=order.seq, duration_s=seconds, samples=samples if stage == last else ()
            )  # fmt: skip
            self._world.at(at, lambda event=event: self._computed(event))  # type: ignore[misc]
        self._done_at[order.seq] = at

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
