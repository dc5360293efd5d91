"""Random schedules in which prefill servers die while they send, and others go on with what has come."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from headrace.scheduler.kv.kv_cache import KvCache
from headrace.testing.scenario import Scenario
from headrace.testing.server import SimulatedServer
from headrace.testing.simulator import Simulation


def scenario(seed: int, **changes: Any) -> Scenario:
    """A pair with several prefill servers that compute slowly, so that most fail in the middle of a prompt."""
    fields: dict[str, Any] = {
        "prefills": 2 + seed % 2,
        "token_s": 0.002,
        "lost_peer": 0.9,
        "crash": 0.6,
        "stall": 0.02,
        "cancel": 0.1,
        "resumes": 0.7,
        "dp": 1 + seed % 5 // 4,
        "states": seed % 7 == 6,
        "has_nan_token": seed % 3 == 0,
        "small": seed % 8 == 0,
    }
    return Scenario(seed, "pair", 12, **(fields | changes))


def run(seeds: range, **changes: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(scenario(seed, **changes))
        report = simulation.run()
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        decode: SimulatedServer = simulation._server
        for sample in decode.scheduler.statistics(report.seconds).samples:
            if sample.name.startswith("resumed_"):
                seen[sample.name] += int(sample.value)
        seen["along"] += report.taken_along
        seen.update(report.outcomes)
    return seen


def test_prompts_go_on_at_other_servers_and_nothing_is_damaged() -> None:
    seen = run(range(95_000, 95_030))
    assert seen["resumed_prompts_total"] > 5
    assert seen["resumed_tokens_total"] > 25
    assert seen["along"] > 5
    assert seen["prefill:fetched"] > 1


@pytest.mark.full
def test_many_schedules() -> None:
    assert run(range(96_000, 98_000))["resumed_prompts_total"] > 300
    assert run(range(98_000, 99_000), hedges=0.5)["resumed_prompts_total"] > 300


def test_second_servers_go_on_from_what_comes_for_the_first_and_nothing_is_damaged() -> None:
    seen = run(range(99_000, 99_020), hedges=0.8, lost_peer=0.4, crash=0.2)
    assert seen["resumed_prompts_total"] > 5
    assert seen["decode:cancelled"] > 20


def test_kv_that_has_not_come_would_be_found() -> None:
    """That the schedules can fail: a page too many is kept."""
    leave = KvCache.leave

    def hasty(cache: KvCache, lease: Any, tokens: bytearray, positions: int) -> int:
        return leave(cache, lease, tokens, positions + cache.page_size)

    with patch.object(KvCache, "leave", hasty), pytest.raises(AssertionError, match="is not of its tokens"):
        run(range(95_150, 95_160))
