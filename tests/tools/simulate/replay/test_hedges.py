"""Second replicas of prompts that are late, while one of four is slow in spells."""

import random

import pytest

from headrace.server.routing.hedging import MOST, SHARE
from headrace.tools.simulate.replay.replay import ReplayResult
from headrace.tools.simulate.replay.workload import TraceRequest
from tests.tools.simulate.replay.replays import config, replay, request

COUNT = 600


def trace() -> list[TraceRequest]:
    """Prompts of other texts each, of 100 to 600 tokens, that keep four servers busy a third of the time."""
    draw = random.Random(7)
    at, found = 0.0, []
    for number in range(COUNT):
        at += draw.expovariate(4.0)
        found.append(request(at, draw.randrange(100, 600), number))
    return found


def hedged(factor: float, slow: float = 20.0, **changes: int) -> ReplayResult:
    return replay(trace(), config(**changes), replicas=4, hedge=factor, slow=slow)


def share(result: ReplayResult, percent: int) -> float:
    """Seconds to the first token that so many of a hundred take at most."""
    times = sorted(one.first_token_s for one in result.outcomes if one.first_token_s is not None)
    return times[len(times) * percent // 100]


@pytest.mark.full
def test_the_slowest_prompts_are_faster_and_all_of_them_end_once() -> None:
    without, hedges = hedged(0.0), hedged(2.0)
    assert not any(one.error for result in (without, hedges) for one in result.outcomes)
    assert share(hedges, 99) < 0.3 * share(without, 99)
    assert share(hedges, 50) < 1.1 * share(without, 50)
    assert 0 < hedges.hedges <= COUNT * SHARE + MOST
    assert without.hedges == 0


@pytest.mark.full
def test_servers_in_time_need_no_second_one() -> None:
    assert hedged(4.0, slow=1.0).outcomes == hedged(0.0, slow=1.0).outcomes


def test_a_second_one_that_is_refused_changes_nothing() -> None:
    """Queues are short: some first ones are refused, too."""
    result = hedged(2.0, max_queued_requests=2)
    assert {one.error for one in result.outcomes} <= {"", "queue_full"}
    assert sum(one.first_token_s is None for one in result.outcomes) == sum(
        one.error == "queue_full" for one in result.outcomes
    )
