"""The stages of one replica as the twin has them: they go on with what is under way, and take what is predicted.

Passes take the predicted seconds, times what the last passes took beside theirs: a stretch of these errors from a
random place on, so that slow spells stay together. Peers acknowledge after what they took lately. Copies of pages
between tiers take no time, and links have any rate.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import TypeVar

from msgspec.structs import replace

from headrace.core.messages.orders import Forward, Order, PlanRow
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    ChunkAcked,
    PagesLoaded,
    PagesStored,
    PlanDone,
    ReceiveCancelled,
    SendCancelled,
)
from headrace.core.types.requests.request import SamplingParams
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.kv.node import PageLoad
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.plan_table import Plan
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.scheduler.twin.pipeline import TimedHostTier, TimedPipeline
from headrace.scheduler.twin.world import World

E = TypeVar("E")
ANY_SAMPLING = SamplingParams()
NO_STOP_TOKEN = -1  # that is sampled: no client can have named it as one that ends its text


class TwinStages:
    """All ranks of one replica of a copied State."""

    def __init__(self, world: World, state: State, replica: Replica, report: Callable[[AnyStageEvent], None]) -> None:
        """report: takes their events."""
        self._world = world
        self._state = state
        self._replica = replica
        self._report = report
        self._layout = state.config.layout
        self._costs = replica.costs.stage_costs
        self._errors = {decodes: errors_from(self._ratios(decodes), world.random) for decodes in (False, True)}
        self._acks_s = state.promises.recent.handed_over_s
        tiers = TimedHostTier(world, len(self._costs), state.config.page_size, None, self._take)
        self._pipeline = TimedPipeline(
            world,
            self._costs,
            None,
            tiers,
            self._take,
            sampled=lambda _row: NO_STOP_TOKEN,
            vary=lambda order: next(self._errors[any(row.generated for row in order.rows)]),
        )

    def order(self, order: Order) -> None:
        """Act on an order, as all ranks do."""
        self._pipeline.order(order)

    def take_over(self) -> None:
        """Go on with what the ranks are doing as the state is copied."""
        for plan in self._replica.plans:
            self._take_over(plan)
        for pending in self._replica.copies.pending():
            answer = PagesLoaded if isinstance(pending.copy, PageLoad) else PagesStored
            for seq, rank in sorted(pending.waiting):
                self._world.at(self._world.now, _later(self._report, answer(stage=rank, seq=seq)))
        for request in self._state.requests:
            if request.replica == self._replica.index:
                self._answer(request)

    def _take_over(self, plan: Plan) -> None:
        """A pass is at the first stage that has not reported it."""
        stages = [self._layout.place(rank).stage for rank in plan.reported]
        at = min(max(stages, default=-1) + 1, len(self._costs) - 1)
        rows = tuple(
            PlanRow(
                request=row.serial,
                start=row.end,
                count=0,
                pages=b"",
                sample=ANY_SAMPLING if row.sampled else None,
                generated=int(plan.decode_rows > 0),
            )
            for row in plan.rows
        )
        began = self._replica.plans.first_begun if at == 0 else plan.begun
        passed_s = max(0.0, self._world.now - began)
        seconds = [load_seconds(cost, plan.load) for cost in self._costs]
        self._pipeline.take_over(Forward(seq=plan.seq, rows=rows), seconds, at, passed_s)

    def _answer(self, request: Request) -> None:
        """What ranks have still to say of a request: that a transfer has stopped, or that chunks were acknowledged."""
        now, outgoing = self._world.now, request.outgoing
        for rank in sorted(request.on_stages.stopping):
            stopped = SendCancelled if outgoing is not None and outgoing.chunks else ReceiveCancelled
            self._world.at(now, _later(self._report, stopped(stage=rank, request=request.serial)))
        if outgoing is None:
            return
        behind = {(sent.serial, chunk): plan.seq for plan in self._replica.plans for sent, chunk in plan.sends}
        for chunk, ranks in outgoing.unacked.items():
            for rank in sorted(ranks):
                event = ChunkAcked(stage=rank, request=request.serial, chunk=chunk, bytes=0)
                acked = _later(self._acknowledge, event)
                self._pipeline.after(behind.get((request.serial, chunk), 0), acked)

    def _take(self, event: AnyStageEvent) -> None:
        """An event of a stage of the pipeline: each of its ranks reports it, the one that samples last."""
        ranks = self._layout.shards(self._layout.rank(event.stage, self._replica.index))
        for rank in reversed(ranks):
            found = replace(event, stage=rank)
            if isinstance(found, ChunkAcked):
                if rank in self._state.engine.offering:
                    self._acknowledge(found)
            elif isinstance(found, PlanDone) and rank != ranks[0]:
                self._report(replace(found, samples=()))
            else:
                self._report(found)

    def _acknowledge(self, event: ChunkAcked) -> None:
        seconds = self._world.random.choice(self._acks_s) if self._acks_s else 0.0
        self._world.at(self._world.now + seconds, _later(self._report, event))

    def _ratios(self, decodes: bool) -> Sequence[float]:
        costs = self._replica.costs
        return list((costs.decoding_ratios if decodes else costs.ratios) or costs.ratios)


def errors_from(ratios: Sequence[float], drawing: random.Random) -> Iterator[float]:
    """The ratios in their order, again and again, from a random one on; 1 where there are none."""
    if not ratios:
        return cycle((1.0,))
    start = drawing.randrange(len(ratios))
    return cycle(chain(islice(ratios, start, None), islice(ratios, start)))


def load_seconds(cost: Cost, load: Load) -> float:
    """Seconds of one pass with this load on a stage."""
    a, b, c = cost
    return a * load.squares + b * load.tokens + c


def _later(report: Callable[[E], None], event: E) -> Callable[[], None]:
    return lambda: report(event)
