"""Recordings of the schedulers of simulated schedules: from a moment on, as the flight recorder writes them."""

import platform
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headrace.core.version import headrace_version
from headrace.scheduler.recording.digest import digest
from headrace.scheduler.recording.file import (
    KINDS,
    SUFFIX,
    Header,
    Hides,
    Kind,
    RecordedCall,
    Recording,
    apply,
    encode_calls,
    encode_header,
    encode_snapshot,
    read_recording,
)
from headrace.scheduler.recording.hiding import Hiding, Plain
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.testing.scenario import Scenario
from headrace.testing.server import SimulationReport
from headrace.testing.simulator import Simulation, simulate


class Tape:
    """The calls of one scheduler, from one of them on."""

    def __init__(self, scheduler: Scheduler, first: int, hidden: bool) -> None:
        """first: the call that begins it. hidden: token ids are hidden."""
        self.scheduler = scheduler
        self.calls: list[RecordedCall] = []
        config = scheduler._state.config
        self.header = Header(
            version=headrace_version(),
            python=platform.python_version(),
            config=config,
            hidden=hidden,
            wall_offset_s=0.0,
        )
        self._hiding: Hides = Hiding(random.randbytes(32), config.vocab_size, config.page_size) if hidden else Plain()
        self._left = first
        self._snapshot: bytes | None = None
        self._raised = ""

    def before(self, now: float) -> None:
        """A call comes."""
        if self._left == 0:
            self._snapshot = encode_snapshot(0, now, self.scheduler, self._hiding)
        self._left -= 1

    def made(self, kind: Kind, now: float, event: Event | None, effects: list[Effect]) -> None:
        """A call was made."""
        if self._snapshot is not None:
            self.calls.append(RecordedCall(kind, now, event, effects))

    def failed(self, kind: Kind, now: float, event: Event | None, error: Exception) -> None:
        """A call has raised."""
        self.made(kind, now, event, [])
        self._raised = f"{type(error).__name__}: {error}"

    def write(self, path: Path, raised: str = "") -> bool:
        """Write it as a file. raised: by the last call, if that is to be told though it was not. False if it has not
        begun."""
        if self._snapshot is None:
            return False
        calls = encode_calls(0, self.calls, self._hiding, raised or self._raised)
        path.write_bytes(encode_header(self.header) + self._snapshot + calls)
        return True


@contextmanager
def taped(first: Callable[[], int] = lambda: 0, hidden: Callable[[], bool] = lambda: False) -> Iterator[list[Tape]]:
    """Tapes of all schedulers that are made meanwhile, in order. first: the call with which a tape begins."""
    tapes: dict[int, Tape] = {}
    make = Scheduler.__init__

    def made(self: Scheduler, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        tapes[id(self)] = Tape(self, first(), hidden())

    def recorded(kind: Kind) -> Callable[..., list[Effect]]:
        original = getattr(Scheduler, kind)

        def call(self: Scheduler, *arguments: Any) -> list[Effect]:
            tape, now, event = tapes[id(self)], arguments[-1], arguments[0] if kind == "handle" else None
            tape.before(now)
            try:
                effects: list[Effect] = original(self, *arguments)
            except Exception as error:
                tape.failed(kind, now, event, error)
                raise
            tape.made(kind, now, event, effects)
            return effects

        return call

    found: list[Tape] = []
    with patch.multiple(Scheduler, __init__=made, **{kind: recorded(kind) for kind in KINDS}):
        try:
            yield found
        finally:
            found += tapes.values()


def replayed(recording: Recording) -> tuple[int, str]:
    """Calls that were made again, and the first one whose effects were others; "" for none."""
    count = 0
    for segment in recording.segments:
        scheduler = segment.restore()
        for call in segment.calls:
            count += 1
            effects = apply(scheduler, call)
            if digest(effects) != call.digest:
                kinds = [type(effect).__name__ for effect in effects]
                return count, f"call {count}, {call.kind} {type(call.event).__name__} at {call.now}: {kinds}"
    return count, ""


def check_tape(tape: Tape, path: Path) -> int:
    """Write a tape, read it and make its calls again. Returns how many; AssertionError where one differs."""
    if not tape.write(path):
        return 0
    recording = read_recording(path)
    count, problem = replayed(recording)
    assert not problem, problem
    assert count == len(tape.calls)
    return count


MOST_RECORDED = 4  # schedules of one test
FOLDER = Path("recordings")
"""Where failing tests leave theirs, below the working directory."""


def save_recordings(run: Callable[[], object], name: str, folder: Path = FOLDER) -> list[Path]:
    """Run a schedule that has failed again, and write a recording of each of its schedulers: NAME-0.recording, ….
    A schedule follows from its seed, so that none is recorded before it has failed."""
    with taped() as tapes, suppress(Exception):
        run()
    if tapes:
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{number}{SUFFIX}" for number in range(len(tapes))]
    return [path for path, tape in zip(paths, tapes, strict=True) if tape.write(path)]


class FailedSchedules:
    """Remembers which simulated schedules of the running test broke a guarantee, and records them if it fails."""

    def __init__(self) -> None:
        self._failed: list[Scenario] = []

    def watch(self) -> None:
        """From now on, in this process."""
        run = Simulation.run

        def watched(simulation: Simulation) -> SimulationReport:
            report = None
            try:
                report = run(simulation)
                return report
            finally:
                if (report is None or report.violations) and len(self._failed) < MOST_RECORDED:
                    self._failed.append(simulation._scenario)

        Simulation.run = watched  # type: ignore[method-assign]

    def forget(self) -> None:
        """Another test begins."""
        self._failed.clear()

    def save(self) -> list[Path]:
        """The test has failed: record its schedules that broke a guarantee."""
        failed, self._failed = self._failed, []
        return [path for each in failed for path in save_recordings(partial(simulate, each), f"schedule-{each.seed}")]
