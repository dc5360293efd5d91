"""Hedges: a second prefill server is started on a prompt whose first token is late; the first token of either wins.

    first:   Submit, POST ────────────────── late ─────────────────────────────── cancelled
    second:                                   └─► Submit(follows), POST ─► first token ─► the text goes on from it

The second goes on from what has come of the first one's KV, where our own stages write it (Leftovers.share). The other
one is cancelled by leaving its context: its pages come back as after any cancel.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.runtime.background import cancel_all
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.frontend.generation.prefill_failover import PromptServers
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
)
from headrace.server.routing.hedging import Hedging
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool

Run = Callable[[GenerationRequest, PrefillChoice, Emit], Awaitable[GenerationResult]]
"""Has a prompt computed by one prefill server. Raises HeadraceError."""


class Hedges:
    """Starts second servers on the prompts of one decode server."""

    def __init__(self, pool: PrefillPool, metrics: FrontMetrics, factor: float) -> None:
        self._pool = pool
        self._metrics = metrics
        self._hedging = Hedging(factor)

    async def run(
        self,
        request: GenerationRequest,
        choice: PrefillChoice,
        servers: PromptServers,
        emit: Emit,
        first: Run,
        second: Run,
    ) -> GenerationResult:
        """The result of the server whose first token comes first. Raises what the first one raises if neither has one.

        servers: of the prompt. second: as first, for a request with another rid."""
        after_s, race = self._hedging.after_s(self._pool.forecast(choice)), _Race(emit)
        if after_s is None:
            return await first(request, choice, emit)
        main = asyncio.ensure_future(first(request, choice, race.lane(0)))
        spare: asyncio.Future[GenerationResult] | None = None
        try:
            if await race.late(main, after_s) and self._may_start(request, servers):
                spare = asyncio.ensure_future(self._second(request, servers, race.lane(1), second))
                return await self._won(race, main, spare, partial(servers.failed, choice))
            return await main
        finally:
            await cancel_all([task for task in (main, spare) if isinstance(task, asyncio.Task)])

    def _may_start(self, request: GenerationRequest, servers: PromptServers) -> bool:
        if not servers.has_other(request):
            return False
        if not self._hedging.take():
            self._metrics.count_hedge("refused")
            return False
        return True

    async def _second(
        self, request: GenerationRequest, servers: PromptServers, emit: Emit, second: Run
    ) -> GenerationResult:
        other = msgspec.structs.replace(request, rid=f"hedge-{secrets.token_hex(16)}", progress=False)
        with servers.choose(request) as chosen:
            try:
                return await second(other, chosen, emit)
            except HeadraceError as error:
                servers.failed(chosen, error.info)
                raise

    async def _won(
        self,
        race: "_Race",
        main: "asyncio.Future[GenerationResult]",
        spare: "asyncio.Future[GenerationResult]",
        failed: Callable[[ErrorInfo], None],
    ) -> GenerationResult:
        """The result of the one that has the first token; of the other one if it fails before. failed: takes the error
        of the first server then."""
        await race.begun(main)
        if race.winner == 1:
            main.cancel()
            self._metrics.count_hedge("won")
            return await spare
        if race.winner is None and (error := _prefill_error(main)) is not None:
            failed(error)
            with contextlib.suppress(HeadraceError):
                result = await spare
                self._metrics.count_hedge("won")
                return result
        self._metrics.count_hedge("failed" if spare.done() else "lost")
        spare.cancel()
        return await main


def _prefill_error(run: "asyncio.Future[GenerationResult]") -> ErrorInfo | None:
    """The error of the prefill server, which another one need not have, that has ended a run; None if none has."""
    error = run.exception()
    return error.info if isinstance(error, HeadraceError) and error.info.at_prefill else None


class _Race:
    """Who has the first token. What the other one emits is held for ever: it is about to be cancelled."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._decided = asyncio.Event()
        self.winner: int | None = None

    def lane(self, number: int) -> Emit:
        """What one of them emits to."""

        async def watch(event: Progress | GenerationDelta) -> None:
            if self.winner is None and isinstance(event, GenerationDelta):
                self.winner = number
                self._decided.set()
            if self.winner not in (None, number):
                await asyncio.get_running_loop().create_future()
            await self._emit(event)

        return watch

    async def late(self, main: "asyncio.Future[GenerationResult]", after_s: float) -> bool:
        """Wait until the first one has begun or failed; True if it has not in time."""
        return not await self._ended(main, after_s)

    async def begun(self, main: "asyncio.Future[GenerationResult]") -> None:
        """Wait until one has the first token, or the first one has failed."""
        await self._ended(main, None)

    async def _ended(self, main: "asyncio.Future[GenerationResult]", within_s: float | None) -> bool:
        decided = asyncio.ensure_future(self._decided.wait())
        waited: list[asyncio.Future[Any]] = [main, decided]
        try:
            done, _ = await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            decided.cancel()
