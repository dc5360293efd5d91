"""The twin beside the future: what it says of a prompt is what becomes of one that is submitted in its place."""

import msgspec
import pytest

from headrace.core.runtime.forked import run_forked
from headrace.core.types.requests.request import DecodeHere, SendTo
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.twin.twin import Twin
from tests.scheduler.twin.driven import COST, Driven

STEPS = 20_000
HALF: Cost = (5e-10, 5e-5, 2.5e-3)


def in_twin(driven: Driven, tokens: int, steps: int = STEPS, horizon_s: float = 60.0) -> tuple[float, int]:
    """Seconds to the first token of a prompt of so many tokens, in a copy without arrivals; steps."""

    def look_ahead() -> bytes:
        driven.scheduler.state.promises.recent.arrivals.clear()
        twin = Twin(driven.scheduler, driven.world.now, 0)
        twin.start()
        assert twin.admit(tokens) is not None
        return msgspec.msgpack.encode((twin.first_token_s(horizon_s, steps), twin.steps))

    found: tuple[float, int] = msgspec.msgpack.decode(run_forked(look_ahead, 20.0), type=tuple[float, int])
    return found


def busy(driven: Driven, requests: int = 40) -> None:
    """Prompts of all lengths come, and some are computed."""
    for number in range(requests):
        tokens = round(2 ** driven.drawing.uniform(2, 12))
        kind = driven.drawing.randrange(3)
        rid = f"r{number}"
        if kind:
            driven.submit(rid, tokens)
        else:
            driven.submit(rid, tokens, SendTo(f"t{number}"), max_tokens=2)
        driven.run(driven.drawing.expovariate(1 / 0.06))


@pytest.mark.parametrize("policy", ["srpt", "fcfs", "slo"])
@pytest.mark.parametrize("costs", [(COST,), (HALF, HALF)], ids=["one stage", "two stages"])
@pytest.mark.parametrize("tokens", [5, 700, 5000])
def test_what_it_says_of_a_prompt_is_what_becomes_of_it(policy: str, costs: tuple[Cost, ...], tokens: int) -> None:
    driven = Driven(costs, policy=policy)
    busy(driven)
    predicted, _ = in_twin(driven, tokens)
    driven.submit("it", tokens)
    assert predicted == pytest.approx(driven.ttft_s("it"), rel=0.05, abs=0.02)


@pytest.mark.parametrize("changes", [{"dp": 2}, {"tp": 2}, {"pipeline_depth": 0}, {"kv_pages": 700}])
def test_however_the_ranks_are_laid_out(changes: dict[str, object]) -> None:
    driven = Driven(seed=3, **changes)
    busy(driven)
    predicted, _ = in_twin(driven, 700)
    driven.submit("it", 700)
    assert predicted == pytest.approx(driven.ttft_s("it"), rel=0.1, abs=0.05)


def test_beside_requests_that_decode() -> None:
    driven = Driven(seed=4)
    for number in range(10):
        driven.submit(f"d{number}", 100, DecodeHere(), max_tokens=200)
    driven.run(0.5)
    predicted, _ = in_twin(driven, 3000)
    driven.submit("it", 3000)
    assert predicted == pytest.approx(driven.ttft_s("it"), rel=0.1)


@pytest.mark.parametrize("policy", ["srpt", "fcfs"])
def test_when_steps_are_over_sums_say_the_rest(policy: str) -> None:
    driven = Driven(seed=5, policy=policy)
    busy(driven)
    whole, all_steps = in_twin(driven, 5000)
    cut, steps = in_twin(driven, 5000, steps=all_steps // 2)
    assert steps == all_steps // 2
    assert cut == pytest.approx(whole, rel=0.2)
    early, _ = in_twin(driven, 5000, horizon_s=whole / 3)
    assert early == pytest.approx(whole, rel=0.2)


def test_the_scheduler_does_not_notice() -> None:
    """It goes on as one that no twin was made of."""
    one, other = Driven(seed=6), Driven(seed=6)
    for driven in (one, other):
        busy(driven)
    in_twin(one, 700)
    for driven in (one, other):
        driven.run(100.0)
        assert driven.scheduler.idle
        assert driven.scheduler.check_integrity() == []
    assert (one.first_token, one.finished) == (other.first_token, other.finished)


def test_what_comes_delays_a_long_prompt() -> None:
    """With the arrivals of the last minutes, which srpt prefers, it takes longer than without."""
    driven = Driven(seed=7)
    for number in range(200):
        driven.submit(f"r{number}", 300)
        driven.run(driven.drawing.expovariate(1 / 0.06))
    alone, _ = in_twin(driven, 20_000)

    def look_ahead() -> bytes:
        twin = Twin(driven.scheduler, driven.world.now, 1)
        twin.start()
        assert twin.admit(20_000) is not None
        return msgspec.msgpack.encode(twin.first_token_s(60.0, STEPS))

    among = msgspec.msgpack.decode(run_forked(look_ahead, 20.0))
    driven_share = 0.035 / 0.06
    assert among == pytest.approx(alone / (1 - driven_share), rel=0.35)
    assert among > 1.4 * alone
