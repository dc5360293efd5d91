"""Asks prefill servers which model they serve, which a peer has to know before it connects."""

import asyncio
import logging

import httpx
import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import HeadraceError
from headrace.server.upstream.discovery_client import DiscoveryClient

log = logging.getLogger(__name__)

ASK_S = 0.5
NEWS_S = 10.0  # between two lines about servers that are waited for


class ServedFingerprint(msgspec.Struct, frozen=True):
    """Fields of GET /v1/handoff that say what a prefill server serves."""

    fingerprint: str | None = None
    """None until its stages have loaded."""
    model: str = ""


async def find_fingerprint(urls: tuple[str, ...], api_key: str) -> ServedFingerprint:
    """Wait for the first prefill server that says what it serves. Others are compared with it when they connect."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    loop = asyncio.get_running_loop()
    told = -NEWS_S
    async with httpx.AsyncClient(headers=headers, trust_env=False) as http:
        client = DiscoveryClient(http, http)
        while True:
            answers = await asyncio.gather(*(_ask(client, url) for url in urls))
            for answer in answers:
                if isinstance(answer, ServedFingerprint):
                    return answer
            if loop.time() - told >= NEWS_S:
                told = loop.time()
                for answer in answers:
                    log.info("%s; waiting for it", answer)
            await asyncio.sleep(ASK_S)


async def _ask(client: DiscoveryClient, url: str) -> ServedFingerprint | str:
    """What a server says, or why it says nothing."""
    try:
        found = msgspec.json.decode(await client.handoff(url, key=True), type=ServedFingerprint)
    except HeadraceError as error:
        return f"prefill server {url}: {error.info.message}"
    except NO_MESSAGE as error:
        return f"prefill server {url}: GET /v1/handoff sent an unexpected response: {error}"
    return found if found.fingerprint else f"prefill server {url} is loading"
