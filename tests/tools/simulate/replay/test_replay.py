"""Replays in virtual time: exact times of small cases, an independent model of the queue, replicas, slow peers."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.twin.pipeline import VOCABULARY
from headrace.server.routing.replica_load import LoadReport
from headrace.server.routing.score import Candidate
from headrace.tools.simulate.replay.costs import offered_work, split_evenly
from headrace.tools.simulate.replay.replay import ReplayOutcome, ReplayResult
from headrace.tools.simulate.replay.replica import HostTier
from headrace.tools.simulate.replay.routing import (
    ROUTERS,
    LeastLoaded,
    PrefixAffinity,
    RouterFactory,
    ScoreRouter,
)
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest, prompt
from tests.tools.simulate.replay import replays
from tests.tools.simulate.replay.replays import COST, PAGE, request

CHUNK = 64


def replay(
    requests: Sequence[TraceRequest],
    cost: Cost = COST,
    *,
    router: RouterFactory = ScoreRouter,
    replicas: int = 1,
    fetch: float | None = None,
    host: HostTier | None = None,
    latency: float = 0.0,
    scale: float = 1.0,
    retries: int = 0,
    objective: Callable[[int], float] | None = None,
    siblings: bool = False,
    **changes: Any,
) -> ReplayResult:
    limits = {"kv_pages": 256, "max_model_len": 8192, "chunk_tokens": CHUNK, "max_queued_tokens": 262144}
    config = replays.config(**(limits | {"policy": "fcfs"} | changes))
    return replays.replay(
        requests,
        config,
        costs=split_evenly(cost, config.stages),
        replicas=replicas,
        siblings=siblings,
        router=router,
        fetch_tokens_s=fetch,
        host=host or HostTier(),
        latency_s=latency,
        time_scale=scale,
        retries=retries,
        objective_s=objective,
    )


def times(result: ReplayResult) -> list[float]:
    return [round(outcome.first_token_s, 9) for outcome in result.outcomes if outcome.first_token_s is not None]


def test_a_prompt_alone_takes_its_passes() -> None:
    """Chunks of 64, 64 and 22 tokens; attention reads the prefix: a·150² in all."""
    result = replay([request(5.0, 150, 1)], (1e-6, 0.001, 0.01))
    assert times(result) == [round(1e-6 * 150**2 + 0.150 + 3 * 0.01, 9)]
    assert (result.plans, result.outcomes[0].arrival_s) == (3, 5.0)
    assert result.busy_s[0] == pytest.approx(result.seconds)


def test_requests_share_a_pass_and_wait_for_the_one_before() -> None:
    """0: [0, 60) alone. 1 and 2 come meanwhile, and share a pass of 60 tokens; 3 comes when all is idle."""
    result = replay([request(0, 60, 1), request(0.01, 40, 2), request(0.02, 20, 3), request(1, 10, 4)])
    assert times(result) == [0.070, 0.130, 0.120, 0.020]


def test_an_equal_prefix_is_found_in_the_cache() -> None:
    """Four full pages of the session's first turn; and in a pool that is too small for both, none."""
    turns = [request(0, 64, 1), request(1, 100, 1)]
    result = replay(turns)
    assert [outcome.cached_tokens for outcome in result.outcomes] == [0, 64]
    assert times(result) == [0.074, 0.046]
    crowded = [turns[0], request(0.5, 100, 2), turns[1]]
    assert [outcome.cached_tokens for outcome in replay(crowded, kv_pages=7).outcomes] == [0, 0, 0]
    assert [outcome.cached_tokens for outcome in replay(turns, prefix_cache=False).outcomes] == [0, 0]


def test_two_stages_overlap() -> None:
    """Each pass takes 37 ms on either stage, so that two chunks take three times that."""
    assert times(replay([request(0, 128, 1)], stages=2)) == [round(3 * 0.037, 9)]


def test_latency_delays_what_reaches_the_scheduler() -> None:
    assert times(replay([request(0, 54, 1), request(0.001, 54, 2)], latency=0.5)) == [0.564, 0.627]


