"""Bubbles against a model that looks at every moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.stage_events import PlanDone, StageFailed
from headrace.core.stats import Counters
from headrace.core.types.requests.request import Discard
from headrace.scheduler.telemetry.bubbles import Bubbles
from tests.scheduler.bench import Bench

TICK = 0.25  # exact in binary, as all sums of it are


class Schedule:
    """Plans through a pipeline, in ticks: when each is ordered, and when each stage computes it."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.ordered: list[int] = []
        self.computed: list[list[tuple[int, int]]] = []  # by plan and stage: [start, end)

    def add(self, ordered: int, takes: list[int], delays: list[int]) -> None:
        """takes: ticks on each stage; delays: of the hidden states on the way there."""
        at = ordered
        steps = []
        for stage, (take, delay) in enumerate(zip(takes, delays, strict=True)):
            before = self.computed[-1][stage][1] if self.computed else 0
            start = max(at + delay, before)
            at = start + take
            steps.append((start, at))
        self.ordered.append(ordered)
        self.computed.append(steps)

    def in_flight(self, tick: int) -> bool:
        plans = zip(self.ordered, self.computed, strict=True)
        return any(ordered <= tick < steps[-1][1] for ordered, steps in plans)

    def bubble(self, stage: int) -> float:
        """The twin: ticks with a plan in flight in which this stage computes none."""
        ends = max(steps[-1][1] for steps in self.computed)
        computing = {tick for steps in self.computed for tick in range(*steps[stage])}
        return TICK * sum(self.in_flight(tick) and tick not in computing for tick in range(ends))

    def play(self, bubbles: Bubbles) -> None:
        """Tell what happens, in the order in which it does; at the same tick, orders come after reports."""
        events: list[tuple[int, int, int, int]] = []
        for plan, (ordered, steps) in enumerate(zip(self.ordered, self.computed, strict=True)):
            events.append((ordered, 1, plan, -1))
            events += [(end, 0, plan, stage) for stage, (_, end) in enumerate(steps)]
        flying = 0
        for tick, _, plan, stage in sorted(events):
            now = TICK * tick
            if stage < 0:
                if not flying:
                    bubbles.begin(now)
                flying += 1
                continue
            start, end = self.computed[plan][stage]
            bubbles.computed(stage, TICK * (end - start), now)
            if stage == self.stages - 1:
                flying -= 1
                if not flying:
                    bubbles.end(now)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 4))
    made = Schedule(stages)
    ordered = 0
    for _ in range(draw(st.integers(1, 8))):
        ordered += draw(st.integers(0, 12))
        takes = [draw(st.integers(1, 6)) for _ in range(stages)]
        delays = [draw(st.integers(0, 3)) for _ in range(stages)]
        made.add(ordered, takes, delays)
    return made


@given(schedules())
def test_a_bubble_is_time_with_a_plan_in_flight_and_none_computed_by_the_stage(schedule: Schedule) -> None:
    counters = Counters()
    schedule.play(Bubbles(range(schedule.stages), counters))
    for stage in range(schedule.stages):
        assert counters.value("stage_bubble_seconds_total", (str(stage),)) == schedule.bubble(stage)
    ends = max(steps[-1][1] for steps in schedule.computed)
    assert counters.value("pipeline_active_seconds_total") == TICK * sum(map(schedule.in_flight, range(ends)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_counters_never_fall_whatever_a_stage_claims(reports: list[tuple[int, int]]) -> None:
    """Reports are late by what messages take: one may claim more time than has passed since the one before it."""
    counters = Counters()
    bubbles = Bubbles(range(1), counters)
    bubbles.begin(0.0)
    now = claimed = bubble = 0.0
    for passed, took in reports:
        now += TICK * passed
        claimed += TICK * took
        bubbles.computed(0, TICK * took, now)
        before, bubble = bubble, counters.value("stage_bubble_seconds_total", ("0",))
        assert bubble >= max(before, now - claimed)
    bubbles.end(now + 100)
    assert counters.value("stage_bubble_seconds_total", ("0",)) == max(bubble, now + 100 - claimed)


def test_the_scheduler_counts_bubbles() -> None:
    bench = Bench(stages=2)
    bench.wait(5)
    bench.submit("a", 16, route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.wait(1.0)
    bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.75))
    bench.wait(1.0)
    bench.done(forward, 1, seconds=0.5)
    bench.wait(10)
    assert bench.metric("pipeline_active_seconds_total") == pytest.approx(2.0)
    assert bench.metric("stage_bubble_seconds_total", "0") == pytest.approx(1.25)
    assert bench.metric("stage_bubble_seconds_total", "1") == pytest.approx(1.5)


def test_a_pipeline_that_has_failed_is_not_in_flight() -> None:
    bench = Bench()
    bench.submit("a", 16, route=Discard())
    bench.plan()
    bench.wait(1.0)
    bench.do(StageFailed(stage=0, message=""))
    bench.wait(50)
    bench.up()
    bench.submit("b", 16, route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.wait(1.0)
    bench.done(forward, 1, seconds=0.25)
    assert bench.metric("pipeline_active_seconds_total") == pytest.approx(1.0)
    assert bench.metric("stage_bubble_seconds_total", "0") == pytest.approx(0.75)
