"""What a scheduler lets go of has no cycles: its process has the garbage collector look seldom."""

import pytest

from headrace.testing.scenario import Scenario
from headrace.testing.simulator import Simulation
from tests.garbage import Garbage

SEEDS = range(300_000, 300_008)
DROPPED_WHOLE = ("headrace.scheduler.kv.", "headrace.core.lazy_heap")  # a cache, when the stages' pools are known


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "colocated"},
        {"shape": "pair", "rooms": 0.5, "other_prompt": 0.2, "hold": 0.5, "cancel": 0.3},
        {"shape": "pair", "prefills": 3, "prefixes": 3, "returns": 0.5, "lost_peer": 0.9, "crash": 0.3},
        {"shape": "colocated", "tiers": True, "library": True, "tier_faults": 0.1},
        {"shape": "pair", "dp": 2, "lockstep": True, "states": True},
        {"arrivals_s": 0.02, "cancel": 0.1, "promise": "p99"},
    ],
    ids=str,
)
def test_schedules_leave_no_cycles_but_caches(changes: dict[str, object]) -> None:
    with Garbage() as garbage:
        runs = [Simulation(Scenario(seed, requests=12, **changes)) for seed in SEEDS]  # type: ignore[arg-type]
        for run in runs:
            run.run()
        found = garbage.found()
    caches = {name for name in found if name.startswith(DROPPED_WHOLE)}
    assert caches, "the collector has found what it is to find"
    assert not {name for name in found if name.startswith("headrace.scheduler.")} - caches
    assert not {"headrace.core.messages.frontend.Submit", "headrace.core.types.requests.request.SamplingParams"} & {
        *found
    }
