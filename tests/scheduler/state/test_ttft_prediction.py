"""Predicted times to first token: against a queue computed in steps, and real Schedulers in virtual time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state.ttft_prediction import RHO_LIMIT, Pace, wait_and_work_s
from tests.scheduler.bench import config, geometry

CHUNK = 64
COST: Cost = (1e-8, 1e-4, 1e-3)
STEP_S = 1e-3


def stepped(ahead: float, behind: float, work: float, reserve: float, rho: float) -> float:
    """The same queue in small steps: arrivals at rate rho go ahead, the reserve goes behind while there is work."""
    now = 0.0
    while work > 1e-9:
        now += STEP_S
        ahead += rho * STEP_S
        kept = min(behind, reserve * STEP_S)
        behind -= kept
        rest = STEP_S - kept
        used = min(ahead, rest)
        ahead -= used
        work -= min(work, rest - used)
        assert now < 1000
    return now


@settings(deadline=None)
@given(
    ahead=st.floats(0, 5),
    behind=st.floats(0, 5),
    work=st.floats(0.1, 2),
    reserve=st.sampled_from([0.0, 0.1, 0.25]),
    rho=st.floats(0, 0.6),
)
def test_waits_are_those_of_a_queue_computed_in_steps(
    ahead: float, behind: float, work: float, reserve: float, rho: float
) -> None:
    """Of the request's own work the reserve of what is behind is not taken off, nor what it gets as the oldest."""
    found = wait_and_work_s(
        ahead_s=ahead, behind_s=behind, work_s=work, reserve=reserve, shares=[Pace(float("inf"), rho)]
    )
    exact = stepped(ahead, behind, work, reserve, rho)
    wait = stepped(ahead, behind, 1e-6, reserve, rho)
    own = work / (1 - rho)
    bound = (ahead + behind + work) / reserve if reserve else float("inf")
    assert found == pytest.approx(min(wait + own, bound), abs=0.05)
    assert found <= exact + 0.05


def test_less_goes_ahead_of_a_request_the_less_it_has_left() -> None:
    shares = [Pace(1.0, 0.0), Pace(2.0, 0.5), Pace(float("inf"), 0.8)]
    found = wait_and_work_s(ahead_s=0.0, behind_s=0.0, work_s=3.0, reserve=0.0, shares=shares)
    assert found == pytest.approx(1 + 1 / 0.5 + 1 / 0.2)
    assert wait_and_work_s(ahead_s=0.0, behind_s=0.0, work_s=0.5, reserve=0.0, shares=shares) == pytest.approx(0.5)


def test_no_load_makes_a_wait_endless() -> None:
    shares = [Pace(float("inf"), 3.0)]
    found = wait_and_work_s(ahead_s=1.0, behind_s=1.0, work_s=1.0, reserve=0.0, shares=shares)
    assert found == pytest.approx(2 / (1 - RHO_LIMIT)), "what is ahead, and its own"
    found = wait_and_work_s(ahead_s=1.0, behind_s=1.0, work_s=1.0, reserve=0.5, shares=shares)
    assert found == pytest.approx(3 / 0.5), "it is the oldest then"


class Queue:
    """A Scheduler in virtual time. errors: (predicted, actual) of every request, by number."""

    def __init__(self, **changes: object) -> None:
        defaults: dict[str, object] = {
            "chunk_tokens": CHUNK,
            "pipeline_depth": 0,
            "kv_pages": 100_000,
            "max_model_len": 0,
            "prefix_cache": False,
            "max_queued_tokens": 1 << 30,
            "max_running": 1000,
        }
        self.config = config(**(defaults | changes))
        self.scheduler = Scheduler(self.config)
        self.state = self.scheduler._state
        for stage in range(self.config.stages):
            ready = StageReady(
                stage=stage,
                geometry=geometry(),
                fingerprint="f",
                data_port=1,
                kv_pages=100_000,
                vocab_size=1000,
                cost=COST,
            )
            self.scheduler.handle(ready, 0.0)
        self.found: dict[int, tuple[float, float]] = {}

    def run(self, arrivals: list[tuple[float, int, int]]) -> dict[int, tuple[float, float]]:
        """arrivals: time, tokens, priority; one stage, one plan in flight."""
        now, number, predicted, serials = 0.0, 0, dict[str, float](), dict[int, str]()
        running: tuple[float, Forward] | None = None
        while number < len(arrivals) or running or not self.scheduler.idle:
            if number < len(arrivals) and (running is None or arrivals[number][0] <= running[0]):
                now, tokens, priority = arrivals[number]
                rid = str(number)
                submit = Submit(
                    rid=rid,
                    prompt=pack([1] * tokens),
                    sampling=SamplingParams(max_tokens=1),
                    route=Discard(),
                    terms=RequestTerms(priority=priority),
                )
                self.scheduler.handle(submit, now)
                request = self.state.requests.live(rid)
                assert request is not None
                assert request.predicted_ttft_s is not None
                predicted[rid], serials[request.serial] = request.predicted_ttft_s, rid
                number += 1
            else:
                assert running is not None
                now, forward = running
                running = None
                samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
                done = PlanDone(stage=0, seq=forward.seq, duration_s=self.seconds(forward), samples=samples)
                self.scheduler.handle(done, now)
                for sample in samples:
                    rid = serials[sample.request]
                    self.found[int(rid)] = predicted[rid], now - arrivals[int(rid)][0]
            if running is None:
                for effect in self.scheduler.plan(now):
                    if isinstance(effect, Forward):
                        running = now + self.seconds(effect), effect
        return self.found

    def seconds(self, forward: Forward) -> float:
        a, b, c = COST
        rows = forward.rows
        return c + sum(a * (2 * row.start + row.count) * row.count + b * row.count for row in rows)


