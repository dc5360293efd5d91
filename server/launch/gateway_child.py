"""The gateway that a prefill server starts: a child process that is started again when it ends.

Its end does not end the server, whose own decode peers have nothing to do with it.
"""

import asyncio
import logging
import signal
from contextlib import suppress

from headrace.core.config import GatewayConfig
from headrace.core.runtime.rate_limit import Backoff
from headrace.server.launch.child_process import Child, StartFailed

log = logging.getLogger(__name__)

MODULE = "headrace.gateway.process"
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a gateway that has run for so long begins again after the first pause
LAST_MOMENT_S = 2.0  # for its end after the drain


class GatewayChild:
    """Runs a gateway from start() until drain() or kill()."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it, and again whenever it ends."""
        self._task = asyncio.create_task(self._run())

    async def drain(self) -> None:
        """Have it refuse requests and end when the open ones have; returns when it has ended."""
        self._stop_restarts()
        child = self._child
        if child is None or not child.running:
            return
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), self._config.drain_timeout_s + LAST_MOMENT_S)

    async def kill(self) -> None:
        """End it at once."""
        self._stop_restarts()
        if self._child is not None:
            await self._child.kill()

    def _stop_restarts(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        backoff, loop = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._child = Child(MODULE, self._config, threads=1)
            try:
                await self._child.start()
                end = f"the gateway has ended with status {await self._child.wait()}"
            except StartFailed as error:
                end = str(error)
            if loop.time() - began > STEADY_S:
                backoff.reset()
            pause_s = backoff.next_delay()
            log.error("%s; starting it again in %g s", end, pause_s)
            await asyncio.sleep(pause_s)
