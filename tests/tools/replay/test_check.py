"""Recordings of random schedules give the same decisions again; what differs is found, named and told."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli import commands as cli
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.scheduler.recording.file import read_recording
from headrace.scheduler.scheduler import Scheduler
from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate
from headrace.tools.replay.check import check
from headrace.tools.replay.playback import Playback
from tests.scheduler.bench import Bench
from tests.scheduler.recordings import Tape
from tests.tools.replay.tapes import taped, write


def schedules(seed: int, *, hidden: bool = True) -> list[Tape]:
    """A random schedule of a pair or of a colocated server, with all that may go wrong."""
    shape = "pair" if seed % 2 else "colocated"
    scenario = Scenario(seed, shape=shape, stall=0.02, crash=0.2, opened=0.2, tiers=not hidden, dp=1 + seed % 5 // 4)
    with taped(hidden=hidden) as tapes:
        assert not simulate(scenario).violations
    return tapes


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_are_decided_again(seed: int, tmp_path: Path) -> None:
    for tape in schedules(seed, hidden=seed % 3 > 0):
        verdict, playback = check(read_recording(write(tape, tmp_path)))
        assert verdict.equal, verdict.differences
        assert (verdict.calls, len(playback)) == (len(tape.calls), len(tape.calls))
        assert verdict.passes > 0
        assert all(second.equal for second in verdict.seconds)
        assert sum(second.calls for second in verdict.seconds) == len(tape.calls)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_state_is_reached_forward_and_back(seed: int, tmp_path: Path) -> None:
    """Wherever it jumps to, the next call has its recorded effects, and the counts are those of going straight on."""
    recording = read_recording(write(schedules(seed)[0], tmp_path, every=25))
    straight, counts = Playback(recording), []
    for _ in straight:
        counts.append((straight.scheduler.state.phases, straight.scheduler.state.unplanned))
    jumping = Playback(recording)
    for position in (len(counts) // 2, len(counts) - 1, 3, len(counts) // 3, len(counts), 1):
        jumping.seek(position)
        state = jumping.scheduler.state
        assert jumping.position == position
        assert (state.phases, state.unplanned) == counts[position - 1]
        step = jumping.step()
        assert step is None if position == len(counts) else step is not None and step.equal
    at = jumping.since(jumping.call(len(counts) // 2).now)
    position = jumping.position_at(at)
    assert jumping.since(jumping.call(position - 1).now) <= at
    assert position == len(counts) or jumping.since(jumping.call(position).now) > at


class _Planner:
    """A release that decides otherwise from some call on."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.plan = Scheduler.plan

    def __call__(self, scheduler: Scheduler, now: float) -> list[object]:
        effects = self.plan(scheduler, now)
        if any(isinstance(effect, Forward) for effect in effects):
            self.left -= 1
            if self.left == 0:
                return effects[:-1]
        return list(effects)


def test_the_first_call_that_differs_is_named_with_what_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(schedules(0)[0], tmp_path, every=30)
    planner = _Planner(4)
    monkeypatch.setattr(Scheduler, "plan", lambda scheduler, now: planner(scheduler, now))
    assert cli.main(["replay", str(path), "--verbose"]) == 1
    out = capsys.readouterr().out
    different = [line for line in out.splitlines() if line.startswith("different: ")]
    assert len(different) == 1, "the next segments begin from snapshots of their own"
    assert ": plan" in different[0]
    assert "differs: " in out
    assert out.rstrip().endswith("The decisions differ from the recorded ones")


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = schedules(2)[0]
    path = write(tape, tmp_path)
    assert cli.main(["replay", str(path), "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "progress is for terminals"
    first, second, *_ = out.splitlines()
    assert first.startswith(f"{path.name} (prefill server; a test): {len(tape.calls):,} calls in ")
    assert "token ids hidden" in first
    assert "from 2025-11-24" in first
    assert second.startswith("12 requests arrive") or "requests arrive, 0 were here before" in second
    assert f"The same decisions again: the effects of all {len(tape.calls):,} calls have the recorded digests" in out
    assert "second  calls" in out


def test_a_recording_of_another_release_says_what_it_cannot_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(schedules(0)[0], tmp_path, version="0.1.2")
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "recorded by headrace 0.1.2" in out
    assert "equal digests are promised within one release only" in out
    assert "The same decisions again" in out


def test_a_crash_of_the_scheduler_is_raised_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with taped() as tapes:
        bench = Bench()
        bench.submit("a")
        bench.submit("b")
    tape = tapes[0]
    healthy = write(tape, tmp_path, "healthy.recording")
    crashed = write(tape, tmp_path, raised="RuntimeError: no such page")
    assert cli.main(["replay", str(crashed)]) == 1, "this release does not raise it"
    assert "recorded: RuntimeError: no such page" in capsys.readouterr().out
    handle = Scheduler.handle

    def raising(scheduler: Scheduler, event: object, now: float) -> object:
        if isinstance(event, Submit) and event.rid == "b":
            raise RuntimeError("no such page")
        return handle(scheduler, event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "handle", raising)
    assert cli.main(["replay", str(crashed)]) == 0
    out = capsys.readouterr().out
    assert "raises an exception, as it did then: call 2 at 0.000 s, segment 0: Submit b: 10 tokens, DecodeHere" in out
    assert "now: raised RuntimeError: no such page (" in out
    assert cli.main(["replay", str(healthy)]) == 1
    assert "different: call 2" in capsys.readouterr().out


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(schedules(1)[0], tmp_path_factory.mktemp("recordings"), every=60)


COMMANDS = ([], ["--at", "0"], ["--step"], ["why", "r1"], ["diff"], ["picture", "-o", "{out}"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_told_in_one_line(
    intact: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """Cut, or with bytes that were changed: never a traceback, whatever is asked."""
    content = bytearray(intact.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for at in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=3)):
        if content:
            content[at] ^= data.draw(st.integers(1, 255))
    path, out = intact.parent / "damaged.recording", intact.parent / "out.html"
    path.write_bytes(content)
    command = [part.format(out=out) for part in data.draw(st.sampled_from(COMMANDS))]
    capsys.readouterr()
    status = cli.main(["replay", str(path), *command])
    err = capsys.readouterr().err
    assert status in (0, 1, 2)
    if status == 2:
        assert err.startswith("headrace: ")
        assert err.count("\n") == 1
    else:
        assert err == ""


def test_every_prefix_of_the_first_section_is_refused(intact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, path = intact.read_bytes(), intact.parent / "cut.recording"
    for end in range(0, 2000, 97):
        path.write_bytes(content[:end])
        assert cli.main(["replay", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"headrace: {path}: ")
        assert err.count("\n") == 1


def test_a_state_that_no_scheduler_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checksum is right: the file was made so, or by another release."""
    bench = Bench()
    bench.submit("a")
    del bench.scheduler.state.replicas[0].queues.policy
    tape = Tape(bench.scheduler, (0,), hidden=False)
    tape.before(101.0)
    tape.made("plan", 101.0, None, [])
    path = tmp_path / "incident.recording"
    assert tape.write(path)
    statuses = []
    for command in ([], ["--at", "0"], ["why", "a"], ["diff"], ["picture", "-o", str(tmp_path / "x.html")]):
        statuses.append(cli.main(["replay", str(path), *command]))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err.count("\n") == (statuses[-1] == 2)
    assert statuses == [1, 2, 2, 2, 0]
