"""What every policy guarantees, whatever arrives: no starvation, no idle budget, no livelock, the same plans again."""

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages.orders import Forward
from headrace.core.types.requests.request import Discard
from headrace.scheduler.costs.chunking import Cost
from tests.scheduler.batching.prompt_runs import CHUNK, OVERHEAD, Prompt, run, seconds
from tests.scheduler.bench import Bench

POLICIES = ("fcfs", "srpt", "slo")
LENGTHS = st.integers(1, 600)
OVERTAKING = st.sampled_from(["srpt", "slo"])
RESERVES = st.sampled_from([0.0, 0.1, 1.0])
COSTS = st.sampled_from([OVERHEAD, (0.0, 1e-3, 8e-3), (0.0, 1e-4, 1e-3)])


PROMPTS = st.lists(
    st.builds(
        Prompt,
        st.integers(0, 30),
        LENGTHS,
        st.integers(-1, 1),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([None, 0.01, 1.0]),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=8)
@given(PROMPTS, st.sampled_from([0.05, 0.1, 0.5]), OVERTAKING, st.integers(1, 12), st.integers(1, 4), COSTS)
def test_no_request_waits_longer_than_its_bound_whatever_arrives_later(
    prompts: list[Prompt], reserve: float, policy: str, length: int, each: int, cost: Cost
) -> None:
    """With W tokens of all that arrived before and are not done, and its own: W / (reserve · chunk) plans."""
    flood = [Prompt(at, length * 6, -2) for at in range(200) for _ in range(each)]  # shorter and more urgent
    result = run([*prompts, *flood], policy=policy, policy_reserve=reserve, tenant_lag_s=0.05, cost=cost)
    arrivals = sorted(result.able, key=lambda rid: (result.able[rid], int(rid[1:])))
    work = {f"r{index}": prompt.length for index, prompt in enumerate([*prompts, *flood])}
    done = defaultdict(int)
    left: dict[str, int] = {}
    for number, plan in enumerate(result.plans):
        for rid in arrivals:
            if result.able[rid] == number:
                before = arrivals[: arrivals.index(rid) + 1]
                left[rid] = sum(work[other] - done[other] for other in before)
        for rid, count in plan:
            done[rid] += count
    for index in range(len(prompts)):
        rid = f"r{index}"
        bound = ceil(left[rid] / ceil(reserve * CHUNK)) + 1
        assert result.finished[rid] - result.able[rid] <= bound, rid


@settings(deadline=None, max_examples=25)
@given(PROMPTS, st.sampled_from([0.05, 0.1, 0.5, 1.0]), OVERTAKING)
def test_with_one_row_a_plan_the_oldest_gets_a_share_of_the_plans(
    prompts: list[Prompt], reserve: float, policy: str
) -> None:
    """Of all plans that those which came before, and itself, take: one in 1 / reserve."""
    flood = [Prompt(at, 30, -2) for at in range(200)]
    every = [*prompts, *flood]
    result = run(every, policy=policy, policy_reserve=reserve, max_running=1)
    assert all(len(plan) <= 1 for plan in result.plans)
    arrivals = sorted(result.able, key=lambda rid: (result.able[rid], int(rid[1:])))
    for index in range(len(prompts)):
        rid = f"r{index}"
        before = arrivals[: arrivals.index(rid) + 1]
        plans = sum(ceil(every[int(other[1:])].length / CHUNK) for other in before
                    if result.finished[other] >= result.able[rid])  # fmt: skip
        assert result.finished[rid] - result.able[rid] <= ceil((plans + 1) * CHUNK / ceil(reserve * CHUNK)) + 1, rid


def test_with_one_row_a_plan_the_policy_decides_all_the_same() -> None:
    prompts = [Prompt(0, 200, 5), Prompt(1, 200, 1), Prompt(1, 60, 2), Prompt(1, 300, -1)]
    plans = run(prompts, policy="srpt", max_running=1).plans
    assert [plan[0][0] for plan in plans] == ["r0", *["r3"] * 5, *["r1"] * 3, "r0", "r1", "r2", "r0", "r0"]
    assert plans[9] == [("r0", 64)], "the reserve of ten plans"


@settings(deadline=None, max_examples=60)
@given(PROMPTS, st.sampled_from(POLICIES), RESERVES, COSTS)
def test_no_plan_leaves_budget_while_a_prompt_has_tokens(
    prompts: list[Prompt], policy: str, reserve: float, cost: Cost
) -> None:
    """Except beside prompts that end, which others are not worth holding up: see test_a_pass_that_..."""
    result = run(prompts, policy=policy, policy_reserve=reserve, tenant_lag_s=0.02, cost=cost)
    left = {f"r{index}": prompt.length for index, prompt in enumerate(prompts)}
    for number, plan in enumerate(result.plans):
        for rid, count in plan:
            left[rid] -= count
        others = [rid for rid, count in left.items() if count and result.able[rid] <= number]
        budget = CHUNK - sum(count for _, count in plan)
        if budget and others:
            assert policy != "fcfs"
            _, b, c = cost
            saved = len(result.ended[number]) * b * budget
            assert saved > 0.999 * len(others) * c * budget / CHUNK, "beside rounding"
    assert not any(left.values())


def test_a_pass_in_which_a_prompt_ends_is_filled_up_where_enough_others_wait() -> None:
    """A full pass takes 64 ms for its tokens and 8 besides: 9 others lose more than one gains."""
    cost = (0.0, 1e-3, 8e-3)
    alone = [Prompt(0, 640), Prompt(2, 10), Prompt(3, 20), Prompt(3, 10)]
    assert run(alone, policy="srpt", cost=cost).plans[:5] == [
        [("r0", 64)],
        [("r0", 64)],
        [("r0", 7), ("r1", 10)],
        [("r0", 7), ("r3", 10), ("r2", 20)],
        [("r0", 64)],
    ]
    crowd = [Prompt(0, 640), Prompt(2, 10), *[Prompt(2, 700) for _ in range(8)]]
    assert run(crowd, policy="srpt", cost=cost).plans[2] == [("r0", 54), ("r1", 10)]
    assert run(crowd[:-2], policy="srpt", cost=cost).plans[2] == [("r0", 7), ("r1", 10)]


@settings(deadline=None, max_examples=40)
@given(PROMPTS, OVERTAKING, RESERVES, st.integers(150, 400), st.booleans())
def test_half_done_prompts_that_hold_all_pages_still_end(
    prompts: list[Prompt], policy: str, reserve: float, pages: int, decode: bool
) -> None:
    """A pool that one or two of the longest prompts fill: no plan is empty before the last has ended."""
    generate = 9 if decode else 0
    result = run(prompts, policy=policy, policy_reserve=reserve, kv_pages=pages + 3, max_running=4, generate=generate)
    assert len(result.finished) == len(prompts)


@pytest.mark.full
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(1, 3), st.sampled_from(["srpt", "slo"]))
def test_pages_are_kept_for_a_request_that_needs_the_whole_pool(length: int, each: int, policy: str) -> None:
    """Short ones come all the time and would take every page that is freed; they go on, in pages that it can spare."""
    flood = [Prompt(at, 10 * length, -1) for at in range(300) for _ in range(each)]
    result = run([Prompt(0, 500, -5), Prompt(1, 620), *flood], policy=policy, kv_pages=160)
    first = ceil(500 / ceil(0.1 * CHUNK)) + 1
    bound = first + ceil((620 + 2 * each * 10 * length + 640) / ceil(0.1 * CHUNK)) + 2
    assert result.finished["r1"] <= bound


