"""Tasks of an event loop: those that run without a waiter and begin again when they fail, and the first of several."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
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
