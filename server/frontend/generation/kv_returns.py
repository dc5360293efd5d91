"""Returns: a decode server offers the KV of a turn to the prefill server that has computed its prompt.

    decode server                                         prefill server
    RequestFinished ─► POST /v1/returns ────────────────► QueryPrefix ─► judge_return(): taken, or why not
                                                            │ its control client connects to our control endpoint
    Submit(SendTo.cached) ◄── taken, so many tokens ────────┤
       └── KV ─────────────────────────────────────────►  Submit(FetchFrom.prefix) ─► in the prefix cache there

What is offered is not leased: its pages are in the prefix cache, most recently used. They are leased from "taken" until
they were sent, and given back sooner if a request needs them (Completion.end_moves). So an offer keeps no page from a
request, and one whose pages have gone costs a message. The ticket, not a salt, names the KV to the other server.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import msgspec

from headrace.core.messages.frontend import Submit
from headrace.core.messages.http_prefill import JSON_HEADERS, RETURNS_PATH
from headrace.core.messages.replies import RequestFinished
from headrace.core.runtime.background import Tasks
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import NOT_NOW, HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.peers.allow_list import canonical
from headrace.core.types.requests.kv_return import (
    MAX_OFFERS,
    MAX_TAKEN,
    MOVE_S,
    ReturnReason,
    judge_return,
)
from headrace.core.types.requests.request import AnyRoute, FetchFrom, HandoffStats, SamplingParams, SendTo
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.routing.handoff_cost import TransferCosts
from headrace.server.routing.prefix_choice import compute_s
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.handoff_params import PrefillAddress
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

QUERY_S = 1.0  # for an answer of the own scheduler
OFFER_S = 10.0  # for an answer of the prefill server, which may have to connect
PAUSE_S = 60.0  # without offers to a server that does not take any
SHORT_PAUSE_S = 5.0  # or that is not ready at the moment


class ReturnAnswer(msgspec.Struct, frozen=True):
    """The answer to POST /v1/returns."""

    taken: bool
    reason: ReturnReason
    tokens: int = 0
    """Leading ones of those that were offered, whose KV is fetched now."""


class KvReturns:
    """Offers the KV of turns. page_size: tokens of a page here."""

    def __init__(
        self, client: SchedulerClient, pool: PrefillPool, metrics: FrontMetrics, clock: Clock, page_size: int
    ) -> None:
        self._client = client
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._page_size = page_size
        self._paused: dict[str, float] = {}  # servers, and until when
        self._offers = Tasks()
        self._ended = False

    def offer(
        self, server: PrefillServer, prompt: Sequence[int], generated: Sequence[int], terms: RequestTerms
    ) -> None:
        """Offer the KV of a turn, if it has filled a page since its prompt. Returns at once."""
        size = self._page_size
        whole = (len(prompt) + len(generated) - 1) // size * size  # the KV of the last token was not computed
        if self._ended or whole <= len(prompt) or terms.adapter or terms.image_digest:
            return
        if len(self._offers) >= MAX_OFFERS or self._paused.get(server.url, 0.0) > self._clock.now():
            return
        self._offers.start(self._offer(server, (*prompt, *generated)[:whole], len(prompt), terms))

    async def stop(self) -> None:
        """Give up all offers, and make no more."""
        self._ended = True
        await self._offers.cancel()

    async def _offer(
        self, server: PrefillServer, tokens: tuple[int, ...], prompt_tokens: int, terms: RequestTerms
    ) -> None:
        found = await self._client.query_prefix(pack(tokens), terms, QUERY_S)
        info = self._client.server_info
        if found is None or found.cached <= prompt_tokens or info is None:
            return  # evicted already, or not cached at all: the model's requests have states, say
        ticket, salt = secrets.token_hex(16), terms.cache_salt
        body = msgspec.json.encode({
            "prompt_token_ids": tokens[: found.cached],
            "cache_salt": salt or None,
            "ticket": ticket,
            "control_port": info.control_port,
        })  # fmt: skip
        try:
            async with asyncio.timeout(OFFER_S):
                content = await self._pool.ask(server, RETURNS_PATH, body, JSON_HEADERS)
            answer = msgspec.json.decode(content, type=ReturnAnswer)
        except (TimeoutError, HeadraceError, httpx.HTTPError, *NO_MESSAGE) as error:
            busy = isinstance(error, HeadraceError) and error.info.status in NOT_NOW
            self._paused[server.url] = self._clock.now() + (SHORT_PAUSE_S if busy else PAUSE_S)
            log.debug("prefill server %s takes no returns: %s", server.url, error)
            self._metrics.count_return("refused")
            return
        log.debug("%d tokens offered to %s: %s", found.cached, server.url, answer.reason)
        if not answer.taken or not 0 < answer.tokens <= found.cached:
            self._metrics.count_return(answer.reason)
            return
        route = SendTo(ticket, cached=True)
        began = self._clock.now()
        stats = await moved(self._client, tokens[: answer.tokens], route, terms)
        self._metrics.count_return("failed" if stats is None else "taken")
        if stats is not None:
            self._metrics.count_returned(stats.pages * self._page_size, stats.bytes, self._clock.now() - began)


class ReturnTaker:
    """Takes the KV of turns that decode servers offer to this prefill server. pool: connects to them."""

    def __init__(
        self, client: SchedulerClient, pool: PrefillPool, metrics: FrontMetrics, clock: Clock, page_size: int
    ) -> None:
        self._client = client
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._page_size = page_size
        self._costs = TransferCosts(clock.now)  # by host
        self._fetches = Tasks()
        self._ended = False

    async def take(
        self, address: PrefillAddress, tokens: Sequence[int], ticket: str, terms: RequestTerms
    ) -> ReturnAnswer:
        """Judge KV that a decode server offers, and begin to fetch it if it is taken. address: of its control endpoint.
        Raises HeadraceError: 403 for an address that is not allowed, 503 if it does not answer."""
        offered = len(tokens) - len(tokens) % self._page_size
        reason = await self._judge(address, tuple(tokens[:offered]), terms)
        if reason != "taken":
            self._metrics.count_return(reason)
            return ReturnAnswer(False, reason)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(self._pool.connected(address))
            self._fetches.start(self._fetch(stack.pop_all(), server, tuple(tokens[:offered]), ticket, terms))
        self._metrics.count_return(reason)
        return ReturnAnswer(True, reason, offered)

    async def stop(self) -> None:
        """End all fetches, and begin no more."""
        self._ended = True
        await self._fetches.cancel()

    async def _judge(self, address: PrefillAddress, tokens: tuple[int, ...], terms: RequestTerms) -> ReturnReason:
        if self._ended or len(self._fetches) >= MAX_TAKEN:
            return "busy"
        host = canonical(address.host)
        here = await self._client.query_prefix(pack(tokens), terms, QUERY_S, host)
        if here is None:
            return "busy"
        if not here.has_peer:
            return "no_session"
        work_s = None if here.cost is None else compute_s(here.cost, here.cached, len(tokens))
        transfer_s = self._costs.seconds(host, len(tokens) - here.cached)
        return judge_return(here.pool, len(tokens), self._page_size, work_s, transfer_s)

    async def _fetch(
        self, stack: AsyncExitStack, server: PrefillServer, tokens: tuple[int, ...], ticket: str, terms: RequestTerms
    ) -> None:
        async with stack:
            route = FetchFrom(server.url, ticket, "external", prefix=True)
            began = self._clock.now()
            stats = await moved(self._client, tokens, route, terms)
            if stats is None:
                return
            tokens_moved, took_s = stats.pages * self._page_size, self._clock.now() - began
            self._costs.observe(canonical(server.host), tokens_moved, took_s)
            self._metrics.count_returned(tokens_moved, stats.bytes, took_s)


async def moved(
    client: SchedulerClient, tokens: tuple[int, ...], route: AnyRoute, terms: RequestTerms
) -> HandoffStats | None:
    """Move the KV of these tokens from or to the prefix cache here; None if that fails, or takes MOVE_S."""
    submit = Submit(
        rid=f"return-{secrets.token_hex(16)}",
        prompt=pack(tokens),
        sampling=SamplingParams(max_tokens=1),
        route=route,
        terms=RequestTerms(tenant=terms.tenant, cache_salt=terms.cache_salt),
    )
    try:
        async with asyncio.timeout(MOVE_S), client.open(submit) as call:
            while not isinstance(event := await call.next(), RequestFinished):
                pass
    except TimeoutError:
        log.debug("a return of %d tokens has not ended in %.0f s", len(tokens), MOVE_S)
        return None
    except HeadraceError as error:
        log.debug("a return of %d tokens has failed: %s", len(tokens), error.info.message)
        return None
    return event.handoff
