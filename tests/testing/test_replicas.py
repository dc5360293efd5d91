"""Data-parallel replicas in random schedules: integrity of each, passes of lockstep replicas, requests bound anew.

V1, V4 and S2 to S5 at runtime: one planner decides, and the orders carry what was agreed.
"""

from collections import Counter
from unittest.mock import patch

import pytest

from headrace.core.messages.orders import Forward, ReplicaOrder
from headrace.scheduler.batching.planner import LockstepPlanner
from headrace.scheduler.state.events import Effect
from headrace.testing.scenario import Scenario, Shape
from headrace.testing.server import SimulatedServer
from headrace.testing.simulator import simulate
from tests.scheduler.schedules import recording


def run(shape: Shape, seeds: range, **changes: object) -> tuple[Counter[str], list[Effect]]:
    """Outcomes and effects of schedules without violations: the KV of a wrong pool gives wrong tokens."""
    outcomes: Counter[str] = Counter()
    with recording() as seen:
        for seed in seeds:
            report = simulate(Scenario(seed=seed, shape=shape, tiers=seed % 4 == 0, **changes))  # type: ignore[arg-type]
            assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
            outcomes.update(report.outcomes)
    return outcomes, seen


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("shape", ["colocated", "pair"])
@pytest.mark.parametrize(("dp", "schedules"), [(2, 20), (8, 4)])
def test_schedules(dp: int, schedules: int, shape: Shape, lockstep: bool) -> None:
    """S9 as well: the stages of a pipeline are 1 to 3, and no rank misses a pass."""
    seeds = range(1000 * dp, 1000 * dp + schedules)
    outcomes, seen = run(shape, seeds, requests=4 + 3 * dp, arrivals_s=0.01 / dp, dp=dp, lockstep=lockstep)
    assert sum(count for name, count in outcomes.items() if name.endswith((":stop", ":length", ":handoff"))) > schedules
    forwards = [each for each in seen if isinstance(each, ReplicaOrder) and isinstance(each.order, Forward)]
    assert len({each.replica for each in forwards}) > dp // 2
    assert all((each.order.agreement is not None) == lockstep for each in forwards if isinstance(each.order, Forward))


def test_each_pass_has_each_replica_once() -> None:
    """S2, S4: one Forward of one number to every replica, idle ones among them, with equal agreements."""
    _, seen = run("colocated", range(30, 45), requests=16, arrivals_s=0.002, dp=4, lockstep=True, crash=0.0)
    passes: list[list[tuple[int, Forward]]] = []
    for each in seen:
        if isinstance(each, ReplicaOrder) and isinstance(each.order, Forward):
            if not passes or passes[-1][0][1].seq != each.order.seq:
                passes.append([])
            passes[-1].append((each.replica, each.order))
    assert passes
    idle = 0
    for one in passes:
        assert [replica for replica, _ in one] == [0, 1, 2, 3]
        agreement = one[0][1].agreement
        assert agreement is not None
        assert all(order.agreement == agreement for _, order in one)
        assert agreement.tokens == tuple(sum(row.count for row in order.rows) for _, order in one)
        assert not agreement.idle
        idle += sum(not order.rows for _, order in one)
    assert idle > len(passes) // 2, "few replicas were idle"


def test_a_replica_that_is_left_out_is_noticed() -> None:
    """The check of the schedules: without the Forward of an idle replica the others wait for ever (S4)."""

    def forgetful(server: SimulatedServer, effect: Effect) -> None:
        idle = isinstance(effect, ReplicaOrder) and isinstance(effect.order, Forward) and not effect.order.rows
        if not idle:
            perform(server, effect)

    perform = SimulatedServer._perform
    with patch.object(SimulatedServer, "_perform", forgetful):
        report = simulate(Scenario(seed=3, dp=2, lockstep=True, crash=0.0, cancel=0.0))
    assert any("requests are left" in text or "silent" in text for text in report.violations)


def test_dead_replicas_requests_are_bound_anew() -> None:
    """A rank that fails ends the requests of all replicas; those that come later are bound and finish."""
    outcomes, _ = run("colocated", range(60, 90), requests=20, arrivals_s=0.01, dp=2, crash=1.0)
    assert outcomes["colocated:stage_failed"] > 0
    assert outcomes["colocated:length"] + outcomes["colocated:stop"] > 50


def test_one_replica_needs_no_agreement() -> None:
    """V1, S1: lockstep with one replica is planned as ever."""
    with patch.object(LockstepPlanner, "plan", side_effect=AssertionError):
        _, seen = run("colocated", range(3), dp=1, lockstep=True)
    assert not [each for each in seen if isinstance(each, ReplicaOrder)]