def test_a_lone_prompt_is_planned_as_under_fcfs() -> None:
    for length in (1, 63, 64, 65, 1000):
        plans = [run([Prompt(0, length)], policy=policy).plans for policy in POLICIES]
        assert plans[0] == plans[1] == plans[2]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), LENGTHS, RESERVES)
def test_srpt_of_equal_lengths_is_fcfs(arrivals: list[int], length: int, reserve: float) -> None:
    prompts = [Prompt(at, length) for at in arrivals]
    srpt = run(prompts, policy="srpt", policy_reserve=reserve)
    assert srpt.plans == run(prompts, policy="fcfs").plans


@settings(deadline=None, max_examples=40)
@given(PROMPTS, st.sampled_from(["srpt", "slo"]), st.sampled_from([1, 1000]))
def test_a_reserve_of_everything_is_fcfs(prompts: list[Prompt], policy: str, rows: int) -> None:
    overtaking = run(prompts, policy=policy, policy_reserve=1.0, max_running=rows)
    assert overtaking.plans == run(prompts, policy="fcfs", max_running=rows).plans


def test_short_prompts_overtake_a_long_one_that_keeps_its_pages_and_its_reserve() -> None:
    prompts = [Prompt(0, 640), Prompt(2, 60), Prompt(2, 30)]
    assert run(prompts, policy="srpt").plans[:5] == [
        [("r0", 64)],
        [("r0", 64)],
        [("r0", 7), ("r2", 30), ("r1", 27)],
        [("r0", 31), ("r1", 33)],
        [("r0", 64)],
    ]


