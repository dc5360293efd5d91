"""Plays a recording: its calls go to a Scheduler that was restored from a snapshot, and digests of the effects are
compared with the recorded ones.

segment 0   snapshot ─► call call call call …      each call: effects, whose digest has to equal the recorded one
segment 1   snapshot ─► call call …                goes on with the same Scheduler; restored anew after a difference,
                                                   an exception, or where a segment is missing

Going back restores the snapshot of the segment, and applies its calls up to there.
"""

import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import NamedTuple

from headrace.scheduler.recording.digest import digest
from headrace.scheduler.recording.file import Call, Recording, RecordingError, apply
from headrace.scheduler.scheduler import Effect, Scheduler

Progress = Callable[[str, int, int], None]
"""Is told what is counted, how many are done, and of how many."""


def nobody(_what: str, _done: int, _of: int) -> None:
    """Nobody wants to know."""


class PlayedCall(NamedTuple):
    """A call that was applied."""

    position: int
    """Number of the call in the recording, from 0."""

    call: Call
    effects: list[Effect]
    equal: bool
    """The digest of the effects is the recorded one, or the call has raised an exception as it did then."""

    raised: str = ""
    """The exception that the scheduler has raised, and where; "" for none. Later calls of its segment are left out."""


class Playback:
    """A recording, and the Scheduler after some of its calls."""

    def __init__(
        self,
        recording: Recording,
        progress: Progress = nobody,
        prepare: Callable[[Scheduler], None] = lambda _scheduler: None,
    ) -> None:
        """progress: is told how far iterating is. prepare: is given each Scheduler that is restored. Raises
        RecordingError for a recording without calls, and for one that is damaged, as all of its methods do."""
        self.recording = recording
        self._progress = progress
        self._prepare = prepare
        self._segments = recording.segments
        self._starts = [0, *accumulate(len(segment.calls) for segment in self._segments)]
        if not self._starts[-1]:
            raise RecordingError("it has no calls")
        self.position = 0
        """Calls that have been applied."""

        self.differed = False
        """A call of this segment had other effects than the recorded ones, or has raised an exception."""

        self._segment = 0
        self._names: dict[int, str] = {}
        self.scheduler = self._restore(0)
        """As it is after those calls."""

    def __len__(self) -> int:
        """Calls of the recording."""
        return self._starts[-1]

    def __iter__(self) -> Iterator[PlayedCall]:
        """Apply the calls that are left, one by one."""
        while (step := self.step()) is not None:
            self._progress("calls", self.position, len(self))
            yield step

    def segment_of(self, position: int) -> int:
        """Number of the segment that a call is in; of the last one for what is behind it."""
        return min(bisect_right(self._starts, position), len(self._segments)) - 1

    def name_of(self, serial: int) -> str | None:
        """The id of the request that stages know by a number, or have known."""
        request = self.scheduler.state.requests.by_serial(serial)
        if request is not None:
            self._names[serial] = request.rid
        return self._names.get(serial)

    @property
    def began(self) -> float:
        """Time of the first call."""
        return self.call(0).now

    @property
    def seconds(self) -> float:
        """From the first call to the last one."""
        return self.call(len(self) - 1).now - self.began

    @property
    def now(self) -> float:
        """Time of the last call that was applied; that of the first one where none was."""
        return self.call(max(0, self.position - 1)).now

    def since(self, now: float) -> float:
        """A time of the recording as seconds since its first call."""
        return now - self.began

    def wall(self, now: float) -> str:
        """A time of the recording as time of day, in UTC."""
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        try:
            day = epoch + timedelta(seconds=self.recording.header.wall_offset_s + now)
        except (OverflowError, ValueError):
            return "an unknown time"
        return f"{day:%Y-%m-%d %H:%M:%S}.{day.microsecond // 1000:03d} UTC"

    def call(self, position: int) -> Call:
        """A call of the recording."""
        segment = self.segment_of(position)
        found: Call = self._segments[segment].calls[position - self._starts[segment]]
        return found

    def step(self) -> PlayedCall | None:
        """Apply the next call; None at the end."""
        position = self.position
        if position == len(self):
            return None
        if (segment := self.segment_of(position)) != self._segment:
            follows = self._segments[segment].number == self._segments[self._segment].number + 1
            self._segment = segment
            if self.differed or not follows:
                self.scheduler = self._restore(segment)
        call = self.call(position)
        try:
            effects = apply(self.scheduler, call)
        except Exception as error:  # a crash that was recorded, or whatever a damaged state leads to
            self.differed, self.position = True, self._starts[segment + 1]
            return PlayedCall(position, call, [], _told(error) == call.raised, _place(error))
        equal = digest(effects) == call.digest and not call.raised
        self.differed |= not equal
        self.position += 1
        return PlayedCall(position, call, effects, equal)

    def seek(self, position: int) -> None:
        """Go to the state after so many calls, forward or back."""
        target = max(0, min(position, len(self)))
        segment = self.segment_of(target)
        if not self._starts[segment] <= self.position <= target or self.differed:
            self._segment = segment
            self.scheduler, self.position = self._restore(segment), self._starts[segment]
        while self.position < target:
            self.step()

    def position_at(self, seconds: float) -> int:
        """How many calls were made until so many seconds after the first one."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.since(self.call(middle).now) <= seconds:
                low = middle + 1
            else:
                high = middle
        return low

    def _restore(self, segment: int) -> Scheduler:
        self.differed = False
        scheduler: Scheduler = self._segments[segment].restore()
        self._prepare(scheduler)
        return scheduler


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _place(error: Exception) -> str:
    """An exception, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(frame.filename.rsplit("/", 3)[-3:])
    return f"{_told(error)} ({place}:{frame.lineno}, {frame.name})"