def test_time_is_scaled() -> None:
    outcomes = replay([request(1, 10, 1), request(3, 10, 2)], scale=0.5).outcomes
    assert [outcome.arrival_s for outcome in outcomes] == [0.5, 1.5]


def test_refused_requests_are_reported_with_their_code() -> None:
    requests = [request(0, 64, 1), request(0, 100, 2), request(0, 100, 3), request(9, 5000, 4)]
    result = replay(requests, max_queued_tokens=120)
    assert [outcome.error for outcome in result.outcomes] == ["", "", "queue_full", "prompt_too_long"]
    assert [outcome.first_token_s is None for outcome in result.outcomes] == [False, False, True, True]


def test_peers_that_fetch_slowly_hold_pages_and_so_the_next_prompt() -> None:
    """A pool for one prompt of 128 tokens. The peer takes 100 tokens a second: the second prompt starts when the first
    one's last token has left, 64 of which left while the other 64 were computed."""
    requests = [request(0, 128, 1), request(0.001, 128, 2)]
    at_once = times(replay(requests, kv_pages=8))
    slow = times(replay(requests, kv_pages=8, fetch=100.0))
    assert at_once == [0.148, 0.295]
    assert slow[0] == 0.148
    assert slow[1] == pytest.approx(0.074 + 1.28 + 0.148 - 0.001)


def test_pages_that_left_the_pool_come_back_from_the_host_tier_at_its_rate() -> None:
    """The pool holds two prompts. The last one is the first again: all but its last page is loaded, if it is there."""
    requests = [request(number, 128, text) for number, text in enumerate((1, 2, 3, 4, 1))]
    tiers = None, HostTier(64), HostTier(64, tokens_s=7000.0)
    alone, at_once, slow = (replay(requests, kv_pages=16, host=tier) for tier in tiers)
    assert times(alone) == [0.148] * 5
    assert times(at_once) == [0.148] * 4 + [0.026]
    copied = 112 / 7000  # pages are not given to another prompt before they are stored, nor used before they are loaded
    assert times(slow) == pytest.approx([0.148, 0.148, 0.148 + copied, 0.148 + copied, 0.026 + 2 * copied])
    assert [outcome.cached_tokens for outcome in slow.outcomes] == [0, 0, 0, 0, 112]


def test_equal_settings_give_equal_results() -> None:
    draw = random.Random(3)
    requests = [request(0.03 * number, draw.randrange(1, 300), draw.randrange(20)) for number in range(60)]
    results = [replay(requests, replicas=3, fetch=5000.0, pipeline_depth=1, stages=2) for _ in range(2)]
    assert results[0] == results[1]


class Fcfs:
    """First come, first served with a token budget a pass, written anew: no cache, pages for all."""

    def __init__(self, cost: Cost, chunk: int) -> None:
        self._cost, self._chunk = cost, chunk

    def run(self, arrivals: Sequence[tuple[float, int]]) -> list[float]:
        """Times to first token."""
        a, b, c = self._cost
        done, left = [0] * len(arrivals), [tokens for _, tokens in arrivals]
        first: list[float] = [0.0] * len(arrivals)
        now = 0.0
        while any(left):
            waiting = [number for number, (at, _) in enumerate(arrivals) if at <= now and left[number]]
            if not waiting:
                now = min(at for number, (at, _) in enumerate(arrivals) if left[number])
                continue
            budget, seconds, ended = self._chunk, c, []
            for number in waiting:
                count = min(budget, left[number])
                if not count:
                    break
                budget -= count
                seconds += a * ((done[number] + count) ** 2 - done[number] ** 2) + b * count
                done[number] += count
                left[number] -= count
                ended += [number] if not left[number] else []
            now += seconds
            for number in ended:
                first[number] = now - arrivals[number][0]
        return first


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), min_size=1, max_size=25),
    st.integers(1, 200),
    st.floats(0, 1e-6),
)
def test_the_replay_equals_an_independent_model_of_the_queue(
    gaps: list[tuple[int, int]], chunk: int, squared: float
) -> None:
    """Arrivals at odd times, so that none falls together with the end of a pass."""
    at, arrivals = 0.0, []
    for gap, tokens in gaps:
        at += gap * 0.0031 + 1.7e-7
        arrivals.append((at, tokens))
    cost = (squared, 0.0011, 0.0101)
    requests = [request(at, tokens, number) for number, (at, tokens) in enumerate(arrivals)]
    result = replay(requests, cost, chunk_tokens=chunk, kv_pages=8192, prefix_cache=False)
    assert times(result) == pytest.approx(Fcfs(cost, chunk).run(arrivals), abs=1e-6)


