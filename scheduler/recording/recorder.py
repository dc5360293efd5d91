"""The flight recorder: keeps the last minutes of what a scheduler was given and decided, and writes them down.

    loop ──► handle, plan, tick ──► Scheduler ──► effects ──► loop
                  └── references to events and effects, in a list

    segment ends ──► forked child: calls and the next snapshot into the ring  ┐ copy on write: the loop goes on
    alarm, signal, POST /debug/record ──► forked child: ring into a file      ┘

On the way of an event nothing is done but to append to the list. What a child cannot write (a full disk, a lost folder)
is counted, and told once.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from headrace.core.messages.frontend import QueryStats, Shutdown, StageLost, WriteRecording
from headrace.core.messages.replies import RecordingWritten, StageDown
from headrace.core.messages.stage_events import StageFailed, StageSilence
from headrace.core.runtime.forked import Forked, ForkFailed
from headrace.core.stats import Counters, Stats
from headrace.scheduler.recording.file import SUFFIX, Header, Hides, RecordedCall, encode_calls, encode_snapshot
from headrace.scheduler.recording.snapshot import SnapshotError
from headrace.scheduler.recording.store import RecordingStore
from headrace.scheduler.scheduler import Effect, Event, Scheduler

log = logging.getLogger(__name__)

SEGMENT_S = 60.0  # each costs a fork, and copies of the pages that are written meanwhile
SEGMENT_CALLS = 50_000
MOST_CALLS = 4 * SEGMENT_CALLS  # that are kept while a child writes
WRITE_LIMIT_S = 120.0
ALARM_S = 2.0  # from an alarm to its file, which has what came of it
BETWEEN_ALARMS_S = 60.0
BETWEEN_ALERTS_S = 300.0  # files of them, so that a storm leaves those of other reasons
FLUSH_WAIT_S = 10.0
FREED_CALLS = 1000  # at a time, once they are written: about a millisecond

Reason = Literal["request", "signal", "alert", "integrity", "stage_failed", "exception", "killed"]
"""Why a file was written; killed: the server before this one was."""

_PER_CALL = 4  # entries of the list: kind, time, event, effects
_WATCHED = frozenset((StageFailed, StageLost, StageSilence, QueryStats, Shutdown))


class _Written(msgspec.Struct, frozen=True):
    """What a child has to say."""

    bytes: int = 0
    error: str = ""


class _Wanted(msgspec.Struct, frozen=True):
    reason: Reason
    due: float
    token: int | None = None
    alerts: str = ""

    @property
    def words(self) -> str:
        """For the log and the header."""
        return f"{self.reason}: {self.alerts}" if self.alerts else self.reason


class FlightRecorder:
    """A Scheduler, whose calls are recorded; and an event source of its loop, for the children that write."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: RecordingStore,
        header: Header,
        hiding: Hides,
        *,
        keep_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        reply: Callable[[RecordingWritten], object],
    ) -> None:
        """keep_s: seconds that the ring has at least. clock: the loop's time. wall: seconds since the epoch. reply:
        takes the answers to WriteRecording."""
        self._scheduler = scheduler
        self._store = store
        self._header = header
        self._hiding = hiding
        self._keep_s = keep_s
        self._clock = clock
        self._wall = wall
        self._reply = reply
        self._calls: list[Any] = []
        self._written: list[Any] = []  # calls that are being written, or are to be freed
        self._number = -1  # of the segment that is recorded
        self._ends = 0.0
        self._begun: deque[tuple[int, float]] = deque()  # segments in the ring
        self._whole = False  # the segment's snapshot was written
        self._child: Forked | None = None
        self._child_until = 0.0
        self._writes: _Wanted | None = None  # the file that the child writes; None: a segment
        self._name = ""
        self._wanted: list[_Wanted] = []
        self._last_alarm = self._last_alert = float("-inf")
        self._sound = True  # the last integrity check has found nothing
        self._failing = self._ended = False
        self._counters = Counters()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Scheduler.handle()."""
        if type(event) is WriteRecording:  # for the recorder itself
            self._want(event, now)
            return []
        calls = self._calls
        calls += ("handle", now, event)
        effects = self._scheduler.handle(event, now)
        calls.append(effects)
        if type(event) in _WATCHED:
            self._watch(event, now)
        return effects

    def plan(self, now: float) -> list[Effect]:
        """Scheduler.plan()."""
        calls = self._calls
        calls += ("plan", now, None)
        effects = self._scheduler.plan(now)
        calls.append(effects)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Scheduler.tick()."""
        calls = self._calls
        calls += ("tick", now, None)
        effects = self._scheduler.tick(now)
        calls.append(effects)
        if any(isinstance(effect, StageDown) for effect in effects):
            self._alarm("stage_failed", now)
        return effects

    def next_deadline(self) -> float | None:
        """Scheduler.next_deadline()."""
        return self._scheduler.next_deadline()

    @property
    def source(self) -> "RecorderSource":
        """What the loop waits for on behalf of the recorder."""
        return RecorderSource(self)

    def statistics(self) -> Stats:
        """For /metrics."""
        return Stats(self._counters.snapshot())

    def flush(self, error: BaseException) -> None:
        """Write a file now, in this process: the scheduler has raised, or its loop."""
        raised = f"{type(error).__name__}: {error}"
        if self._child is not None:
            self._await_child()
        if not self._whole:
            return
        missing = -len(self._calls) % _PER_CALL
        self._calls += [()] * missing  # of the call that has raised
        wanted = _Wanted("exception", self._clock())
        name = self._name_of(wanted)
        written = self._write_file(wanted, name, raised if missing else "")
        if written.error:
            log.error("the recording of what came before could not be written: %s", written.error)
        else:
            log.error("what came before is recorded in %s", name)

    def close(self) -> None:
        """End the child. The ring goes if the scheduler was told to end, and stays for the next start if not."""
        if self._child is not None:
            self._child.close()
        if self._ended:
            self._store.clear()
        self._store.close()

    # What the loop waits for.

    def descriptors(self) -> Sequence[int]:
        """Readable when the child has something to say."""
        return () if self._child is None else (self._child.fileno(),)

    def due(self) -> float | None:
        """When work() has something to do."""
        if self._child is not None:
            return 0.0 if len(self._calls) > _PER_CALL * MOST_CALLS else self._child_until
        if self._written or len(self._calls) > _PER_CALL * SEGMENT_CALLS:
            return 0.0
        return min([self._ends, *(wanted.due for wanted in self._wanted)])

    def work(self, now: float) -> None:
        """Begin to write what is due; take in what a child has written."""
        if self._child is not None:
            self._hear(self._child)
            if len(self._calls) > _PER_CALL * MOST_CALLS:
                self._calls, self._whole = [], False
            return
        if self._written:  # while the child lived its pages would have been copied first
            del self._written[-_PER_CALL * FREED_CALLS :]
            return
        wanted = next((each for each in self._wanted if each.due <= now), None)
        if wanted is not None and self._whole:
            self._wanted.remove(wanted)
            self._writes, self._name = wanted, self._name_of(wanted)
            self._fork(lambda: self._write_file(wanted, self._name), now)
        else:
            self._next_segment(now)

    def _watch(self, event: Event, now: float) -> None:
        """An event that may have to be reported was handled."""
        match event:
            case StageFailed() | StageLost():
                self._alarm("stage_failed", now)
            case StageSilence() if event.reason:
                self._alarm("stage_failed", now)
            case QueryStats() if self._sound is bool(self._scheduler.problems):
                self._sound = not self._sound
                if not self._sound:
                    self._alarm("integrity", now)
            case Shutdown():
                self._ended = True

    def _want(self, event: WriteRecording, now: float) -> None:
        wanted = _Wanted(event.reason, now, event.token, event.alerts)
        if event.reason == "alert":
            if now - self._last_alert < BETWEEN_ALERTS_S:
                self._answer(wanted, "", _Written())
                return
            self._last_alert = now
        self._wanted.append(wanted)

    def _alarm(self, reason: Reason, now: float) -> None:
        if now - self._last_alarm >= BETWEEN_ALARMS_S:
            self._last_alarm = now
            self._wanted.append(_Wanted(reason, now + ALARM_S))

    def _next_segment(self, now: float) -> None:
        number, self._written = self._number, self._calls
        calls = self._written if self._whole else None
        self._number, self._calls, self._ends = number + 1, [], now + SEGMENT_S
        self._begun.append((number + 1, now))
        while len(self._begun) > 1 and self._begun[1][1] <= now - self._keep_s:
            self._begun.popleft()
        first = self._begun[0][0]
        self._whole, self._writes = False, None
        self._fork(lambda: self._write_segment(number, calls, now, first), now)

    def _fork(self, write: Callable[[], _Written], now: float) -> None:
        self._child_until, began = now + WRITE_LIMIT_S + 2.0, self._clock()
        try:
            self._child = Forked(lambda: msgspec.msgpack.encode(write()), WRITE_LIMIT_S)
        except OSError as error:
            self._conclude(_Written(error=f"no process could be forked: {error.strerror}"))
        self._counters.add("recording_fork_seconds_total", self._clock() - began)

    def _hear(self, child: Forked) -> None:
        try:
            found = child.result()
            if found is None:
                return
            written = msgspec.msgpack.decode(found, type=_Written)
        except ForkFailed as error:
            log.debug("%s", error)
            written = _Written(error=str(error).strip().rpartition("\n")[2])
        child.close()
        self._child = None
        self._conclude(written)

    def _conclude(self, written: _Written) -> None:
        """A child has written, or has failed to."""
        wanted = self._writes
        self._counters.add("recording_bytes_total", written.bytes)
        if written.error:
            self._counters.add("recording_failures_total")
            if not self._failing:
                log.warning("--record: nothing is recorded: %s", written.error)
            self._failing = True
        elif self._failing and wanted is None:
            log.warning("--record: recording again")
            self._failing = False
        if wanted is None:
            self._whole = not written.error
            self._counters.add("recording_segments_total", float(self._whole))
            if self._failing:
                self._refuse_wanted(written.error)
            return
        if not written.error:
            self._counters.add("recording_files_total", labels=(wanted.reason,))
            log.warning("recorded in %s (%s)", self._name, wanted.words)
        self._answer(wanted, self._name, written)

    def _refuse_wanted(self, error: str) -> None:
        """There is nothing to write a file of."""
        refused, self._wanted = self._wanted, []
        for wanted in refused:
            self._answer(wanted, "", _Written(error=error))

    def _answer(self, wanted: _Wanted, name: str, written: _Written) -> None:
        if written.error and wanted.reason == "alert":
            self._last_alert = float("-inf")  # it will be posted again
        if wanted.token is not None:
            self._reply(RecordingWritten(token=wanted.token, name=name, bytes=written.bytes, error=written.error))

    def _await_child(self) -> None:
        """Wait for the child that writes the snapshot of what is recorded: the process is about to end."""
        until = self._clock() + FLUSH_WAIT_S
        while self._child is not None and self._clock() < until:
            self._hear(self._child)

    def _name_of(self, wanted: _Wanted) -> str:
        """When, and why."""
        moment = datetime.fromtimestamp(self._wall(), UTC)
        return f"{moment:%Y%m%dT%H%M%S}.{moment.microsecond // 1000:03}Z-{wanted.reason}{SUFFIX}"

    # In the child.

    def _write_segment(self, number: int, calls: list[Any] | None, now: float, first: int) -> _Written:
        """The calls of the segment that has ended, if it has a snapshot, and the snapshot of the next one."""
        try:
            size = 0
            if number < 0:
                self._keep_what_is_left()
                self._store.begin(self._header)
            elif calls is not None:
                size += self._store.calls(number, encode_calls(number, _grouped(calls), self._hiding))
            section = encode_snapshot(number + 1, now, self._scheduler, self._hiding)
            size += self._store.snapshot(number + 1, section)
            self._store.prune(first)
        except (OSError, SnapshotError) as error:
            return _Written(error=str(error))
        return _Written(size)

    def _write_file(self, wanted: _Wanted, name: str, raised: str = "") -> _Written:
        """What the ring has, and the calls since."""
        header = msgspec.structs.replace(self._header, reason=wanted.words, written_at=self._wall())
        try:
            calls = encode_calls(self._number, _grouped(self._calls), self._hiding, raised)
            return _Written(self._store.incident(name, header, self._number, calls))
        except (OSError, SnapshotError) as error:
            return _Written(error=str(error))

    def _keep_what_is_left(self) -> None:
        """A server that was killed has left its ring: make it a file."""
        header = self._store.header() if self._store.left else None
        if header is not None:
            header = msgspec.structs.replace(header, reason="killed", written_at=self._wall())
            self._store.incident(self._name_of(_Wanted("killed", 0.0)), header, 1 << 62, None)
        self._store.clear()


class RecorderSource:
    """The recorder as an event source without events or commands."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def sockets(self) -> Sequence[int]:
        """The pipe from the child."""
        return self._recorder.descriptors()

    def receive(self, now: float) -> Sequence[Event]:
        """The child has written."""
        self._recorder.work(now)
        return ()

    def apply(self, command: Any, now: float) -> Sequence[Event]:
        """There are no commands."""
        raise TypeError(f"the recorder takes no {type(command).__name__}")

    def tick(self, now: float) -> Sequence[Event]:
        """Something is to be written."""
        self._recorder.work(now)
        return ()

    def next_deadline(self) -> float | None:
        """When."""
        return self._recorder.due()

    def close(self) -> None:
        """End the child."""
        self._recorder.close()


def _grouped(calls: Sequence[Any]) -> list[RecordedCall]:
    return [RecordedCall(*calls[at : at + _PER_CALL]) for at in range(0, len(calls), _PER_CALL)]
