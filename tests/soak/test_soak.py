"""The soak: seeds are spread over processes, failures are shrunk and can be run again, transitions are declared."""

import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from headrace.core.incoming import IncomingState, RemoteWriter
from headrace.scheduler.recording.file import apply, read_recording
from headrace.scheduler.requests.phase import Phase
from headrace.testing.scenario import Scenario
from tests.scheduler import recordings
from tests.scheduler.recordings import replayed
from tests.soak.cases import Case, Result, as_json, case_of, from_json, run_case, signature
from tests.soak.coverage import Recorder
from tests.soak.mutants import MUTANTS, planted
from tests.soak.replays import WHOLE, run_recorded
from tests.soak.shrink import command, regression_test, shrink
from tests.soak.transitions import DECLARED, undeclared
from tests.transfer.schedules import ProtocolSchedule

SCHEDULES = 300
DOUBLE_END = next(mutant for mutant in MUTANTS if mutant.name == "a request ends twice")


def test_schedules_keep_every_guarantee_and_take_declared_transitions_only() -> None:
    recorder = Recorder()
    with recorder.installed():
        for seed in range(SCHEDULES):
            assert (problems := run_case(case_of(seed)).problems) == [], f"seed {seed}: {problems[:3]}"
    assert undeclared(recorder.seen) == set()
    assert len(recorder.seen) > len(DECLARED) // 3, "few transitions are taken"


def test_the_table_names_every_state() -> None:
    def states(*machines: str) -> set[str]:
        return {state for machine, *ends in DECLARED for state in (ends[0], ends[2]) if machine in machines}

    requests = states("own request", "fetched request", "held request", "sent request") - {"-", "gone"}
    assert requests == {phase.value for phase in Phase}
    assert states("incoming transfer") == {state.value for state in IncomingState}
    assert states("remote writer") == {writer.value for writer in RemoteWriter} - {RemoteWriter.NONE.value}


def test_what_has_failed_never_goes_on() -> None:
    assert {after for machine, before, _, after in DECLARED if before == "failed"} == {"gone"}


def test_a_transition_that_is_not_declared_is_found() -> None:
    recorder = Recorder()
    seen = {("own request", "failed", "PlanDone", "generating"), *recorder.seen}
    assert undeclared(seen) == seen


def test_a_case_follows_from_its_seed_and_can_be_written_and_read() -> None:
    kinds = set()
    for seed in range(200):
        case = case_of(seed)
        kinds.add(type(case))
        assert case == case_of(seed)
        assert from_json(as_json(case)) == case
    assert kinds == {Scenario, ProtocolSchedule}


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"scenario": {"sead": "x"}, "protocol": {}}', '{"scenario": {"seed": "x"}}']
)
def test_other_text_is_no_case(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unknown|Expected"):
        from_json(text)


def test_a_failing_schedule_is_shrunk_and_fails_again() -> None:
    """A planted bug: one request is enough for it, without any fault."""
    with planted(DOUBLE_END):
        case, problems = next(
            (case, problems)
            for case in (Scenario(seed, "pair", requests=4, cancel=0.5, tiers=True) for seed in range(50))
            if (problems := run_case(case).problems)
        )
        simple = shrink(case, problems[0])
        assert isinstance(simple.case, Scenario)
        again = run_case(from_json(re.findall("'(.*)'", command(simple.case))[0]))
        assert any(signature(text) == signature(problems[0]) for text in again.problems)
        assert simple == shrink(case, problems[0]), "shrinking is deterministic"
    assert (simple.case.requests, simple.case.shape, simple.case.cancel, simple.case.tiers) == (
        1,
        "colocated",
        0.0,
        False,
    )
    assert simple.case.crash == simple.case.lost_peer == 0.0
    assert run_case(simple.case).problems == [], "it is the bug that breaks it"
    test = regression_test(simple.case, simple.problem)
    compile(test, "regression", "exec")
    assert f"simulate(Scenario(seed={simple.case.seed}" in test


def test_actions_that_do_not_matter_are_left_out() -> None:
    """A made-up failure that needs actions 3 and 11 of 14."""

    def run(case: Case) -> Result:
        assert isinstance(case, ProtocolSchedule)
        broken = not {3, 11} & set(case.skipped) and (case.steps is None or case.steps >= 12)
        return Result(["both were there"] if broken else [], 14, Counter())

    case = shrink(ProtocolSchedule(5), "both were there", run).case
    assert isinstance(case, ProtocolSchedule)
    assert case.skipped == tuple(sorted(set(range(14)) - {3, 11}))
    assert not any((case.loss, case.repeat, case.delay, case.cut, case.components, case.damage))


def test_an_action_that_is_skipped_changes_no_draw_before_it() -> None:
    rng = random.Random(3)
    for seed in range(20):
        whole = Scenario(seed, "pair", requests=3, small=True, cancel=0.9)
        skipped = tuple(rng.sample(range(6), 2))
        assert run_case(Scenario(seed, "pair", requests=3, small=True, cancel=0.9, skipped=skipped)).problems == []
        assert run_case(whole).problems == []


def soak(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.soak", "--processes", "2", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_seeds_are_spread_over_processes_and_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    with soak("--schedules", "41", "--first-seed", "700", "--report", str(report)) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "41 schedules" in out
    text = report.read_text()
    assert "seeds: from 700, every one below 741" in text
    assert f"of {len(DECLARED)} declared" in text
    assert "Declared and never seen:" in text


def test_what_decides_otherwise_when_it_is_made_again_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = Scenario(2 * WHOLE, "pair", requests=2, cancel=0.0, crash=0.0, lost_peer=0.0)
    result = run_recorded(scenario)
    assert (result.problems, result.recordings, result.replays["schedulers"]) == ([], (), 2)
    assert result.replays["calls made again"] > result.replays["calls recorded"] > 20
    with monkeypatch.context() as patched:
        patched.setattr(recordings, "apply", lambda scheduler, call: apply(scheduler, call)[1:])
        result = run_recorded(scenario)
    assert any("replay of scheduler" in problem for problem in result.problems)
    assert [replayed(read_recording(path))[1] for path in result.recordings] == ["", ""]


def test_recorded_schedules_are_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    with soak("--recorded", "--schedules", "21", "--first-seed", "800", "--report", str(report)) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "21 schedules" in out
    assert re.search(r"\d+  calls made again", report.read_text())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_it_with_a_report(number: signal.Signals, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    with soak("--hours", "1", "--report", str(report)) as process:
        time.sleep(5.0)  # any time is good for it, also while the processes start
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert ", interrupted" in report.read_text().splitlines()[0]
