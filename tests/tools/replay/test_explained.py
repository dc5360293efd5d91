"""Looking at a recording changes nothing of what is decided, and every state of a random schedule can be told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.scheduler.recording.file import Recording, read_recording
from headrace.testing.scenario import Scenario
from headrace.testing.simulator import simulate
from headrace.tools.replay import moment, picture, story
from headrace.tools.replay.check import check
from headrace.tools.replay.playback import Playback
from headrace.tools.replay.timeline import gather
from tests.soak.cases import case_of
from tests.tools.replay.tapes import taped, write

STORIES = 6  # of a recording


def recordings(seeds: range, folder: Path) -> Iterator[Recording]:
    """Of all schedulers of the simulated schedules among the cases of the soak."""
    for seed in seeds:
        if isinstance(scenario := case_of(seed), Scenario):
            with taped(hidden=not (scenario.tiers or scenario.library)) as tapes:
                assert not simulate(scenario).violations
            for tape in tapes:
                yield read_recording(write(tape, folder, every=150))


def explain(recording: Recording) -> None:
    """Ask all that can be asked, and compare digests meanwhile."""
    verdict, _ = check(recording)
    assert verdict.equal, verdict.differences
    timeline, playback = gather(recording)
    assert not playback.differed
    assert "</svg>" in picture.as_html(timeline, "a schedule", picture.whole(timeline))
    looked_at = Playback(recording)
    for position in range(0, len(looked_at), max(1, len(looked_at) // 5)):
        looked_at.seek(position)
        assert "queues" in moment.as_text(looked_at)
    assert all(step.equal for step in looked_at)
    for rid in list(dict.fromkeys(life.rid for life in timeline.lives))[:STORIES]:
        told = Playback(recording)
        assert story.tell(told, rid).startswith(f"{rid}: ")
        assert not told.differed


@pytest.mark.full
@pytest.mark.parametrize("first", [7000, 7015])
def test_explaining_disturbs_nothing(first: int, tmp_path: Path) -> None:
    count = 0
    for recording in recordings(range(first, first + 15), tmp_path):
        explain(recording)
        count += 1
    assert count >= 10


@pytest.mark.full
@pytest.mark.parametrize("first", range(40_000, 42_000, 200))
def test_many_schedules_are_explained(first: int, tmp_path: Path) -> None:
    for recording in recordings(range(first, first + 200), tmp_path):
        explain(recording)