def test_the_offered_work_is_that_of_the_passes() -> None:
    """Full chunks only, and nothing at once: work and replay agree."""
    requests = [request(9 * number, 64 * (1 + number % 5), number % 3) for number in range(30)]
    cost = (1e-7, 0.001, 0.01)
    work = offered_work(requests, [cost], pages=256, page_size=64, chunk_tokens=64)
    result = replay(requests, cost, page_size=64)
    assert work.cached_tokens == sum(outcome.cached_tokens for outcome in result.outcomes)
    assert work.seconds == pytest.approx(result.busy_s[0])


class View(msgspec.Struct, frozen=True):
    """A replica as routers see it: open requests, seconds queued, seconds uncached."""

    open_requests: int
    queued_s: float
    uncached_s: float

    def candidate(self, prompt: bytes, salt: str) -> Candidate:
        return Candidate(self.queued_s, self.uncached_s)

    def load(self) -> LoadReport:
        return LoadReport(self.queued_s, (0.0, 0.001))


def chosen(router: RouterFactory, *views: tuple[int, float, float]) -> int:
    return router([View(*view) for view in views], PAGE).choose("a", prompt(request(0, 100, 1)), 0.0)


def test_routers() -> None:
    given = ((2, 3.0, 0.1), (1, 4.0, 0.5), (1, 3.9, 0.5))
    assert chosen(LeastLoaded, *given) == 2
    assert chosen(PrefixAffinity, *given) == 0
    assert chosen(PrefixAffinity, (9, 9.0, 0.46), (0, 0.0, 0.5)) == 1, "a prefix that all prompts have"
    assert chosen(ScoreRouter, *given) == 0, "it sees the queues alone, before anything was sent"
    for router in (LeastLoaded, PrefixAffinity):
        assert chosen(router, (1, 1.0, 1.0), (1, 1.0, 1.0)) == 0, "of equal ones the first"


class Turns:
    """One replica after the other."""

    def __init__(self, replicas: Sequence[Any], _page_size: int) -> None:
        self._replicas = len(replicas)

    def choose(self, rid: str, prompt: bytes, now: float, salt: str = "", prefer: int | None = None) -> int:
        return int(rid) % self._replicas

    def answered(self, rid: str) -> None:
        pass

    def observe(self, _replica: int, _event: Any) -> None:
        pass


def test_a_prefix_is_fetched_from_a_sibling_where_that_takes_less() -> None:
    """640 tokens take 0.74 s, 10 ms a pass of 64; at 6,400 tokens a second they come in 0.1 s, and 36 are computed."""
    moved = [request(0, 640, 1), request(2, 64, 3), request(4, 64, 4), request(5, 676, 1)]
    alone, fetched = (replay(moved, replicas=2, router=Turns, fetch=6400, siblings=on).outcomes for on in (False, True))
    assert [outcome.cached_tokens for outcome in alone] == [0, 0, 0, 0]
    assert [outcome.cached_tokens for outcome in fetched] == [0, 0, 0, 640]
    assert fetched[3].first_token_s == pytest.approx(0.1 + 0.046, abs=0.01)
    assert alone[3].first_token_s == pytest.approx(0.676 + 11 * 0.01, abs=0.01)


