"""Resumed prompts: what has come of a prompt's KV before its prefill server failed goes to the next prefill server.

    decode server                                        the next prefill server
    Reserved ─► POST /v1/prefill {resume} ─────────────► QueryPrefix ─► faster than computing it?
    Submit(SendTo.cached) ── KV of the first tokens ───► its control client connects to our control endpoint;
                                                         Submit(FetchFrom.prefix)
    Submit(FetchFrom)     ◄─ KV of the rest ───────────  the prompt, from its prefix cache

The KV of the first tokens is in the prefix cache of the decode server (scheduler/lifecycle/leftovers.py), and stays
there whether the next prefill server takes it or not: it sends the rest alone. Nothing here fails a request.
"""

import asyncio
import logging
import secrets
from types import TracebackType
from typing import Self

from headrace.core.runtime.background import cancel_all
from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.peers.allow_list import canonical
from headrace.core.types.requests.request import FetchFrom, HandoffStats, SendTo
from headrace.core.types.requests.resume import Resume
from headrace.server.frontend.generation.kv_returns import moved
from headrace.server.frontend.generation.prefix_fetch import QUERY_S
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.routing.handoff_cost import TransferCosts
from headrace.server.routing.prefix_choice import HeldPrefix, choose_sibling
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.handoff_params import PrefixOffer
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)


class ResumeOffer:
    """Hands over what a decode server has of one prompt, as an async context: leaving it ends that."""

    def __init__(self, client: SchedulerClient, server: PrefillServer, request: GenerationRequest) -> None:
        self._client = client
        self._server = server
        self._request = request
        self._tasks: list[asyncio.Task[HandoffStats | None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await cancel_all(self._tasks)

    def make(self, cached: int) -> Resume | None:
        """Offer the first tokens of the prompt, whose KV is in the prefix cache here. None if there are none, or the
        prefill server does not take them. cached: tokens that are here."""
        info, request, terms = self._client.server_info, self._request, self._request.terms
        if info is None or not info.control_port or not self._server.knows_resume:
            return None
        usable = min(cached, request.sampling.cacheable(len(request.prompt)))
        tokens = usable - usable % self._server.page_size
        if not tokens or request.images or terms.adapter:
            return None
        ticket = secrets.token_hex(16)
        move = moved(self._client, request.prompt[:tokens], SendTo(ticket, cached=True), terms)
        self._tasks.append(asyncio.create_task(move))
        return Resume(ticket=ticket, control_port=info.control_port, tokens=tokens)


class ResumeFetches:
    """Fetches what decode servers have of prompts that they send again. pool: connects to them."""

    def __init__(
        self, client: SchedulerClient, pool: PrefillPool, metrics: FrontMetrics, clock: Clock, page_size: int
    ) -> None:
        self._client = client
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._page_size = page_size
        self._costs = TransferCosts(clock.now)  # by host

    async def bring(self, request: GenerationRequest, offer: PrefixOffer) -> bool:
        """Fetch what is offered of a prompt, if that is predicted to be faster than computing it. True if it came."""
        length, host = len(request.prompt), canonical(offer.address.host)
        tokens = request.prompt[: offer.tokens]
        if offer.tokens > min(length - 1, request.sampling.cacheable(length)) or offer.tokens % self._page_size:
            return False
        if request.images or request.terms.adapter:
            return False
        here = await self._client.query_prefix(pack(tokens), request.terms, QUERY_S, host)
        if here is None or not here.has_peer:
            return False
        choice = choose_sibling(here.cost, here.pool.held, (HeldPrefix(host, len(tokens)),), self._costs.seconds)
        if choice is None:
            return False
        began, result, came = self._clock.now(), "late", 0
        try:
            async with asyncio.timeout(choice.deadline_s), self._pool.connected(offer.address) as server:
                route = FetchFrom(server.url, offer.ticket, "external", prefix=True)
                stats = await moved(self._client, tokens, route, request.terms)
            result = "failed" if stats is None else "fetched"
            came = 0 if stats is None else stats.pages * self._page_size
        except TimeoutError:
            log.info("%s: %d tokens did not come from %s in time; computing them", request.rid, len(tokens), host)
        except HeadraceError as error:
            result = "failed"
            log.info("%s: computing %d tokens: %s", request.rid, len(tokens), error.info.message)
        took_s = self._clock.now() - began
        self._metrics.count_prefix_fetch("resume", result, came, took_s)
        if came:
            self._costs.observe(host, came, took_s)
        return result == "fetched"
