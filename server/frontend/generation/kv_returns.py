"""Returns: a decode server offers the KV of a turn to the prefill server that has computed its prompt.

RequestFinished ─► POST /v1/returns there, with the tokens ─► it takes them: a fetch from the prefix cache here
                                                         └──► it does not, or does not know the route

What is offered is not leased: its pages are in the prefix cache, most recently used. A fetch that comes after their
eviction is refused, and the next turn computes them. So an offer never keeps a page from a request.
"""

import asyncio
import logging

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, RETURNS_PATH
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

OFFER_S = 5.0  # for an answer
PAUSE_S = 60.0  # without offers to a server that does not take any
MAX_OFFERS = 8  # at a time


class ReturnAnswer(msgspec.Struct, frozen=True):
    """The answer to POST /v1/returns."""

    taken: bool
    reason: str


class KvReturns:
    """Offers KV. port: of this server's HTTP. page_size: tokens of a page here."""

    def __init__(self, pool: PrefillPool, metrics: FrontMetrics, clock: Clock, port: int, page_size: int) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._port = port
        self._page_size = page_size
        self._paused: dict[str, float] = {}  # servers, and until when
        self._offers: set[asyncio.Task[None]] = set()

    def offer(self, server: PrefillServer, tokens: tuple[int, ...], terms: RequestTerms) -> None:
        """Offer the KV of a turn: prompt and generated tokens, without the last one, whose KV was not computed."""
        whole = (len(tokens) - 1) // self._page_size * self._page_size
        if whole <= 0 or terms.adapter or terms.image_digest or len(self._offers) >= MAX_OFFERS:
            return
        if self._paused.get(server.url, 0.0) > self._clock.now():
            return
        task = asyncio.create_task(self._offer(server, tokens[:whole], terms.cache_salt))
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def stop(self) -> None:
        """Give up all offers."""
        for task in self._offers:
            task.cancel()
        await asyncio.gather(*self._offers, return_exceptions=True)

    async def _offer(self, server: PrefillServer, tokens: tuple[int, ...], salt: str) -> None:
        body = msgspec.json.encode({"prompt_token_ids": tokens, "cache_salt": salt or None, "port": self._port})
        try:
            async with asyncio.timeout(OFFER_S):
                content = await self._pool.ask(server, RETURNS_PATH, body, JSON_HEADERS)
            answer = msgspec.json.decode(content, type=ReturnAnswer)
        except (TimeoutError, HeadraceError, httpx.HTTPError, *NO_MESSAGE) as error:
            self._paused[server.url] = self._clock.now() + PAUSE_S
            log.info("prefill server %s takes no returns: %s", server.url, error)
            self._metrics.count_return("refused")
            return
        self._metrics.count_return("taken" if answer.taken else "declined")
