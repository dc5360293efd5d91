"""KV of an open prompt comes to the decode server while the prompt is open, as the prefill server computes it.

    a change ──► pause ──► GET: how much is computed there? ──► enough that has not come ──► PrefixMoves.fetch ──┐
                   ▲                                                                                             │
                   └──── until all has come that will be computed; then with the next change ────────────────────┘

Nothing waits for it, and nothing fails by it: what has not come when the prompt is committed comes with the commit.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from headrace.core.runtime.background import cancel_all, keep_running
from headrace.core.runtime.rate_limit import Backoff
from headrace.core.types.errors import HeadraceError
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompt, common
from headrace.server.frontend.prefix_moves import PrefixMoves
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.routing.early_fetch import FETCH_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, early_fetch
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

TRIES = 4  # that fail, one after the other; then it waits for the next change


class Computed(msgspec.Struct, frozen=True):
    """What a prefill server has of an open prompt."""

    server: PrefillServer
    sent: int
    """Leading tokens of the prompt that it has been told of."""
    computed: int
    """Those of them whose KV it has."""


Look = Callable[[], Awaitable[Computed | None]]


class EarlyKv:
    """Fetches KV of one open prompt, in a task of its own.

    look: asks the prefill server; None while it does not have the prompt. Raises HeadraceError.
    """

    def __init__(self, moves: PrefixMoves, prompt: OpenPrompt, look: Look) -> None:
        self._moves = moves
        self._prompt = prompt
        self._look = look
        self._request = prompt.request
        self._here: tuple[int, ...] = ()  # tokens whose KV has come
        self._seen = 0  # that were computed when it looked last
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def changed(self, request: GenerationRequest) -> None:
        """The prefill server has been sent a piece, this request. Returns at once."""
        self._request = request
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(keep_running(f"the fetch of {self._prompt.id}", self._run))

    async def stop(self) -> None:
        """End it; a fetch that is under way is cancelled, here and at the prefill server."""
        if self._task is not None:
            await cancel_all([self._task])

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            if not await self._follow():
                return

    async def _follow(self) -> bool:
        """Fetch what is computed until all has come, or nothing comes; False if nothing ever will."""
        pauses, failed, ended = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0, False
        while failed < TRIES and not ended:
            if self._changed.is_set():
                self._changed.clear()
                pauses.reset()
                failed = 0
            await asyncio.sleep(pauses.next_delay())
            try:
                ended = await self._step()
                failed = 0
            except TimeoutError:
                failed += 1
            except HeadraceError as error:
                log.debug("%s: its KV does not come early: %s", self._prompt.id, error.info.message)
                failed += 1
                if error.info.status == 400:  # the model's requests have states, say
                    return False
            ended = ended and not self._changed.is_set()
        return True

    async def _step(self) -> bool:
        """Look, and fetch if there is enough; True when all has come. Raises HeadraceError, TimeoutError."""
        found = await self._look()
        if found is None or not found.server.knows_prefixes:
            return True
        here = common(self._here, self._prompt.tokens)
        due = early_fetch(found.sent, found.computed, self._seen, here, self._moves.page_size)
        self._seen = found.computed
        if due.tokens:
            await self._fetch(found.server, self._prompt.tokens[: due.tokens])
        return due.ended

    async def _fetch(self, server: PrefillServer, tokens: tuple[int, ...]) -> None:
        """Raises HeadraceError, TimeoutError."""
        terms, context = self._request.terms, self._request.context
        move = await self._moves.fetch(
            server, tokens, terms, context, source="open", within_s=FETCH_S, retain=terms.retain
        )
        if move.error is not None:
            raise HeadraceError(move.error)
        if move.result == "late":
            raise TimeoutError
        self._here = tokens
