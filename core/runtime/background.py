"""Tasks of an event loop: without a waiter, begun again when they fail, cancelled together, the first of several."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from headrace.core.runtime.clock import Clock, SystemClock
from headrace.core.runtime.rate_limit import Backoff

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A task that has run for so long before it failed begins again after the first pause."""


async def keep_running(what: str, work: Callable[[], Awaitable[None]], clock: Clock | None = None) -> None:
    """Run the work until it returns, or until cancelled. Any other exception is logged, and the work begins
    again after a pause that grows with each failure.

    what: the work, in the log. work: can begin again where it failed.
    """
    backoff, clock = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), clock or SystemClock()
    while True:
        began = clock.now()
        try:
            await work()
            return
        except Exception:
            if clock.now() - began > STEADY_S:
                backoff.reset()
            pause_s = backoff.next_delay()
            log.exception("%s has failed, and begins again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Return when one of them is done, and raise what it raised. Other coroutines are cancelled; futures are not."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for wait, future in zip(waits, futures, strict=True):
            if wait is not future:
                future.cancel()


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait for their ends, whatever these are."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Tasks:
    """Tasks without a waiter, each until it ends or all are cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run the work as one of them."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all of them and wait for their ends."""
        await cancel_all(self._tasks)
