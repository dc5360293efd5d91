"""A child process of the server: its start, with its configuration on standard input, and its end. The gateway that a
prefill server starts is one that is started again when it ends."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec

from headrace.core.config import GatewayConfig
from headrace.core.runtime.process import module_command
from headrace.core.runtime.rate_limit import Backoff

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
HURRIED_TIMEOUT_S = 0.5  # the same once the server is to end at once
NO_RESOURCES = (OSError, RuntimeError)  # of starting a process, and of the thread in which asyncio waits for it
# Turns that an OpenMP thread waits for the others before it sleeps, some 50 to 150 µs. By default it is a hundred times
# as many: on cores that others use, too, it keeps the thread that it waits for from running.
SPINS = "3000"

GATEWAY_MODULE = "headrace.gateway.process"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a gateway is started again
STEADY_S = 60.0  # a gateway that has run for so long begins again after the first pause
LAST_MOMENT_S = 2.0  # for its end after the drain


class StartFailed(Exception):
    """A child process cannot be started now; the message says why."""


class Child:
    """One child process: `python -m module PARENT`, with its configuration as JSON on standard input.

    Args:
        module: to run.
        config: for standard input.
        threads: OMP_NUM_THREADS.
        environment: variables besides those of this process.
        descriptors: open file descriptors that the child inherits.
    """

    def __init__(
        self,
        module: str,
        config: msgspec.Struct,
        *,
        threads: int,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._module = module
        self._descriptors = descriptors
        self._config = msgspec.json.encode(config)
        # One thread count for every library with a pool of its own; tokenizers must not add another one.
        own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        waiting = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPINS}
        self._environment = {**waiting, **os.environ, **own, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and write its configuration. Raises StartFailed."""
        # A session of its own: Ctrl-C in a terminal reaches the parent only, which ends its children in order.
        try:
            self._process = await asyncio.create_subprocess_exec(
                *module_command(self._module, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=self._descriptors,
                env=self._environment,
            )
        except NO_RESOURCES as error:
            raise StartFailed(f"{self._module} cannot be started: {error}") from error
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already: wait() tells
            self._process.stdin.write(self._config)
            await self._process.stdin.drain()
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Of the started process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def send_signal(self, number: int) -> None:
        """Send a signal to the started process. Raises ProcessLookupError if it has just exited."""
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for the exit. Returns the status; negative for the signal that killed it."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill it with SIGKILL, which works on a stopped process, too, and wait for the exit."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                self._process.kill()
            await self._process.wait()

    async def end(self, hurry: asyncio.Event) -> None:
        """Wait for the exit; kill it after END_TIMEOUT_S, or HURRIED_TIMEOUT_S after hurry was set."""
        if self._process is None or self._process.returncode is not None:
            return
        exited = asyncio.ensure_future(self._process.wait())
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait((exited, hurried), timeout=END_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            await asyncio.wait((exited,), timeout=HURRIED_TIMEOUT_S)
        hurried.cancel()
        if not exited.done():
            log.warning("%s does not exit; killing it", self._module)
            await self.kill()
        await exited


async def all_started(children: Sequence[Child]) -> None:
    """Start processes at the same time; those that can be started are, when this raises StartFailed."""
    results = await asyncio.gather(*(child.start() for child in children), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class GatewayChild:
    """Runs a gateway from start() until drain() or kill(). Its end does not end the server, whose own decode peers have
    nothing to do with it."""

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
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
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
            self._child = Child(GATEWAY_MODULE, self._config, threads=1)
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
