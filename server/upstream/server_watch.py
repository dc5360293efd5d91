"""What the router of a decode server learns from a prefill server that is up: its load, and its KV events.

GET /v1/handoff every second ──► load      once ──► where KV events are published ──► KvEventFollower

Servers of earlier versions report no load, and are asked once; what was sent to them is what is known of them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec

from headrace.core.runtime.background import cancel_all, keep_running
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError
from headrace.peer.kv_event_follower import KvEventFollower, KvEventSource
from headrace.server.routing.replica_load import LoadReport
from headrace.server.routing.replica_router import ReplicaRouter

log = logging.getLogger(__name__)

POLL_S = 1.0
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class ReportedLoad(msgspec.Struct, frozen=True):
    """The load field of GET /v1/handoff."""

    queued_seconds: Seconds
    seconds_per_squared_token: Seconds
    seconds_per_token: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    wait_seconds: dict[Tokens, Seconds] = {}
    """Seconds that a prompt of so many uncached tokens would wait."""
    delayed_requests: dict[Tokens, Annotated[float, msgspec.Meta(ge=0, le=1e9)]] = {}
    """Requests that it would delay."""
    trusted: bool = False
    """These are seconds, and were right of late; False of servers of earlier versions, which do not say."""


class ServerNews(msgspec.Struct, frozen=True):
    """Fields of GET /v1/handoff that the choice of a server goes by; a server may have none of them."""

    instance: str = ""
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    """Tokens of a page of its prefix cache."""
    load: ReportedLoad | None = None
    kv_events: KvEventSource | None = None


class ServerWatch:
    """Keeps the router informed of one server, which is a number there, while the server is up.

    ask: GET /v1/handoff, raises HeadraceError. down: returns when the server is down.
    """

    def __init__(
        self,
        router: ReplicaRouter,
        number: int,
        host: str,
        clock: Clock,
        ask: Callable[[], Awaitable[bytes]],
        down: Callable[[], Awaitable[None]],
    ) -> None:
        self._router = router
        self._number = number
        self._host = host
        self._clock = clock
        self._ask = ask
        self._down = down
        self._understood = True

    async def until_down(self) -> None:
        """Report to the router until the server is down."""
        down = asyncio.ensure_future(self._down())
        try:
            news = await self._poll(down, "")
            if news is None:
                return
            async with self._following(news):
                while news is not None and not down.done():
                    await asyncio.wait((down,), timeout=POLL_S)
                    news = await self._poll(down, news.instance)
                await down
        finally:
            down.cancel()

    async def _poll(self, down: "asyncio.Future[None]", instance: str) -> ServerNews | None:
        """Ask until there is an answer; None when the server is down, or is not this instance any more."""
        while not down.done():
            asked_at = self._clock.now()
            try:
                news = self._decode(await self._ask())
            except HeadraceError as error:
                log.debug("load of prefill server %s: %s", self._host, error.info.message)
                await asyncio.wait((down,), timeout=POLL_S)
                continue
            if instance and news.instance != instance:
                self._router.reset(self._number)
                return None
            self._tell(news, asked_at)
            return news
        return None

    def _decode(self, content: bytes) -> ServerNews:
        """Without what cannot be understood, which is logged once: a server is used all the same."""
        try:
            return msgspec.json.decode(content, type=ServerNews)
        except NO_MESSAGE as error:
            if self._understood:
                self._understood = False
                log.warning("GET /v1/handoff has a load or KV events that are not understood: %s", error)
            return ServerNews()

    def _tell(self, news: ServerNews, asked_at: float) -> None:
        if news.page_size is not None:
            self._router.paged(self._number, news.page_size)
        if news.load is not None:
            load, cost = news.load, (news.load.seconds_per_squared_token, news.load.seconds_per_token)
            delayed = load.delayed_requests
            waits = [(tokens, wait_s, delayed.get(tokens, 0.0)) for tokens, wait_s in sorted(load.wait_seconds.items())]
            report = LoadReport(load.queued_seconds, cost, load.trusted, waits)
            self._router.reported(self._number, report, asked_at, self._clock.now())

    @contextlib.asynccontextmanager
    async def _following(self, news: ServerNews) -> AsyncIterator[None]:
        """Follow the server's KV events, if it publishes any."""
        if news.kv_events is None:
            yield
            return
        follower = KvEventFollower(
            self._host,
            news.kv_events,
            lambda batch: self._router.apply(self._number, batch.events),
            lambda: self._router.forget_cache(self._number),
        )
        task = asyncio.create_task(keep_running(f"following the KV events of {self._host}", follower.run))
        try:
            yield
        finally:
            await cancel_all([task])
