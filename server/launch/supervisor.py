"""Supervises the child processes of a server: starts them with their configuration on standard input, restarts stages.

    a stage exits           ─► the scheduler is told, fails requests in flight   ─┐
    a stage is silent       ─► the scheduler fails requests in flight, tells us   ├─► all stages are killed, and
    or exceeds a timeout                                                          │   restarted after a delay
    the stages take too long to start ────────────────────────────────────────────┘

Stages hold parts of the same KV pages and are connected to each other, so they are restarted as a group; each start
has its epoch. Restarts are bounded, with exponential back-off; those because another server has ended, with which
this one shares experts, are not. A start that fails because the system lacks descriptors,
processes or memory is repeated until it succeeds. A scheduler that exits ends the server: it has the state of all
requests.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from headrace.core.messages.replies import StageDown
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, GROUP_ENDED_STATUS, MISTAKE
from headrace.core.runtime.rate_limit import Backoff, LogThrottle
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch.child_process import Child, StartFailed, all_started

log = logging.getLogger(__name__)

MAX_RESTARTS = 5  # in a row, of groups that completed no plan
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0  # between starts that fail
STAGE_DOWN_TIMEOUT_S = 1.0  # for the scheduler's StageDown about a lost group

OnStageLost = Callable[[int, str], Awaitable[None]]


class Supervisor:
    """Watches the scheduler and the stages, and restarts the group of stages when one fails.

    Args:
        scheduler: its process.
        make_stages: makes the processes of the group for an epoch, in order of their ranks; None: external stages.
        start_timeout_s: longest time until a group is ready, in seconds.
        layout: of the ranks, for their names in messages.
        member: which server of a group that shares experts this is. Starts then take as long as the others do, and
            those that another server ends are not counted.
    """

    def __init__(
        self,
        scheduler: Child,
        make_stages: Callable[[int], list[Child]] | None,
        start_timeout_s: float,
        layout: Layout,
        member: ExternalMember | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._make_stages = make_stages
        self._start_timeout_s = start_timeout_s if member is None else math.inf
        self._member = member
        self._layout = layout
        self._group = _Group(0, make_stages(0) if make_stages is not None else [])
        self._epoch = 0  # of the last start, be it a failed one
        self._log_throttle = LogThrottle()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._ending = False
        self.fatal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Resolves to the exit status of the server when the scheduler exits, or restarts are used up."""

    async def start(self) -> None:
        """Start the scheduler and the first group of stages. Raises StartFailed, with no child left running."""
        try:
            await all_started([self._scheduler, *self._group.stages])
        except StartFailed:
            await asyncio.gather(self._scheduler.kill(), self._group.kill())
            raise

    @property
    def scheduler_pid(self) -> int:
        """Of the started scheduler."""
        return self._scheduler.pid

    def watch(self, on_stage_lost: OnStageLost) -> None:
        """Watch the started children. on_stage_lost: called with the rank of a stage that exited, and how it did, or
        with the reason why the stages cannot be started."""
        watches = [self._watch_scheduler()]
        if self._make_stages is not None:
            watches.append(self._watch_stages(self._make_stages, on_stage_lost))
        self._tasks = [asyncio.create_task(self._survived(watch)) for watch in watches]

    async def end(self, hurry: asyncio.Event | None = None) -> None:
        """Wait until the children, which were told to shut down, have exited; kill them if that takes too long, which
        is sooner when hurry is set.

        Without a scheduler the stages were not told, and are killed at once; so are stages that are starting, which do
        not listen yet.
        """
        self._ending = True
        hurry = hurry or asyncio.Event()
        async with self._starting:  # a process that is being started could otherwise be missed
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.fatal.done():
            await asyncio.gather(self._scheduler.kill(), self._group.kill())
        elif not self._group.ready.is_set():
            await asyncio.gather(self._scheduler.end(hurry), self._group.kill())
        else:
            await asyncio.gather(self._scheduler.end(hurry), *(stage.end(hurry) for stage in self._group.stages))

    def stages_ready(self) -> None:
        """The scheduler reports that all stages of the group are ready."""
        self._group.ready.set()

    def stage_down(self, down: StageDown) -> None:
        """The scheduler reports a failed stage; ignored if its group has already ended."""
        if down.epoch == self._group.epoch and not self._group.down.done():
            self._group.down.set_result(down)

    async def _survived(self, watch: Coroutine[Any, Any, None]) -> None:
        """Run a watch. Without it the server could not come back from a failure, so its own failure ends the server."""
        try:
            await watch
        except Exception:
            log.exception("the watch over this server's processes has failed")
            self._give_up(1)

    async def _watch_scheduler(self) -> None:
        status = await self._scheduler.wait()
        if not self._ending:
            log.error("the scheduler exited with status %d", status)
            self._give_up(MISTAKE if status == CONFIGURATION_MISTAKE else 1)

    async def _watch_stages(self, make_stages: Callable[[int], list[Child]], on_lost: OnStageLost) -> None:
        """Restart the group when it fails, MAX_RESTARTS times in a row; a group that has served resets the count."""
        restarts = 0
        while True:
            message, status = await self._first_loss(self._group, on_lost)
            if self._ending or self.fatal.done():
                return
            await self._group.kill()
            if self._other_ended(status) or await self._group.has_served():
                restarts = 0
            if restarts == MAX_RESTARTS:
                log.error("%s, for the %dth time in a row", message, restarts + 1)
                self._give_up(1)
                return
            pause_s = FIRST_PAUSE_S * 2**restarts
            log.error("%s; starting %s again in %.2f s", message, self._group, pause_s)
            await asyncio.sleep(pause_s)
            restarts += 1
            await self._start_next(make_stages, on_lost)

    async def _start_next(self, make_stages: Callable[[int], list[Child]], on_lost: OnStageLost) -> None:
        """Start the next group, and try again for as long as the system cannot."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                async with self._starting:
                    self._epoch += 1
                    self._group = _Group(self._epoch, _made(make_stages, self._epoch))
                    await all_started(self._group.stages)
                    return
            except StartFailed as error:
                await self._group.kill()
                if self._log_throttle.due(str(error), asyncio.get_running_loop().time()):
                    log.error("%s; trying again until that works", error)
                pause_s = backoff.next_delay()
                await on_lost(0, f"{error}; trying again in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _first_loss(self, group: "_Group", on_lost: OnStageLost) -> tuple[str, int | None]:
        """Wait until a stage exits, is reported by the scheduler or takes too long to start. Returns a log message, and
        the exit status if it has exited."""
        ends = [asyncio.create_task(stage.wait()) for stage in group.stages]
        late = asyncio.create_task(self._late(group))
        try:
            waits: set[asyncio.Future[Any]] = {*ends, group.down, late}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, late):
                task.cancel()
        statuses = {stage: end.result() for stage, end in enumerate(ends) if end.done() and not end.cancelled()}
        if not statuses:
            if not group.down.done():
                return f"{group} took more than {self._start_timeout_s:g} s to start", None
            down = group.down.result()
            return f"{self._layout.name(down.stage)} failed: {down.message}", None
        # A stage that loses its neighbour exits with status 1; one killed by a signal (negative) was the cause.
        stage = min(statuses, key=lambda stage: statuses[stage])
        message = self._end_message(stage, statuses[stage])
        if not self._ending:
            if CONFIGURATION_MISTAKE in statuses.values():
                self._give_up(MISTAKE)
            else:
                await on_lost(stage, message)
        return message, statuses[stage]

    def _end_message(self, stage: int, status: int) -> str:
        if self._member is not None and self._other_ended(status):
            return self._member.lost
        return f"{self._layout.name(stage)} exited with status {status}"

    def _other_ended(self, status: int | None) -> bool:
        """Whether a stage has exited since another server did."""
        return self._member is not None and status == GROUP_ENDED_STATUS

    async def _late(self, group: "_Group") -> None:
        """Return when a group has taken too long to be ready; never if it becomes ready in time."""
        try:
            await asyncio.wait_for(group.ready.wait(), self._start_timeout_s)
        except TimeoutError:
            return
        await asyncio.Event().wait()  # ready: from now on the scheduler's own timeouts apply

    def _give_up(self, status: int) -> None:
        if not self.fatal.done():
            self.fatal.set_result(status)


class _Group:
    """One start of all stages."""

    def __init__(self, epoch: int, stages: list[Child]) -> None:
        self.epoch = epoch
        self.stages = stages
        self.ready = asyncio.Event()
        self.down: asyncio.Future[StageDown] = asyncio.get_running_loop().create_future()
        """The scheduler's report of the first failed stage."""

    def __str__(self) -> str:
        return "the stage" if len(self.stages) == 1 else f"all {len(self.stages)} stages"

    async def kill(self) -> None:
        await asyncio.gather(*(stage.kill() for stage in self.stages))

    async def has_served(self) -> bool:
        """Whether it completed a plan before it failed, which the scheduler's StageDown says."""
        try:
            down = await asyncio.wait_for(asyncio.shield(self.down), STAGE_DOWN_TIMEOUT_S)
        except TimeoutError:
            return False
        return down.served


def _made(make_stages: Callable[[int], list[Child]], epoch: int) -> list[Child]:
    """Stages to be started. Raises StartFailed: to find a free port for them takes a descriptor."""
    try:
        return make_stages(epoch)
    except OSError as error:
        raise StartFailed(f"the stages cannot be started: {error}") from error
