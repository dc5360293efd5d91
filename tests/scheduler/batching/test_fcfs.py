"""First come, first served, against a plain statement of it: the same effects in random schedules, byte for byte."""

from unittest.mock import patch

import pytest

from headrace.core.messages.orders import Forward
from headrace.scheduler.batching.planner import Planner
from headrace.scheduler.batching.starting import Starter
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.scheduler import Effect
from headrace.scheduler.state.plan_table import BatchBuilder
from headrace.testing.scenario import Scenario, Shape
from headrace.testing.simulator import simulate
from tests.scheduler.schedules import recording


class PlainFcfs(Planner):
    """Head of line, found by looking at every request: running prefills in the order in which they were started, then
    waiting requests by arrival, those whose peer has not come last. The first that does not fit is waited for, and none
    overtakes it."""

    def draft(self, now: float) -> BatchBuilder:
        state, config = self._replica, self._state.config
        self._preemption.make_way(state, now)
        batch = BatchBuilder(config.chunk_tokens, config.max_running)
        self._decode(batch, now)
        running = list(state.queues.prefilling.values())
        for request in [one for one in running if not one.gives_way] + [one for one in running if one.gives_way]:
            if batch.full:
                break
            self._chunk(batch, request)
        self._start(batch, now)
        return batch

    def start(self, now: float) -> None:
        self._start(None, now)

    def _head(self) -> Request | None:
        waiting = [request for request in self._state.requests if request.phase is Phase.WAITING]
        return min(waiting, key=lambda request: (request.gives_way, request.arrival), default=None)

    def _start(self, batch: BatchBuilder | None, now: float) -> None:
        state = self._state
        starter: Starter = self._starter
        while state.engine.ready and (head := self._head()) is not None:
            to_fetch = head.to_fetch
            full = batch is None or batch.full or self._replica.queues.rows >= state.config.max_running
            if not to_fetch and full:
                return
            if not (self._fetch.start(head, now) if to_fetch else starter._lease(head, now)):
                return
            if not to_fetch and batch is not None:
                self._chunk(batch, head)

    def __init__(self, state, replica, generation, handoff, fetch, *others) -> None:  # type: ignore[no-untyped-def]
        super().__init__(state, replica, generation, handoff, fetch, *others)
        self._fetch = fetch


def effects(scenario: Scenario) -> list[Effect]:
    """All that the servers decide in a run, in order."""
    with recording() as seen:
        report = simulate(scenario)
    assert report.violations == []
    return seen


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_schedules_are_those_of_the_plain_statement(shape: Shape) -> None:
    shared = 0
    for seed in range(70_000, 70_030):
        scenario = Scenario(seed=seed, shape=shape, requests=9, arrivals_s=0.004, policy="fcfs")
        found = effects(scenario)
        with patch("headrace.scheduler.scheduler.Planner", PlainFcfs):
            assert found == effects(scenario), seed
        shared += sum(isinstance(effect, Forward) and len(effect.rows) > 1 for effect in found)
    assert shared > 30, "few plans had several requests to put in order"
