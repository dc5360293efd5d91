"""Random schedules under a virtual clock, reproducible by seed."""

from collections import Counter
from typing import Any

import pytest

from headrace.core.config.scheduler import Policy
from headrace.core.messages.orders import PlanRow
from headrace.testing.engine import SimulatedStage
from headrace.testing.scenario import POLICIES, Scenario, Shape
from headrace.testing.server import SimulationReport
from headrace.testing.simulator import simulate

BATCH = 40


def run(shape: Shape, first: int, seeds: int = BATCH, **changes: Any) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        report = simulate(Scenario(seed=seed, shape=shape, requests=7, **changes))
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        outcomes.update(report.outcomes)
    return outcomes


def some_of(batches: int) -> list[Any]:
    """The first two, and the others in the full run."""
    return [pytest.param(each, marks=() if each < 2 else pytest.mark.full) for each in range(batches)]


@pytest.mark.parametrize("batch", some_of(9))
def test_colocated(batch: int) -> None:
    outcomes = run("colocated", batch * BATCH)
    assert {"colocated:stop", "colocated:length", "colocated:cancelled", "colocated:discarded"} <= set(outcomes)


@pytest.mark.parametrize("batch", some_of(6))
def test_prefill_and_decode(batch: int) -> None:
    outcomes = run("pair", batch * BATCH)
    expected = {"decode:stop", "decode:length", "decode:cancelled", "decode:peer_gone", "decode:no_request"}
    assert {"decode:lease_expired", "prefill:lease_expired"} <= set(outcomes)
    assert expected | {"prefill:handoff", "prefill:stop", "prefill:cancelled", "prefill:no_peer"} <= set(outcomes)


