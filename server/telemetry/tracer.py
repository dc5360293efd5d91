"""Recording on demand, as the front end sees it: start, wait, end, and collect what the processes have noted."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from headrace.core.messages.frontend import AnyFrontendRequest, EndTrace, StageTraced, StartTrace, Traced
from headrace.core.trace import SchedulerTrace
from headrace.core.types.errors import ErrorInfo, HeadraceError, unavailable

TRACE_RUNNING = "trace_running"  # 409
ANSWER_S = 5.0  # for the scheduler and the stages to hand over what they have


class Recording(msgspec.Struct, frozen=True):
    """What came back. stages: encoded headrace.core.trace.StageTrace by stage; one that did not answer in time is
    missing."""

    scheduler: SchedulerTrace
    stages: dict[int, bytes]


class _Collected:
    """What has come back of one recording so far."""

    def __init__(self, trace: int) -> None:
        self.trace = trace
        self.scheduler: SchedulerTrace | None = None
        self.stages: dict[int, bytes] = {}
        self.complete = asyncio.Event()

    def add(self, part: Traced | StageTraced) -> None:
        if isinstance(part, Traced):
            self.scheduler = part.scheduler
        else:
            self.stages[part.stage] = part.spans
        if self.scheduler is not None and len(self.stages) >= self.scheduler.stages:
            self.complete.set()


class Tracer:
    """One recording at a time. post: sends to the scheduler; its answers are to be given to take()."""

    def __init__(self, post: Callable[[AnyFrontendRequest], None], answer_s: float = ANSWER_S) -> None:
        self._post = post
        self._answer_s = answer_s
        self._traces = 0
        self._collected: _Collected | None = None

    async def record(self, seconds: float) -> Recording:
        """Record for so many seconds; cancelling it ends the recording. Raises HeadraceError: 409 while another one is
        under way, 503 when the scheduler does not answer."""
        if self._collected is not None:
            message = "another trace is being recorded; ask again when it is done"
            raise HeadraceError(ErrorInfo(code=TRACE_RUNNING, message=message, status=409))
        self._traces += 1
        collected = self._collected = _Collected(self._traces)
        try:
            self._post(StartTrace(trace=collected.trace))
            try:
                await asyncio.sleep(seconds)
            finally:
                self._post(EndTrace(trace=collected.trace))
            with contextlib.suppress(TimeoutError):  # what has come by then is worth showing
                await asyncio.wait_for(collected.complete.wait(), self._answer_s)
        finally:
            self._collected = None
        if collected.scheduler is None:
            raise unavailable(f"the scheduler did not answer within {self._answer_s:g} s", code="scheduler_silent")
        return Recording(collected.scheduler, collected.stages)

    def take(self, part: Traced | StageTraced) -> None:
        """A process has handed over its part. Parts that nobody waits for any more are dropped."""
        if self._collected is not None and part.trace == self._collected.trace:
            self._collected.add(part)
