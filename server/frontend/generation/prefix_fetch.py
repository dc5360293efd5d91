"""Prefixes that come from the caches of siblings, other prefill servers, before a prompt is computed.

    a prompt   QueryPrefix ─► worth asking? ─► POST /v1/prefixes at every sibling ─► worth it? ─► fetch ─► computed
    a fetch    Submit(FetchFrom.prefix) ─► Reserved ─► POST /v1/prefill there, cached_only ─► RequestFinished

Nothing here fails a request: a prefix that does not come in time is computed.
"""

import asyncio
import logging
import secrets
from typing import Literal

import httpx
import msgspec

from headrace.core.messages.frontend import Submit
from headrace.core.messages.http_prefill import JSON_HEADERS, PREFIXES_PATH, PrefillRequest
from headrace.core.messages.replies import RequestFinished, Reserved
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FetchFrom, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.request.request_context import CallSpan, RequestContext
from headrace.server.routing.handoff_cost import HandoffCost
from headrace.server.routing.prefix_choice import PrefixChoice, choose_sibling, worth_asking
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.spans import RecordSpan
from headrace.server.upstream.handoff_params import PrefillAddress
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

QUERY_S = 0.25  # for an answer of the own scheduler, or of a sibling


class HeldPrefix(msgspec.Struct, frozen=True):
    """The answer to POST /v1/prefixes."""

    cached_tokens: int


class PrefixFetches:
    """Fetches prefixes into the prefix cache of this server. pool: the siblings. page_size: tokens of a page here."""

    def __init__(
        self,
        client: SchedulerClient,
        pool: PrefillPool,
        metrics: FrontMetrics,
        clock: Clock,
        page_size: int,
        record_span: RecordSpan,
    ) -> None:
        self._client = client
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._page_size = page_size
        self._record_span = record_span
        self._costs: dict[str, HandoffCost] = {}
        self._coming: dict[tuple[bytes, str], asyncio.Task[bool]] = {}  # by tokens and salt

    async def bring(self, request: GenerationRequest) -> None:
        """Fetch what a sibling has cached of a prompt, if that is predicted to be faster than computing it."""
        usable = self._whole_pages(min(len(request.prompt) - 1, request.sampling.cacheable(len(request.prompt))))
        siblings = [] if request.images or request.terms.adapter else self._asked(request.kv_held_at)
        if not siblings or usable <= 0:
            return
        prompt, terms = request.prompt[:usable], request.terms
        here = await self._client.query_prefix(pack(prompt), terms.prefix_salt, QUERY_S)
        if here is None or not worth_asking(here.cost, here.cached, usable):
            return
        answers = await asyncio.gather(*(self._ask(one, prompt, terms.cache_salt) for one in siblings))
        found = {one.url: self._whole_pages(min(held, usable)) for one, held in zip(siblings, answers, strict=True)}
        choice = choose_sibling(here.cost, here.cached, found, self._takes_s)
        if choice is not None:
            by_url = {one.url: one for one in siblings}
            await self._fetched(by_url[choice.server], choice, here.cached, prompt, request)

    async def stop(self) -> None:
        """End all fetches."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, hint: PrefillAddress | None) -> list[PrefillServer]:
        """The siblings that are up and know the question; of those that a router names, only these."""
        up = [one for one in self._pool.up() if one.target is not None and one.target.prefixes]
        named = [one for one in up if hint is not None and one.matches(hint)]
        return named or up

    async def _ask(self, server: PrefillServer, prompt: tuple[int, ...], salt: str) -> int:
        """Leading tokens of the prompt that a sibling has cached; 0 if it does not say so in time."""
        body = msgspec.json.encode({"prompt_token_ids": prompt, "cache_salt": salt or None})
        try:
            async with asyncio.timeout(QUERY_S):
                content = await self._pool.ask(server, PREFIXES_PATH, body, JSON_HEADERS)
            return msgspec.json.decode(content, type=HeldPrefix).cached_tokens
        except (TimeoutError, HeadraceError, httpx.HTTPError, *NO_MESSAGE) as error:
            log.debug("sibling %s: %s", server.url, error)
            return 0

    async def _fetched(
        self,
        server: PrefillServer,
        choice: PrefixChoice,
        cached: int,
        prompt: tuple[int, ...],
        request: GenerationRequest,
    ) -> None:
        """Fetch a prefix, or wait for another prompt's fetch of the same one."""
        key = (pack(prompt[: choice.tokens]), request.terms.prefix_salt)
        task = self._coming.get(key)
        if task is None:
            fetch = self._fetch(server, choice, cached, prompt, request.terms, request.context, "sibling")
            task = self._coming[key] = asyncio.create_task(fetch)
            task.add_done_callback(lambda _task: self._coming.pop(key, None))
        await asyncio.shield(task)

    async def _fetch(
        self,
        server: PrefillServer,
        choice: PrefixChoice,
        cached: int,
        prompt: tuple[int, ...],
        terms: RequestTerms,
        context: RequestContext,
        source: Literal["sibling", "return"],
    ) -> bool:
        began, result = self._clock.now(), "late"
        try:
            async with asyncio.timeout(choice.deadline_s):
                await self._move(server, prompt[: choice.tokens], terms, context)
            result = "fetched"
        except TimeoutError:
            log.info("a prefix of %d tokens did not come from %s in time", choice.tokens, server.url)
        except HeadraceError as error:
            result = "failed"
            log.info("a prefix of %d tokens does not come from %s: %s", choice.tokens, server.url, error.info.message)
        took_s, moved = self._clock.now() - began, choice.tokens - cached
        if result != "failed":  # what fails at once says nothing of how fast bytes come
            self._costs.setdefault(choice.server, HandoffCost()).observe(moved, took_s)
        self._metrics.count_prefix_fetch(source, result, moved if result == "fetched" else 0, took_s)
        return result == "fetched"

    async def _move(
        self, server: PrefillServer, tokens: tuple[int, ...], terms: RequestTerms, context: RequestContext
    ) -> None:
        """Have the KV of these tokens sent here. Raises HeadraceError."""
        ticket = secrets.token_hex(16)
        submit = Submit(
            rid=f"prefix-{ticket}",
            prompt=pack(tokens),
            sampling=SamplingParams(max_tokens=1),
            route=FetchFrom(server.url, ticket, prefix=True),
            terms=RequestTerms(tenant=terms.tenant, cache_salt=terms.cache_salt),
        )
        body = PrefillRequest(
            rid=f"prefix-{ticket}",
            prompt_token_ids=tokens,
            ticket=ticket,
            cached_only=True,
            cache_salt=terms.cache_salt or None,
        )
        span = CallSpan(context, server.url, self._clock, self._record_span)
        async with self._client.open(submit) as call, self._pool.refetch_call(server, body, span) as posted:
            while not isinstance(event := await call.next(), RequestFinished):
                if isinstance(event, Reserved):
                    posted.start(lambda _progress: None, call.abort)

    def _takes_s(self, server: str, tokens: int) -> float:
        cost = self._costs.get(server)
        return 0.0 if cost is None else cost.seconds(tokens)

    def _whole_pages(self, tokens: int) -> int:
        return tokens - tokens % self._page_size