def test_prompts_move_between_prefill_servers_whatever_happens_to_these() -> None:
    """Servers are lost, crash, refuse, and damage nothing: moved requests generate what they would have anywhere."""
    moves = 0
    for seed in range(70_000, 70_000 + BATCH // 2):
        scenario = Scenario(seed, "pair", requests=9, prefills=3, lost_peer=0.9, crash=0.3, stall=0.01, cancel=0.1)
        report = simulate(scenario)
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        moves += report.moves
    assert moves > BATCH // 4


def test_peers_that_fall_silent() -> None:
    outcomes = run("pair", 10_000, stall=0.1, cancel=0.1, crash=0.0)
    assert outcomes["prefill:peer_gone"] > 0


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_nan_in_kv_fails_the_requests_computed_from_it(shape: Shape) -> None:
    outcomes = run(shape, 50_000, has_nan_token=True, cancel=0.1)
    if shape == "pair":
        assert outcomes["prefill:nonfinite_values"] > BATCH, "in prompts"
        assert outcomes["decode:nonfinite_values"] > BATCH // 3, "in generated tokens"
    else:
        assert outcomes["colocated:nonfinite_values"] > BATCH
    assert outcomes[f"{'decode' if shape == 'pair' else shape}:length"] > BATCH // 2, "other requests go on"


@pytest.mark.parametrize(
    "scenario",
    [
        # NaN that was reported after the request had been cancelled, or ended as complete
        Scenario(1095, requests=3, cancel=0.9, stall=0.1, has_nan_token=True, small=True),
        Scenario(40829193, requests=3, arrivals_s=0.003, lost_peer=0.0, crash=0.0, has_nan_token=True, small=True),
        # … or ended as complete before the prompt was computed
        Scenario(40648350, requests=1, cancel=0.9, dp=2, lockstep=True, has_nan_token=True, small=True),
        Scenario(40876584, requests=3, arrivals_s=0.003, token_s=0.004, crash=0.0, has_nan_token=True, small=True),
        # NaN in pieces of an open prompt, which sample nothing
        Scenario(5023302, requests=1, arrivals_s=0.003, token_s=0.004, has_nan_token=True, opened=0.7, small=True),
    ],
    ids=lambda scenario: str(scenario.seed),
)
def test_nan_of_requests_that_end_without_a_token_is_not_cached(scenario: Scenario) -> None:
    assert simulate(scenario).violations == []


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_states_of_requests_are_in_their_slots(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go on from checkpoints, and what is handed over goes on with the state of the last chunk."""
    resumed = 0
    run_row = SimulatedStage._run

    def counted(stage: SimulatedStage, row: PlanRow) -> int:
        nonlocal resumed
        resumed += row.resume >= 0
        return run_row(stage, row)

    monkeypatch.setattr(SimulatedStage, "_run", counted)
    outcomes = run(shape, 80_000, states=True)
    assert resumed > 5
    assert outcomes["decode:length" if shape == "pair" else "colocated:length"] > BATCH


@pytest.mark.parametrize("shape", ["colocated", "pair"])
@pytest.mark.parametrize("changes", [{}, {"states": True}, {"dp": 2, "lockstep": True}, {"tiers": True}])
def test_pieces_of_open_prompts(shape: Shape, changes: dict[str, Any]) -> None:
    """What they leave in the prefix cache is true: the prompts that begin with them generate what they would alone."""
    outcomes = run(shape, 90_000, BATCH // 2, opened=0.8, **changes)
    assert outcomes["prefill:discarded" if shape == "pair" else "colocated:discarded"] > BATCH // 4
    assert outcomes["decode:length" if shape == "pair" else "colocated:length"] > BATCH // 4


@pytest.mark.parametrize(
    "changes",
    [{"tiers": True}, *(pytest.param(each, marks=pytest.mark.full) for each in ({}, {"dp": 2, "lockstep": True}))],
)
def test_digests_of_pages_are_those_of_the_prompt(changes: dict[str, Any]) -> None:
    """Of pages that were fetched, and of those that pieces compute in passes that are cancelled, too."""
    reports = [simulate(Scenario(95_000 + seed, "pair", opened=0.5, **changes)) for seed in range(BATCH // 2)]
    assert [violation for report in reports for violation in report.violations] == []
    assert sum(report.digests for report in reports) > BATCH


def test_storms_of_cancels() -> None:
    run("pair", 20_000, cancel=0.9, arrivals_s=0.0005)


def test_a_schedule_follows_from_its_seed() -> None:
    for shape in ("colocated", "pair"):
        scenario = Scenario(seed=7, shape=shape)
        assert simulate(scenario) == simulate(scenario)


def test_without_cancels_and_faults_every_request_that_is_let_in_succeeds() -> None:
    outcomes = run("colocated", 0, cancel=0.0, crash=0.0)
    assert not {"colocated:cancelled", "colocated:stage_failed"} & set(outcomes)


def test_without_faults_no_peer_or_stage_times_out() -> None:
    outcomes = run("pair", 30_000, cancel=0.1, crash=0.0, lost_peer=0.0, abandon=0.0)
    assert outcomes["decode:stop"] > 0
    assert not [reason for reason in outcomes if reason.endswith(("peer_gone", "stage_failed", "no_request"))]


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_results_do_not_depend_on_the_policy(shape: Shape) -> None:
    """The same requests under every policy: those that finish have the same tokens and finish reason."""
    compared = 0
    for seed in range(60_000, 60_000 + BATCH // 2):

        def run_under(policy: Policy, seed: int = seed) -> SimulationReport:
            report = simulate(
                Scenario(seed, shape, 7, cancel=0.0, crash=0.0, lost_peer=0.0, abandon=0.0, policy=policy)
            )
            assert report.violations == [], f"seed {seed}, {policy}: {report.violations[:3]}"
            return report

        plain, *others = (run_under(policy).results for policy in POLICIES)
        for other in others:
            both = plain.keys() & other.keys()
            compared += len(both)
            assert {key: plain[key] for key in both} == {key: other[key] for key in both}, seed
    assert compared > BATCH * 4, "few requests were let in, or met their deadline, under every policy"


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_results_do_not_depend_on_the_plans_in_flight(shape: Shape) -> None:
    """The same requests at every depth: those that finish have the same tokens and finish reason."""
    compared = 0
    for seed in range(40_000, 40_000 + BATCH // 2):

        def run_at(depth: int, seed: int = seed) -> SimulationReport:
            report = simulate(Scenario(seed, shape, 7, cancel=0.0, crash=0.0, lost_peer=0.0, abandon=0.0, depth=depth))
            assert report.violations == [], f"seed {seed}, depth {depth}: {report.violations[:3]}"
            return report

        plain, *overlapping = (run_at(depth).results for depth in (0, 1, 3))
        for other in overlapping:
            both = plain.keys() & other.keys()
            compared += len(both)
            assert {key: plain[key] for key in both} == {key: other[key] for key in both}, seed
    assert compared > BATCH * 4, "few requests were let in, or met their deadline, at every depth"
