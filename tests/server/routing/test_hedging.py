"""When prompts are late, and how many second servers there are."""

import pytest

from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.server.routing.hedging import MOST, SHARE, SHORTEST_S, Hedging


def test_a_prompt_is_late_after_so_many_times_its_forecast() -> None:
    hedging = Hedging(3.0)
    assert hedging.after_s(RemoteForecast(1.0, 0.5, 0.25, delayed=9.0)) == pytest.approx(5.25)
    assert hedging.after_s(RemoteForecast(0.0, 0.001)) == SHORTEST_S
    assert hedging.after_s(None) is None


def test_half_of_the_bucket_is_taken_at_once_and_a_share_of_the_prompts_in_the_long_run() -> None:
    hedging = Hedging(2.0)
    assert sum(hedging.take() for _ in range(100)) == MOST / 2
    taken = 0
    for _ in range(1000):
        hedging.after_s(None)
        taken += hedging.take()
    assert taken == pytest.approx(1000 * SHARE, abs=1)