def test_a_half_done_prompt_goes_on_behind_more_that_do_not_fit_than_are_looked_at() -> None:
    """One that has most of the pool, and is the longest of all: the others are passed over, and leave it the plan."""
    prompts = [Prompt(0, 600, 9), *[Prompt(1, 100, index % 3) for index in range(80)]]
    result = run(prompts, policy="srpt", policy_reserve=0.0, kv_pages=160)
    assert result.plans[:10] == [[("r0", 64)]] * 9 + [[("r0", 24)]], "then its pages are free"


def test_lower_priorities_go_first_and_the_reserve_goes_to_the_oldest_of_all() -> None:
    prompts = [Prompt(0, 200, 5), Prompt(1, 200, 1), Prompt(1, 60, 2), Prompt(1, 300, -1)]
    plans = run(prompts, policy="srpt").plans
    assert plans[1] == [("r0", 7), ("r3", 57)]
    assert [plan[-1][0] for plan in plans[1:9]] == ["r3"] * 5 + ["r1"] * 3
    assert all(plan[0] == ("r0", 7) for plan in plans[1:9])


def test_objectives_go_by_their_time_and_those_that_cannot_be_met_last_by_their_work() -> None:
    prompts = [
        Prompt(0, 300, slo_ttft_s=0.02),  # five plans of 10 ms: can never meet it
        Prompt(0, 290),
        Prompt(0, 128, slo_ttft_s=9.0),
        Prompt(0, 200, slo_ttft_s=5.0),
    ]
    warm = [Prompt(0, 64)] * 3  # so that the cost of a plan is known
    later = [Prompt(5, prompt.length, slo_ttft_s=prompt.slo_ttft_s) for prompt in prompts]
    result = run([*warm, *later], policy="slo", policy_reserve=0.0)
    ends = sorted(("r3", "r4", "r5", "r6"), key=lambda rid: result.finished[rid])
    assert ends == ["r6", "r5", "r4", "r3"]


def test_a_tenant_too_far_ahead_goes_last_and_is_not_held_up_alone() -> None:
    flood = [Prompt(0, 64, tenant="flood") for _ in range(60)]
    other = [Prompt(10 + 4 * index, 100, tenant="other") for index in range(6)]
    alone = run(flood, policy="srpt", policy_reserve=0.0, tenant_lag_s=0.05)
    assert len(alone.plans) == 60, "no other tenant: no limit"
    limited = run([*flood, *other], policy="srpt", policy_reserve=0.0, tenant_lag_s=0.05)
    free = run([*flood, *other], policy="srpt", policy_reserve=0.0, tenant_lag_s=100.0)
    waits = [[result.finished[f"r{60 + index}"] - 10 - 4 * index for index in range(6)] for result in (limited, free)]
    assert max(waits[0]) <= 8, "5 plans of lag, and 2 of its own"
    assert min(waits[1]) > 20, "shortest first alone: all of the flood goes before"
    assert limited.plans[:10] == free.plans[:10]


