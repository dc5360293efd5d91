"""Recordings of the schedulers of simulated schedules: from a moment on, as the flight recorder writes them."""

import math
import platform
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from itertools import chain
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
    RecordedSegment,
    Recording,
    apply,
    encode_calls,
    encode_header,
    encode_snapshot,
    following,
    read_recording,
)
from headrace.scheduler.recording.hiding import Hiding, Plain
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.testing.scenario import Scenario
from headrace.testing.server import SimulationReport
from headrace.testing.simulator import Simulation, simulate


class Tape:
    """The calls of one scheduler, from one of them on, in segments."""

    def __init__(self, scheduler: Scheduler, begins: Sequence[int], hidden: bool) -> None:
        """begins: the calls with which segments begin, in order. hidden: token ids are hidden."""
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
        self._hiding: Hides = _hiding(config.vocab_size, config.page_size) if hidden else Plain()
        self._begins = deque(begins)
        self._count = 0
        self._snapshots: list[tuple[bytes, int]] = []  # and the calls before it
        self._raised = ""

    def before(self, now: float) -> None:
        """A call comes."""
        if self._begins and self._begins[0] == self._count:
            self._begins.popleft()
            number = len(self._snapshots)
            self._snapshots.append((encode_snapshot(number, now, self.scheduler, self._hiding), len(self.calls)))
        self._count += 1

    def made(self, kind: Kind, now: float, event: Event | None, effects: list[Effect]) -> None:
        """A call was made."""
        if self._snapshots:
            self.calls.append(RecordedCall(kind, now, event, effects))

    def failed(self, kind: Kind, now: float, event: Event | None, error: Exception) -> None:
        """A call has raised."""
        self.made(kind, now, event, [])
        self._raised = f"{type(error).__name__}: {error}"

    def sections(self, raised: str = "") -> Iterator[tuple[bytes, bytes]]:
        """Snapshot and calls of each segment. raised: by the last call, if that is to be told though it was not."""
        ends = [*(start for _, start in self._snapshots), len(self.calls)][1:]
        for number, ((snapshot, start), end) in enumerate(zip(self._snapshots, ends, strict=True)):
            last = raised or self._raised if end == len(self.calls) else ""
            yield snapshot, encode_calls(number, self.calls[start:end], self._hiding, last)

    def recording(self) -> Recording:
        """What a file of it would be read as."""
        return Recording(self.header, following([RecordedSegment(*each) for each in self.sections()]))

    def write(self, path: Path, raised: str = "") -> bool:
        """Write it as a file. raised: as for sections(). False if it has not begun."""
        if self._snapshots:
            path.write_bytes(b"".join(chain([encode_header(self.header)], *self.sections(raised))))
        return bool(self._snapshots)


@cache
def _hiding(vocab_size: int, page_size: int) -> Hiding:
    """With a key of this process."""
    return Hiding(random.randbytes(32), vocab_size, page_size)


@contextmanager
def taped(
    begins: Callable[[], Sequence[int]] = lambda: (0,), hidden: Callable[[], bool] = lambda: False
) -> Iterator[list[Tape]]:
    """Tapes of all schedulers that are made meanwhile, in order. begins: the calls with which segments begin."""
    tapes: dict[int, Tape] = {}
    make = Scheduler.__init__

    def made(self: Scheduler, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        tapes[id(self)] = Tape(self, begins(), hidden())

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


LATEST, LATEST_OF_SMALL = 600, 80  # call of a random snapshot


def taped_at_random(scenario: Scenario, *, whole: bool = True) -> AbstractContextManager[list[Tape]]:
    """Tapes of a schedule's schedulers from a random call on, some of them hidden. whole: with a segment before it."""
    rng = random.Random(scenario.seed)
    latest = math.log(LATEST_OF_SMALL if scenario.small else LATEST)
    hides = not (scenario.tiers or scenario.library)
    first = (0,) if whole else ()
    return taped(lambda: (*first, int(math.exp(rng.uniform(0, latest)))), lambda: hides and rng.random() < 0.5)


def replayed(recording: Recording, *, beyond: bool = False) -> tuple[int, str]:
    """Make the calls of each segment again, from its snapshot. beyond: and those of all segments after it. Returns how
    many, and the first one whose effects were others; "" for none."""
    count, segments = 0, recording.segments
    for number, segment in enumerate(segments):
        scheduler = segment.restore()
        for each in segments[number:] if beyond else (segment,):
            for call in each.calls:
                count += 1
                effects = apply(scheduler, call)
                if digest(effects) != call.digest:
                    kinds = [type(effect).__name__ for effect in effects]
                    where = f"call {count}, {call.kind} {type(call.event).__name__} at {call.now}"
                    return count, f"{where}, from snapshot {number}: {kinds}"
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
