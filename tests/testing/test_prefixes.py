"""Random schedules in which every server fetches prefixes from every other one, whatever happens to them."""

from collections import Counter
from typing import Any

from headrace.core.messages.orders import ReplicaOrder, SendChunk
from headrace.core.types.requests.request import PREFIX
from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate
from tests.scheduler.schedules import recording


def test_prefixes_go_in_all_directions_and_damage_nothing() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(90_000, 90_060):
        changes: dict[str, Any] = {"prefills": 2} if seed % 2 else {"dp": 1 + seed % 4 // 2, "small": seed % 8 == 0}
        scenario = Scenario(seed, "pair", 8, prefixes=8, lost_peer=0.4, crash=0.15, stall=0.02, **changes)
        report = simulate(scenario)
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        outcomes.update(report.outcomes)
    assert outcomes["decode:fetched"] > 4  # most give way: a server may have a single metadata row
    assert outcomes["prefill:fetched"] > 20
    assert outcomes["prefill:not_cached"] > 0
    assert outcomes["decode:handoff"] > 0


def test_prefixes_come_from_tiers_whole_or_not_at_all() -> None:
    outcomes: Counter[str] = Counter()
    from_tiers = 0
    for seed in range(92_000, 92_010):
        changes: dict[str, Any] = {"prefills": 2} if seed % 2 else {"dp": 1 + seed % 4 // 2}
        changes |= {"tier_faults": 0.02 * (seed % 5), "lost_peer": 0.2, "crash": 0.05}
        with recording() as effects:
            report = simulate(Scenario(seed, "pair", 12, prefixes=24, small=True, tiers=True, library=True, **changes))
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        outcomes.update(report.outcomes)
        orders = (effect.order if isinstance(effect, ReplicaOrder) else effect for effect in effects)
        rows = [order.last for order in orders if isinstance(order, SendChunk) and order.last is not None]
        from_tiers += sum(row.finish_reason == PREFIX and row.from_tiers.total > 0 for row in rows)
    assert from_tiers > 5
    assert outcomes["prefill:fetched"] > 10
    assert outcomes["prefill:not_cached"] > 0
    assert outcomes["prefill:pages_needed"] > 0


def test_turns_come_back_or_not_and_damage_nothing() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(91_000, 91_020):
        changes: dict[str, Any] = {"prefills": 2} if seed % 2 else {"dp": 1 + seed % 4 // 2, "small": seed % 8 == 0}
        changes |= {"has_nan_token": seed % 3 == 0, "abandon": 0.1, "prefixes": 1, "returns": 0.9}
        report = simulate(Scenario(seed, "pair", 12, lost_peer=0.3, crash=0.1, stall=0.02, **changes))
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        outcomes.update(report.outcomes)
    assert outcomes["prefill:fetched"] > 10
    assert outcomes["decode:handoff"] > 8
    assert outcomes["prefill:peer_gone"] + outcomes["decode:peer_gone"] > 0
