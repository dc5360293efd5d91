"""Replays with decode servers: exact times of small cases, and --remote cost beside both constant policies."""

import random
from collections.abc import Sequence
from functools import cache

import pytest

from headrace.core.types.errors import TOO_LONG
from headrace.scheduler.costs.chunking import Cost
from headrace.tools.simulate.replay.decode_server import DecodeTier, Remote
from headrace.tools.simulate.replay.replay import ReplayResult
from headrace.tools.simulate.replay.workload import TraceRequest
from tests.tools.simulate.replay import replays
from tests.tools.simulate.replay.replays import COST, request


def replay(
    requests: Sequence[TraceRequest],
    remote: Remote,
    *,
    replicas: int = 1,
    servers: int = 1,
    costs: Cost = COST,
    decode_cost: Cost = COST,
    fetch: float | None = None,
    read_s: float = 0.0,
) -> ReplayResult:
    tier = DecodeTier(
        remote=remote, costs=(decode_cost,), servers=servers, chunk_tokens=128, read_s=read_s, handoff_s=0.02
    )
    config = replays.config()
    return replays.replay(requests, config, costs=(costs,), replicas=replicas, fetch_tokens_s=fetch, decode=tier)


def test_a_handed_over_prompt_takes_pass_handoff_and_transfer_and_then_a_pass_a_token() -> None:
    (outcome,) = replay([request(1.0, 100, 1, 5)], "always", fetch=1000.0).outcomes
    assert outcome.first_token_s == pytest.approx(0.02 + 0.11 + 0.1)
    assert outcome.token_s == pytest.approx(0.011)
    assert (outcome.generated, outcome.remote, outcome.error) == (5, True, "")


def test_a_prompt_that_is_computed_where_it_is_decoded() -> None:
    (outcome,) = replay([request(1.0, 200, 1, 3)], "never").outcomes
    assert outcome.first_token_s == pytest.approx(0.138 + 0.082)
    assert outcome.token_s == pytest.approx(0.011)
    assert not outcome.remote


def test_a_prompt_delays_the_tokens_of_others_and_reading_kv_takes_time() -> None:
    running = request(0.0, 16, 1, 20)
    alone = replay([running], "never", read_s=1e-4).outcomes[0]
    assert alone.token_s == pytest.approx(0.011 + 1e-4 * (16 + 9), rel=1e-6), "from 16 to 34 tokens before it"
    beside = replay([running, request(0.1, 256, 2)], "never", read_s=1e-4).outcomes[0]
    assert beside.end_s is not None
    assert alone.end_s is not None
    assert beside.end_s - alone.end_s == pytest.approx(0.256, abs=0.03)


def test_a_request_that_is_refused_ends_with_its_error() -> None:
    outcomes = replay([request(0.0, 16_384, 1, 5), request(0.1, 100, 2)], "always").outcomes
    assert [outcome.error for outcome in outcomes] == [TOO_LONG, ""]


@cache
def traffic(seed: int) -> tuple[TraceRequest, ...]:
    """Conversations of three turns, each turn the beginning of a longer text, and single prompts."""
    rng, found = random.Random(seed), []
    for text in range(40):
        at, tokens = rng.uniform(0, 40), rng.choice((40, 150, 400, 1500))
        for _ in range(rng.choice((1, 1, 3))):
            found.append(request(at, tokens, text, rng.randrange(1, 25)))
            at, tokens = at + rng.uniform(2, 8), tokens + rng.randrange(20, 200)
    return tuple(sorted(found, key=lambda one: one.arrival_s))


def scaled(seed: int, load: float) -> list[TraceRequest]:
    """The same with as much work for one prefill server."""
    found = traffic(seed)
    seconds = sum(0.001 * one.tokens + 0.01 for one in found)
    scale = seconds / load / found[-1].arrival_s
    return [TraceRequest(one.arrival_s * scale, one.segments, one.tokens, one.output_tokens) for one in found]


def figures(result: ReplayResult) -> tuple[float, float]:
    """Mean and 99th percentile of the seconds from arrival to the last token."""
    ends = sorted(outcome.end_s for outcome in result.outcomes if outcome.end_s is not None)
    assert len(ends) == len(result.outcomes)
    return sum(ends) / len(ends), ends[int(0.99 * len(ends))]


SETUPS: dict[str, dict[str, object]] = {
    "equal": {},
    "slow prefill server": {"costs": (0.0, 0.004, 0.04)},
    "slow decode server": {"decode_cost": (0.0, 0.003, 0.03)},
    "slow link": {"fetch": 1500.0},
    "four decode servers": {"servers": 4},
}


@pytest.mark.parametrize(
    ("setup", "loads", "seeds"),
    [
        ("equal", (0.8,), (1, 2)),
        *(
            pytest.param(name, (0.5, 0.8, 1.2), range(1, 7), marks=pytest.mark.full, id=f"{name}, loads")
            for name in SETUPS
        ),
    ],
)
def test_comparing_costs_is_as_good_as_the_better_constant_policy(
    setup: str, loads: tuple[float, ...], seeds: Sequence[int]
) -> None:
    """Mean and P99 of the whole time, over seeds."""
    for load in loads:
        found: dict[Remote, list[tuple[float, float]]] = {"always": [], "never": [], "cost": []}
        for seed in seeds:
            for remote, values in found.items():
                values.append(figures(replay(scaled(seed, load), remote, **SETUPS[setup])))  # type: ignore[arg-type]
        for number, noise in ((0, 1.03), (1, 1.1)):
            mean = {remote: sum(value[number] for value in values) for remote, values in found.items()}
            assert mean["cost"] <= noise * min(mean["always"], mean["never"]), (load, number, mean)


def test_many_decode_servers_do_not_swing_between_none_and_all() -> None:
    """They read one report, up to a second old. Of 25 prompts that come in a row some stay and some go."""
    rng = random.Random(3)
    requests = [request(0.02 * number, rng.randrange(50, 60), number) for number in range(400)]
    outcomes = replay(requests, "cost", servers=8, decode_cost=(0.0, 0.002, 0.02)).outcomes[100:]
    shares = [sum(one.remote for one in outcomes[at : at + 25]) / 25 for at in range(0, len(outcomes), 25)]
    assert 0.1 < sum(shares) / len(shares) < 0.95
    assert sum(share in (0.0, 1.0) for share in shares) <= len(shares) // 4, shares
