"""Random schedules of servers with host and disk tiers, whose copies fail, are changed, are lost and take long."""

from collections import Counter
from typing import Any

import pytest

from headrace.testing.scenario import Scenario, Shape
from headrace.testing.server import SimulationReport
from headrace.testing.simulator import simulate

BATCH = 20


def run(shape: Shape, first: int, count: int = BATCH, **changes: Any) -> Counter[str]:
    """Pages copied between tiers, by result, over all servers."""
    settings: dict[str, Any] = {"requests": 20, "token_s": 0.004, "tiers": True} | changes
    pages: Counter[str] = Counter()
    for seed in range(first, first + count):
        report = simulate(Scenario(seed=seed, shape=shape, **settings))
        assert report.violations == [], f"seed {seed}: {report.violations[:3]}"
        for name, copied in report.tier_pages.items():
            pages[name.partition(":")[2]] += copied
    return pages


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_tokens_do_not_depend_on_tiers_that_work(shape: Shape) -> None:
    pages = run(shape, 1000, tier_faults=0.0)
    assert pages["host loaded"] > 0
    assert pages["disk loaded"] > 0
    assert not [name for name in pages if "failed" in name]


@pytest.mark.parametrize("shape", [pytest.param("colocated", marks=pytest.mark.full), "pair"])
def test_tokens_do_not_depend_on_tiers_that_fail_and_lie(shape: Shape) -> None:
    pages = run(shape, 2000, tier_faults=0.1)
    assert pages["host loaded"] > 0
    assert pages["host load_failed"] > 0
    assert pages["disk store_failed"] > 0


@pytest.mark.parametrize("shape", ["colocated", "pair"])
def test_stages_that_crash_lose_their_host_tier_and_find_their_disk(shape: Shape) -> None:
    pages = run(shape, 3000, crash=0.9, tier_faults=0.05)
    assert pages["disk restored"] > 0


def test_storms_of_cancels_leave_no_page_behind() -> None:
    # most requests end before a page of theirs is worth a copy: twice the seeds
    pages = run("colocated", 4000, 2 * BATCH, cancel=0.9, arrivals_s=0.001)
    assert pages["host stored"] > 0


def test_nan_does_not_spread_by_the_tiers() -> None:
    run("colocated", 5000, has_nan_token=True, cancel=0.1)


@pytest.mark.parametrize("shape", ["colocated", "pair"])
@pytest.mark.parametrize("tiers", [True, False])
def test_tokens_do_not_depend_on_kv_files_that_come_and_go_and_are_bad(shape: Shape, tiers: bool) -> None:
    pages = run(shape, 7000, tier_faults=0.1, library=True, tiers=tiers, crash=0.3)
    assert pages["library loaded"] > 100
    assert pages["library load_failed"] > 10
    assert pages["library dropped"] > 100


def test_nan_does_not_spread_by_kv_files() -> None:
    pages = run("colocated", 8000, has_nan_token=True, library=True, tiers=False)
    assert pages["library loaded"] > 100


@pytest.mark.full
def test_the_same_requests_give_the_same_tokens_with_tiers_and_without() -> None:
    compared = 0
    for seed in range(6000, 6000 + BATCH):

        def results(tiers: bool, seed: int = seed) -> SimulationReport:
            return simulate(Scenario(seed=seed, cancel=0.0, crash=0.0, tiers=tiers, requests=15))

        alone, tiered = results(False).results, results(True).results
        for key in alone.keys() & tiered.keys():
            compared += 1
            longer, shorter = sorted((alone[key][0], tiered[key][0]), key=len, reverse=True)
            assert longer[: len(shorter)] == shorter  # the pool's size may end one of them earlier
    assert compared > 5 * BATCH


def test_a_schedule_follows_from_its_seed() -> None:
    scenario = Scenario(seed=7, tiers=True, tier_faults=0.1, crash=0.5)
    assert simulate(scenario) == simulate(scenario)
