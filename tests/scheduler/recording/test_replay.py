"""Random schedules, recorded from their start and from a random moment, and replayed: calls have the same effects."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate
from tests.scheduler.recordings import check_tape, replayed, taped, taped_at_random
from tests.soak.cases import case_of
from tests.soak.replays import run_recorded

BATCH = 12


def replay(scenario: Scenario, path: Path) -> int:
    """Run a schedule, record its servers, and replay them from files. Returns the calls."""
    with taped_at_random(scenario) as tapes:
        simulate(scenario)
    return sum(check_tape(tape, path) for tape in tapes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "colocated"},
        {"shape": "pair", "rooms": 0.5, "other_prompt": 0.2, "hold": 0.5},
        {"shape": "pair", "prefixes": 3, "returns": 0.5},
        {"shape": "pair", "prefills": 3, "lost_peer": 0.9, "crash": 0.3},
        {"shape": "colocated", "tiers": True, "library": True, "tier_faults": 0.1},
        {"shape": "pair", "states": True},
        {"shape": "pair", "dp": 2, "lockstep": True},
        {"shape": "colocated", "dp": 3, "has_nan_token": True},
    ],
    ids=str,
)
def test_random_schedules_replay_with_the_same_effects(changes: dict[str, object], tmp_path: Path) -> None:
    calls = 0
    for seed in range(BATCH):
        calls += replay(Scenario(seed + 300_000, requests=6, **changes), tmp_path / "file")  # type: ignore[arg-type]
    assert calls > 60 * BATCH


def test_schedules_with_promises_replay_from_amid_them() -> None:
    """The second snapshot of some has forecasts, promises that are open, and what was learnt of those that ended."""
    promised: Counter[str] = Counter()
    for seed in range(500_000, 500_000 + BATCH):
        scenario = Scenario(seed, requests=12, arrivals_s=0.02, cancel=0.1, promise="p99")
        with taped_at_random(scenario) as tapes:
            simulate(scenario)
        for tape in tapes:
            assert replayed(tape.recording(), beyond=True)[1] == "", seed
            snapshots = [segment.restore() for segment in tape.recording().segments]
            promised["before a snapshot"] += any(each._state.promises.forecast is not None for each in snapshots)
            promised.update(type(effect).__name__ for call in tape.calls for effect in call.effects)
            promised.update(type(call.event).__name__ for call in tape.calls)
    for name in ("MakeForecast", "ForecastMade", "Promised", "before a snapshot"):
        assert promised[name] > 2, (name, promised)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1_000_000, 1_004_000, 500))
def test_many_random_schedules(first: int) -> None:
    replays: Counter[str] = Counter()
    for seed in range(first, first + 500):
        result = run_recorded(case_of(seed, protocol=0.0))
        assert result.problems == [], seed
        replays += result.replays
    assert replays["calls made again"] > replays["calls recorded"] > 500 * 20


def test_a_hidden_prompt_that_comes_a_segment_after_its_reservation_has_the_hash_that_is_reserved_for() -> None:
    scenario = Scenario(
        10_003_719, "pair", requests=3, arrivals_s=0.003, abandon=0.0, rooms=1.0, other_prompt=0.3, small=True
    )
    assert run_recorded(scenario).problems == []


def test_a_replay_does_not_depend_on_the_hashes_of_a_process(tmp_path: Path) -> None:
    """Another process hashes texts otherwise, so that sets have other orders."""
    for seed in range(6):
        with taped() as tapes:
            simulate(Scenario(seed + 400_000, "pair", requests=6))
        for number, tape in enumerate(tapes):
            assert tape.write(tmp_path / f"{seed}-{number}")
    code = (
        "import sys; from headrace.scheduler.recording.file import read_recording; "
        "from tests.scheduler.recordings import replayed; "
        "print(*{replayed(read_recording(path))[1] for path in sys.argv[1:]})"
    )
    files = sorted(map(str, tmp_path.iterdir()))
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, *files],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout.strip(), done.stderr) == ("", "")
