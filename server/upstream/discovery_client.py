"""Asks prefill servers by HTTP where their control endpoints are. What they send is bounded in size and in time."""

import asyncio
from contextlib import suppress
from typing import Annotated, Literal

import httpx
import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types import refusals
from headrace.core.types.errors import shown
from headrace.core.types.peers.discovery import parse_query
from headrace.integrations.http_client import failure
from headrace.server.upstream.bounded_response import PLAIN, read_bounded

TIMEOUT_S = 5.0  # for a whole response
MAX_BYTES = 1 << 20
MAX_WORDS = 300  # of a server's refusal that are repeated


Feature = Literal["structured_outputs", "penalties", "hidden_states", "images"]
"""What servers of earlier versions do not know, by its name in the response to GET /v1/handoff."""


class Discovery(msgspec.Struct, frozen=True):
    """Fields of the response to GET /v1/handoff that a decode server uses."""

    protocol: tuple[int, ...]
    """Versions that the server speaks."""
    instance: str
    """Id of this run of the server."""
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the control endpoint."""
    page_size: int = 1
    """Tokens of a page there."""
    bootstrap_port: int = 0
    """HTTP port that answers GET /v1/handoff, too; 0 for none."""
    structured_outputs: bool = False
    """It masks the first token of requests with a constraint; servers of earlier versions do not."""
    penalties: bool = False
    """It knows penalties and logit_bias; servers of earlier versions refuse them."""
    hidden_states: bool = False
    """It knows hidden_states; servers of earlier versions refuse it."""
    prompt_logprobs_start: bool = False
    """It knows prompt_logprobs_start; servers of earlier versions refuse it, and compute all logprobs of a prompt."""

    kv_hints: bool = False
    """It knows kv_hints; servers of earlier versions refuse it, and retain nothing."""

    session_id: bool = False
    """It knows session_id; servers of earlier versions refuse it."""

    images: bool = False
    """It takes images; servers of earlier versions, and models without an encoder, refuse them."""

    prefixes: bool = False
    """It answers POST /v1/prefixes, and knows cached_only; servers of earlier versions refuse both."""

    computation: str | None = None
    """What the bits of its KV depend on beside model and prompt; servers of earlier versions do not say, and audit no
    others."""

    resume: bool = False
    """It knows resume, and takes KV of decode servers; servers of earlier versions refuse the field."""

    def knows(self, feature: Feature) -> bool:
        """Whether prompts that need this feature may be sent to it."""
        match feature:
            case "structured_outputs":
                return self.structured_outputs
            case "penalties":
                return self.penalties
            case "hidden_states":
                return self.hidden_states
            case "images":
                return self.images


class DiscoveryClient:
    """GET /v1/handoff, and others that are as short. Servers that are not to get the API key are asked without it; if
    they want one, by GET /query, which needs none.

    with_key, without_key: clients that send the key and that do not.
    """

    def __init__(self, with_key: httpx.AsyncClient, without_key: httpx.AsyncClient) -> None:
        self._with_key = with_key
        self._without_key = without_key

    async def discover(self, url: str, *, key: bool) -> Discovery:
        """Where the control endpoint of the server at this URL is. key: the server may be sent the API key. Raises
        HeadraceError (503)."""
        path = "/v1/handoff"
        status, content = await self._get(url, path, key)
        try:
            if status == 401 and not key:
                path = "/query"
                found = parse_query(_required(path, *await self._get(url, path, key)))
                return Discovery((), found.instance, found.port)
            return msgspec.json.decode(_required(path, status, content), type=Discovery)
        except (*NO_MESSAGE, ValueError) as error:
            raise refusals.DISCOVERY_UNREADABLE.raised(path=path, error=error) from error

    async def get(self, url: str, path: str, *, key: bool) -> bytes:
        """The response to another question about the server, of MAX_BYTES at most. Raises HeadraceError (503)."""
        return _required(path, *await self._get(url, path, key))

    async def _get(self, url: str, path: str, key: bool) -> tuple[int, bytes]:
        """Status and content. Raises HeadraceError (503) if there is no response, or one that is too large."""
        http = self._with_key if key else self._without_key
        try:
            async with asyncio.timeout(TIMEOUT_S), http.stream("GET", f"{url}{path}", headers=PLAIN) as response:
                return response.status_code, await read_bounded(response, MAX_BYTES)
        except Exception as error:  # not only httpx's: if its task ended, the server would never be found again
            raise refusals.DISCOVERY_FAILED.raised(path=path, error=failure(error)) from error


def _required(path: str, status: int, content: bytes) -> bytes:
    """Raises HeadraceError (503) for another status than 200."""
    if status != 200:
        raise refusals.DISCOVERY_REFUSED.raised(path=path, answer=f"{status}{_words(content)}")
    return content


class _Said(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Said


def _words(content: bytes) -> str:
    """What a server says about its refusal, if it is one of ours."""
    with suppress(*NO_MESSAGE):
        return f": {shown(msgspec.json.decode(content, type=_Refusal).error.message, MAX_WORDS)}"
    return ""