def test_requests_of_a_tenant_ahead_come_up_after_the_last_of_its_others() -> None:
    """r4 is found to be of a tenant ahead when r5, the only other one that was known to be, has come up already."""
    early = [Prompt(0, 1), Prompt(0, 1)]
    late = [Prompt(1, 1, 1, "a"), Prompt(1, 2), Prompt(1, 65, 1), Prompt(1, 127)]
    plans = run([*early, *late], policy="srpt", policy_reserve=0.0, tenant_lag_s=0.02).plans
    assert plans[3] == [("r5", 1), ("r2", 1), ("r4", 62)]


def test_what_is_cached_does_not_count_as_work() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=16, max_model_len=0, policy_reserve=0.0, kv_pages=200)
    text = list(range(60))
    bench.submit("warm", text, route=Discard())
    bench.compute(1)
    bench.submit("running", 16, route=Discard(), cache_salt="x")
    bench.plan()
    bench.submit("fresh", list(range(100, 130)), route=Discard())
    bench.submit("turn", [*text, *range(200, 210)], route=Discard())
    bench.done(bench.last(Forward), 1)
    forward = bench.plan()
    assert forward is not None
    assert [(row.start, row.count) for row in forward.rows] == [(60, 10), (0, 6)], "70 tokens, 10 of them to compute"


DIGEST = """
import hashlib
from unittest.mock import patch
from headrace.testing.server import SimulatedServer
from headrace.testing.scenario import POLICIES, Scenario
from headrace.testing.simulator import simulate
digest, perform = hashlib.sha256(), SimulatedServer._perform
def keep(server, effect):
    digest.update(repr(effect).encode())
    perform(server, effect)
with patch.object(SimulatedServer, "_perform", keep):
    for seed in range(80_000, 80_006):
        for shape in ("colocated", "pair"):
            assert not simulate(Scenario(seed=seed, shape=shape, requests=9, policy=POLICIES[seed % 3])).violations
print(digest.hexdigest())
"""


def test_the_same_events_give_the_same_effects_byte_for_byte_in_every_process() -> None:
    digests = set()
    for seed in ("1", "2", "77"):
        command = [sys.executable, "-c", DIGEST]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
    assert digests != {hashlib.sha256().hexdigest()}


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_end_leave_nothing_behind(policy: str) -> None:
    bench = Bench(policy=policy, pipeline_depth=0)
    for index in range(8):
        bench.submit(f"r{index}", 40, cache_salt=f"{index}", route=Discard())
    bench.done(bench.plan() or bench.last(Forward))
    for index in range(8):
        bench.abort(f"r{index}")
    bench.assert_empty()
    assert bench.metric("unplanned_seconds") == 0


@settings(deadline=None, max_examples=40)
@given(PROMPTS, st.sampled_from(POLICIES), st.integers(1, 60), COSTS)
def test_the_order_for_reports_is_the_order_of_the_plans(
    prompts: list[Prompt], policy: str, plans: int, cost: Cost
) -> None:
    """Looking at it changes nothing: with and without, the plans are the same."""
    looked_at = Bench(policy=policy, chunk_tokens=CHUNK, max_model_len=1024, kv_pages=512, tenant_lag_s=0.02)
    compared = Bench(policy=policy, chunk_tokens=CHUNK, max_model_len=1024, kv_pages=512, tenant_lag_s=0.02)
    for number in range(plans):
        ordered = []
        for bench in (looked_at, compared):
            for index, prompt in enumerate(prompts):
                if prompt.at == number:
                    text = [index] * (prompt.length % 300 + 1)
                    terms = {"priority": prompt.priority, "tenant": prompt.tenant, "slo_ttft_s": prompt.slo_ttft_s}
                    bench.submit(f"r{index}", text, route=Discard(), max_tokens=1, **terms)
            if bench is looked_at:
                queue = bench.scheduler.state.replicas[0].queues.policy
                ranked = [request.rid for request in queue.ranked(bench.now)]
                assert ranked == [request.rid for request in queue.order(bench.now)]
                assert ranked == [request.rid for request in queue.ranked(bench.now)]
            forward = bench.plan()
            ordered.append(forward)
            if forward is not None:
                bench.now += 0.01
                taken = seconds(cost, [(row.start, row.count) for row in forward.rows])
                bench.done(forward, *[1 for row in forward.rows if row.sample is not None], seconds=taken)
        assert ordered[0] == ordered[1]
