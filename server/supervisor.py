"""Child processes of a server: started with their configuration on standard input, watched, restarted, ended.

A stage that dies is started again, a bounded number of times with growing pauses; the scheduler is told at once and
fails what was in flight. A scheduler that dies ends the server: it held the only truth.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable

import msgspec

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
HEALTHY_S = 60.0  # a child that lived this long starts with a clean record
END_TIMEOUT_S = 5.0
CONFIGURATION_MISTAKE = 2  # exit status of a child that cannot use what it was told


class Child:
    """One child process of ours."""

    def __init__(self, module: str, config: msgspec.Struct, *, threads: int) -> None:
        self._module = module
        self._config = msgspec.json.encode(config)
        # One thread pool size for every library that brings its own; the tokenizer's is of no use here.
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        # A session of its own: Ctrl-C in a terminal reaches the parent only, which ends its children in order.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._config)
        await self._process.stdin.drain()
        self._process.stdin.close()

    async def wait(self) -> int:
        """Exit status; negative for the signal that killed it."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self) -> None:
        """Wait for its orderly end, then insist."""
        if self._process is None or self._process.returncode is not None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s did not end within %.0f s; killing it", self._module, END_TIMEOUT_S)
            self._process.kill()
            await self._process.wait()


class Supervisor:
    """Watches the scheduler and the stages. fatal gets the exit status to end with when one is lost for good."""

    def __init__(
        self, scheduler: Child, stages: list[Child], on_stage_lost: Callable[[int, str], Awaitable[None]]
    ) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._on_stage_lost = on_stage_lost
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self.fatal: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await asyncio.gather(self._scheduler.start(), *(stage.start() for stage in self._stages))
        self._tasks = [asyncio.create_task(self._watch_scheduler())]
        self._tasks += [asyncio.create_task(self._watch_stage(index)) for index in range(len(self._stages))]

    async def end(self) -> None:
        """The children have been told to end; make sure that they do."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._scheduler.end(), *(stage.end() for stage in self._stages))

    async def _watch_scheduler(self) -> None:
        status = await self._scheduler.wait()
        if not self._ending:
            log.error("the scheduler has ended with status %d", status)
            self._give_up(CONFIGURATION_MISTAKE if status == CONFIGURATION_MISTAKE else 1)

    async def _watch_stage(self, index: int) -> None:
        """Restart a stage while that can help."""
        loop = asyncio.get_running_loop()
        restarts = 0
        while True:
            started = loop.time()
            status = await self._stages[index].wait()
            if self._ending:
                return
            if status == CONFIGURATION_MISTAKE:
                self._give_up(status)
                return
            restarts = 0 if loop.time() - started > HEALTHY_S else restarts
            message = f"stage {index} ended with status {status}"
            await self._on_stage_lost(index, message)
            if restarts == MAX_RESTARTS:
                log.error("%s, for the %dth time in a row", message, restarts + 1)
                self._give_up(1)
                return
            pause_s = 0.25 * 2**restarts
            log.error("%s; starting it again in %.2f s", message, pause_s)
            await asyncio.sleep(pause_s)
            restarts += 1
            await self._stages[index].start()

    def _give_up(self, status: int) -> None:
        if not self.fatal.done():
            self.fatal.set_result(status)
