"""The prefill servers of a gateway: which model they serve, which a peer has to know before it connects, and the wait
for a connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.core.types.kv.geometry import CacheShape
from headrace.integrations.http_client import bearer, direct_async_client
from headrace.server.upstream.discovery_client import TIMEOUT_S, DiscoveryClient
from headrace.server.upstream.prefill_pool import PrefillPool

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

ASK_S = 0.5
CHECK_S = 0.1
NEWS_S = 10.0  # between two lines about servers that are waited for


class HandoffModel(msgspec.Struct, frozen=True):
    """Fields of GET /v1/handoff that say what a prefill server serves."""

    fingerprint: str | None = None
    """None until its stages have loaded."""
    model: str = ""
    kv_cache: CacheShape | None = None
    """None of a cache of another kind, and of an earlier version."""


async def find_served(urls: tuple[str, ...], api_key: str) -> HandoffModel:
    """Wait for the first prefill server that says what it serves. Others are compared with it when they connect."""
    async with direct_async_client(headers=bearer(api_key), timeout=TIMEOUT_S) as http:
        client = DiscoveryClient(http, http)

        async def ask(url: str) -> HandoffModel | None:
            found = msgspec.json.decode(await client.get(url, "/v1/handoff", key=True), type=HandoffModel)
            return found if found.fingerprint else None

        return await first_answer(urls, ask)


async def first_answer(urls: tuple[str, ...], ask: Callable[[str], Awaitable[Answer | None]]) -> Answer:
    """Ask prefill servers until one has answered; what is waited for is logged. ask: returns None while a server loads,
    and may raise HeadraceError and what msgspec raises for an unexpected response. It has to end by itself."""
    loop = asyncio.get_running_loop()
    told = -NEWS_S
    while True:
        answers = await asyncio.gather(*(_asked(url, ask) for url in urls))
        for answer, _ in answers:
            if answer is not None:
                return answer
        if loop.time() - told >= NEWS_S:
            told = loop.time()
            for url, (_, reason) in zip(urls, answers, strict=True):
                log.info("prefill server %s %s; waiting for it", url, reason)
        await asyncio.sleep(ASK_S)


async def _asked(url: str, ask: Callable[[str], Awaitable[Answer | None]]) -> tuple[Answer | None, str]:
    """What a server says, and why it says nothing."""
    try:
        return await ask(url), "is loading"
    except HeadraceError as error:
        return None, f"does not say what it serves: {error.info.message}"
    except NO_MESSAGE as error:
        return None, f"sent an unexpected response: {error}"


async def wait_connected(prefills: PrefillPool) -> None:
    """Wait until a prefill server is connected. Raises ConfigError if none of them fits the decode engines."""
    while not prefills.up():
        if all(server.unfit for server in prefills.servers()):
            reasons = "; ".join(f"{server.url}: {server.reason}" for server in prefills.servers())
            raise ConfigError(f"no prefill server fits the decode engines: {reasons}")
        await asyncio.sleep(CHECK_S)