def test_a_slow_sibling_delays_a_prompt_once_and_by_no_more_than_computing_takes() -> None:
    prompts = [request(4 * number, 640 + number // 2, number // 2) for number in range(8)]
    alone, fetched = (
        replay(prompts, replicas=2, router=Turns, fetch=100, siblings=on).outcomes for on in (False, True)
    )
    later = [
        there.first_token_s - here.first_token_s
        for here, there in zip(alone, fetched, strict=True)
        if here.first_token_s is not None and there.first_token_s is not None
    ]
    assert len(later) == 8
    assert max(later) < 0.9
    assert sum(delay > 0.01 for delay in later) == 1


def test_affinity_keeps_a_session_on_its_replica_and_least_load_does_not() -> None:
    draw = random.Random(5)
    turns = [0] * 30
    requests = []
    for number in range(120):
        session = draw.randrange(30)
        turns[session] += 1
        requests.append(request(0.1 * number, 64 * (1 + turns[session]), session))
    hits: dict[str, int] = {}
    for name in ("least-loaded", "prefix-affinity", "score"):
        outcomes: tuple[ReplayOutcome, ...] = replay(requests, replicas=4, router=ROUTERS[name]).outcomes
        hits[name] = sum(outcome.cached_tokens for outcome in outcomes)
        assert {outcome.error for outcome in outcomes} == {""}
    assert hits["prefix-affinity"] > 1.5 * hits["least-loaded"]
    assert hits["score"] > 1.5 * hits["least-loaded"]


@pytest.mark.parametrize("vocabulary", [2, 7, 1000, VOCABULARY])
def test_prompts_are_equal_as_far_as_their_texts_are(vocabulary: int) -> None:
    def ids(*segments: tuple[int, int]) -> bytes:
        made = tuple(PromptSegment(*segment) for segment in segments)
        return prompt(TraceRequest(0.0, made, sum(tokens for _, tokens in segments)), vocabulary)

    assert len(ids((5, 40), (77, 3))) == 4 * 43
    assert ids((5, 40), (77, 30)).startswith(ids((5, 40), (77, 20)))
    starts = [ids((text, 16)) for text in range(300)]
    assert len(set(starts)) == 300


def test_refused_clients_come_again_after_retry_after_and_times_count_from_the_first_attempt() -> None:
    """The first prompt takes 700 ms. The others may wait for 300 ms: they come again after a second, the least that
    HTTP can say, when nothing is queued; and so does one whose time ends with its retries."""
    requests = [request(0, 600, 1), request(0.01, 54, 2), request(0.02, 54, 3)]
    once = replay(requests, max_predicted_ttft_s=0.3)
    assert [outcome.error for outcome in once.outcomes] == ["", "slo_unreachable", "slo_unreachable"]
    again = replay(requests, max_predicted_ttft_s=0.3, retries=1)
    assert [(outcome.error, outcome.attempts) for outcome in again.outcomes] == [("", 1), ("", 2), ("", 2)]
    assert times(again) == [0.7, 1.064, 1.118]


def test_clients_that_are_refused_too_often_or_cannot_be_served_give_up() -> None:
    requests = [request(0, 6000, 1), request(0.01, 54, 2), request(0.02, 5000, 3)]
    objectives = {6000: 9.0, 54: 0.3, 5000: 1.0}
    result = replay(
        requests, max_queued_tokens=1 << 20, kv_pages=1000, retries=2, objective=lambda tokens: objectives[tokens]
    )
    found = [(outcome.error, outcome.attempts) for outcome in result.outcomes]
    assert found == [("", 1), ("", 2), ("slo_unreachable", 1)], "the last takes longer than it may, alone"


def test_retries_of_a_handed_over_prompt_reserve_again() -> None:
    requests = [request(0, 600, 1), request(0.01, 54, 2)]
    result = replay(requests, max_predicted_ttft_s=0.3, retries=1, fetch=1e6)
    assert [(outcome.error, outcome.attempts) for outcome in result.outcomes] == [("", 1), ("", 2)]
