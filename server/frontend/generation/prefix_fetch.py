"""Prefixes that come from the caches of siblings, other prefill servers, before a prompt is computed.

    a prompt     QueryPrefix ─► worth asking? ─► POST /v1/prefixes at every sibling ─► worth it? ─► fetch ─► computed
                                                               └◄── not_cached, once ────────────────┘
    a prefetch   ─────────────── the same, within what its tenant may retain ────────────────────► fetch ─► retained

Nothing here fails a request: a prefix that does not come in time is computed. What tiers hold counts, here and there.
"""

import asyncio
import logging
from itertools import chain
from typing import Annotated

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, PREFIXES_PATH
from headrace.core.runtime.background import cancel_all
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import NOT_CACHED, HeadraceError
from headrace.core.types.packed import pack
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.prefix_moves import PrefixMove, PrefixMoves
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.routing.handoff_cost import TransferCosts
from headrace.server.routing.prefix_choice import HeldPrefix, PrefixChoice, choose_sibling, worth_asking
from headrace.server.upstream.handoff_params import PrefillAddress
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

QUERY_S = 0.25  # for an answer of the own scheduler, or of a sibling


class _InPool(msgspec.Struct, frozen=True):
    device: int


class _Answer(msgspec.Struct, frozen=True):
    """The answer to POST /v1/prefixes. Servers of earlier versions do not tell what they have in tiers."""

    cached_tokens: int
    cached_tokens_details: _InPool | None = None
    load_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class PrefixFetches:
    """Fetches prefixes into the prefix cache of this server. pool: the siblings. moves: from them."""

    def __init__(self, client: SchedulerClient, pool: PrefillPool, moves: PrefixMoves, clock: Clock) -> None:
        self._client = client
        self._pool = pool
        self._moves = moves
        self._costs = TransferCosts(clock.now)  # by URL
        self._coming: dict[tuple[bytes, str], asyncio.Task[bool]] = {}  # by tokens and salt

    async def bring(self, request: GenerationRequest) -> None:
        """Fetch what a sibling has cached of a prompt, if that is predicted to be faster than computing it."""
        length = len(request.prompt)
        await self._bring(request, min(length - 1, request.sampling.cacheable(length)))

    async def prefetch(self, request: GenerationRequest) -> bool:
        """As bring(), for a prompt that may come: all of it that its tenant may retain. False if a sibling has it, and
        it has not come."""
        return await self._bring(request, len(request.prompt), spare=True)

    async def _bring(self, request: GenerationRequest, usable: int, *, spare: bool = False) -> bool:
        """usable: leading tokens that cached pages may serve. spare: see FetchFrom. False if a fetch has failed."""
        prompt, terms = request.prompt[: self._whole_pages(usable)], request.terms
        siblings = [] if request.images or terms.adapter else self._asked(request.kv_held_at)
        if not siblings or not prompt:
            return True
        here = await self._client.query_prefix(pack(prompt), terms, QUERY_S)
        if here is None:
            return True
        wanted = min(len(prompt), here.pool.retainable) if spare else len(prompt)
        if not worth_asking(here.cost, here.pool.held, wanted):
            return True
        answers = await asyncio.gather(*(self._ask(one, prompt[:wanted], terms.cache_salt) for one in siblings))
        in_tiers = here.pool.in_tiers.total  # fetched with the rest
        found = chain.from_iterable(answers)
        choice = choose_sibling(
            here.cost, here.pool.held, found, lambda server, tokens: self._costs.seconds(server, tokens + in_tiers)
        )
        if choice is None:
            return True
        server = next(one for one in siblings if one.url == choice.held.server)
        return await self._fetched(server, choice, here.cached, prompt, request, spare)

    async def stop(self) -> None:
        """End all fetches."""
        await cancel_all(self._coming.values())

    def _asked(self, hint: PrefillAddress | None) -> list[PrefillServer]:
        """The siblings that are up and know the question; of those that a router names, only these."""
        up = [one for one in self._pool.up() if one.knows_prefixes]
        named = [one for one in up if hint is not None and one.matches(hint)]
        return named or up

    async def _ask(self, server: PrefillServer, prompt: tuple[int, ...], salt: str) -> list[HeldPrefix]:
        """What a sibling has of the leading tokens of a prompt: in its pool, and with its tiers; nothing if it does not
        say so in time."""
        body = msgspec.json.encode({"prompt_token_ids": prompt, "cache_salt": salt or None})
        try:
            async with asyncio.timeout(QUERY_S):
                content = await self._pool.ask(server, PREFIXES_PATH, body, JSON_HEADERS)
            answer = msgspec.json.decode(content, type=_Answer)
        except (TimeoutError, HeadraceError, httpx.HTTPError, *NO_MESSAGE) as error:
            log.debug("sibling %s: %s", server.url, error)
            return []
        held, in_pool = min(answer.cached_tokens, len(prompt)), answer.cached_tokens_details
        found = [HeldPrefix(server.url, self._whole_pages(held), answer.load_seconds)]
        if in_pool is not None:
            found.insert(0, HeldPrefix(server.url, self._whole_pages(min(in_pool.device, held))))
        return found

    async def _fetched(
        self,
        server: PrefillServer,
        choice: PrefixChoice,
        cached: int,
        prompt: tuple[int, ...],
        request: GenerationRequest,
        spare: bool,
    ) -> bool:
        """Fetch a prefix, or wait for another prompt's fetch of the same one. False if it has not come."""
        key = (pack(prompt[: choice.held.tokens]), request.terms.prefix_salt)
        task = self._coming.get(key)
        if task is None:
            fetch = self._fetch(server, choice, cached, prompt, request, spare)
            task = self._coming[key] = asyncio.create_task(fetch)
            task.add_done_callback(lambda _task: self._coming.pop(key, None))
        return await asyncio.shield(task)

    async def _fetch(
        self,
        server: PrefillServer,
        choice: PrefixChoice,
        cached: int,
        prompt: tuple[int, ...],
        request: GenerationRequest,
        spare: bool,
    ) -> bool:
        """cached: tokens in the pool here. False if nothing has come."""
        held = choice.held

        async def fetch(tokens: int, within_s: float) -> PrefixMove:
            return await self._moves.fetch(
                server,
                prompt[:tokens],
                request.terms,
                request.context,
                source="sibling",
                within_s=within_s,
                spare=spare,
            )

        move = await fetch(held.tokens, choice.deadline_s)
        if move.error is not None and move.error.code == NOT_CACHED:  # pages in its tiers were damaged, or have gone
            left = await self._ask(server, prompt[: held.tokens], request.terms.cache_salt)
            tokens = max((one.tokens for one in left), default=0)
            if tokens > cached:
                move = await fetch(tokens, choice.deadline_s - move.seconds)
        elif move.result != "failed":  # what fails at once says nothing of how fast bytes come
            self._costs.observe(held.server, held.tokens - cached, move.seconds - held.load_s)
        return move.result == "fetched"

    def _whole_pages(self, tokens: int) -> int:
        return tokens - tokens % self._moves.page_size