def test_fcfs_predictions_are_right_to_the_microsecond_for_all_that_come_at_once() -> None:
    """Prompts of whole plans, so that none shares its last one."""
    draw = random.Random(5)
    found = Queue(policy="fcfs").run([(0.0, CHUNK * draw.randrange(1, 20), 0) for _ in range(40)])
    assert len(found) == 40
    assert all(predicted == pytest.approx(actual, abs=5e-6) for predicted, actual in found.values())


def test_a_plan_in_flight_counts_for_what_is_left_of_it() -> None:
    plan_s = COST[0] * CHUNK**2 + COST[1] * CHUNK + COST[2]
    found = Queue(policy="fcfs").run([(0.0, CHUNK, 0), (plan_s / 4, CHUNK, 0)])
    assert found[1][0] == pytest.approx(1.75 * plan_s, abs=5e-6)
    assert found[1][1] == pytest.approx(found[1][0], abs=5e-6)


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_srpt_and_priorities_decide_what_is_ahead(priority: int) -> None:
    """Behind a long prompt of priority 0: a short one passes it, unless its priority is later."""
    long, short = 40 * CHUNK, CHUNK
    found = Queue(policy="srpt", policy_reserve=0.0).run([(0.0, long, 0), (0.0, short, priority)])
    alone, passed = found[0][1] - found[1][1] > 0, priority <= 0
    assert alone == passed
    assert found[1][0] == pytest.approx(found[1][1], rel=0.02)


@pytest.mark.parametrize("policy", ["fcfs", "srpt"])
def test_predictions_hold_under_random_arrivals(policy: str) -> None:
    """At a load of about 0.7, prompts of 20 to 5,000 tokens. The median of the signed error is within a tenth."""
    draw, now, arrivals = random.Random(11), 0.0, []
    for _ in range(500):
        tokens = int(20 * 250 ** draw.random())
        work = COST[0] * tokens**2 + (COST[1] + COST[2] / CHUNK) * tokens
        mean = 0.11 / 0.7  # seconds of an average prompt, over the load
        now += draw.expovariate(1 / mean)
        arrivals.append((now, tokens, 0))
        assert work < 1.5
    found = Queue(policy=policy).run(arrivals)
    errors = sorted((predicted - actual) / actual for predicted, actual in found.values())
    assert len(errors) == len(arrivals)
    assert abs(errors[len(errors) // 2]) < 0.1
    spread = sorted(abs(error) for error in errors)
    assert spread[len(spread) // 2] < 0.15


def test_predictions_are_whole_microseconds_and_cost_no_walk_over_the_queue() -> None:
    queue = Queue(policy="srpt")
    for number in range(800):
        prompt = pack([1] * (10 + number % 977))
        queue.scheduler.handle(Submit(rid=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=1)), 0.0)
    request = queue.state.requests.live("799")
    assert request is not None
    assert request.predicted_ttft_s is not None
    assert request.predicted_ttft_s == round(request.predicted_ttft_s, 6)
    assert len(queue.state.replicas[0].queues.policy) == 800
    assert sum(len(buckets) for buckets in queue.state.replicas[0].queues.backlog._buckets.values()) < 80
