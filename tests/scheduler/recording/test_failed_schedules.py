"""A test that fails by a simulated schedule leaves a recording of it."""

import subprocess
import sys
from pathlib import Path

from headrace.scheduler.recording.file import read_recording
from tests.scheduler.recordings import replayed

TEST = """
from headrace.testing.scenario import Scenario
from headrace.testing.server import SimulatedServer
from headrace.testing.simulator import simulate

def test_broken(monkeypatch):
    monkeypatch.setattr(SimulatedServer, "finish", lambda server: server.violation("it is broken"))
    assert simulate(Scenario(11, "pair", requests=2)).violations == []

def test_expected(monkeypatch):
    monkeypatch.setattr(SimulatedServer, "finish", lambda server: server.violation("it is broken"))
    assert simulate(Scenario(12, requests=2)).violations

def test_raises(monkeypatch):
    def finish(_server):
        raise ValueError("a mistake")
    monkeypatch.setattr(SimulatedServer, "finish", finish)
    simulate(Scenario(13, requests=2))
"""


def test_failing_schedules_are_recorded(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = tmp_path / "test_it.py"
    path.write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", str(path)]
    done = subprocess.run(
        [*command, "-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    names = ["schedule-11-0.recording", "schedule-11-1.recording", "schedule-13-0.recording"]
    assert sorted(each.name for each in (tmp_path / "recordings").iterdir()) == names, done.stdout + done.stderr
    for name in names:
        assert f"recordings/{name}" in done.stdout
        count, problem = replayed(read_recording(tmp_path / "recordings" / name))
        assert (count > 20, problem) == (True, "")
