"""Records traces on demand: starts and ends a recording, and collects the parts of all processes."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from headrace.core.messages.frontend import AnyFrontendRequest, EndTrace, StartTrace
from headrace.core.messages.replies import StageTraced, Traced
from headrace.core.trace import SchedulerTrace
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError

TRACE_RUNNING = "trace_running"  # 409
PARTS_TIMEOUT_S = 5.0  # for the scheduler and the stages to send their parts


class RecordedTrace(msgspec.Struct, frozen=True):
    """The parts of one trace."""

    scheduler: SchedulerTrace
    stages: dict[int, bytes]
    """Encoded headrace.core.trace.StageTrace by stage; stages that did not answer in time are missing."""
    paused_s: float = 0.0
    """Seconds that the scheduler's times are behind the machine's monotonic clock."""


class _Parts:
    """The parts of one recording that have come so far."""

    def __init__(self, trace: int) -> None:
        self.trace = trace
        self.scheduler: SchedulerTrace | None = None
        self.paused_s = 0.0
        self.stages: dict[int, bytes] = {}
        self.complete = asyncio.Event()

    def add(self, part: Traced | StageTraced) -> None:
        if isinstance(part, Traced):
            self.scheduler, self.paused_s = part.scheduler, part.paused_s
        else:
            self.stages[part.stage] = part.spans
        if self.scheduler is not None and len(self.stages) >= self.scheduler.stages:
            self.complete.set()


class Tracer:
    """Records one trace at a time. post: sends to the scheduler, whose answers have to be passed to take(). timeout_s:
    for all parts to come after the end of the recording."""

    def __init__(self, post: Callable[[AnyFrontendRequest], None], timeout_s: float = PARTS_TIMEOUT_S) -> None:
        self._post = post
        self._timeout_s = timeout_s
        self._traces = 0
        self._collected: _Parts | None = None

    async def record(self, seconds: float) -> RecordedTrace:
        """Record for so many seconds; cancelling this coroutine ends the recording. Raises HeadraceError: 409 during
        another recording, 503 if the scheduler does not answer."""
        if self._collected is not None:
            message = "another trace is being recorded; ask again when it is done"
            raise HeadraceError(ErrorInfo(code=TRACE_RUNNING, message=message, status=409))
        self._traces += 1
        collected = self._collected = _Parts(self._traces)
        try:
            self._post(StartTrace(trace=collected.trace))
            try:
                await asyncio.sleep(seconds)
            finally:
                self._post(EndTrace(trace=collected.trace))
            with contextlib.suppress(TimeoutError):  # the parts that have come are worth showing
                await asyncio.wait_for(collected.complete.wait(), self._timeout_s)
        finally:
            self._collected = None
        if collected.scheduler is None:
            raise refusals.NO_TRACE.raised(seconds=self._timeout_s)
        return RecordedTrace(collected.scheduler, collected.stages, collected.paused_s)

    def take(self, part: Traced | StageTraced) -> None:
        """Add the part of one process. Parts of an earlier recording are dropped."""
        if self._collected is not None and part.trace == self._collected.trace:
            self._collected.add(part)
