"""Bodies of SGLang's routers, answered by the prefill servers of a gateway."""

from collections.abc import Mapping

import httpx
import msgspec

from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.requests.request import SamplingParams
from headrace.integrations.http_client import connection_error
from headrace.server.frontend.generation.prefill_failover import PrefillFailover, PromptServers
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.connection import Extensions, past_stale_connection
from headrace.server.upstream.prefill_call import response_error, stated_error
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool

KEY_STATUSES = (401, 403)  # of the key of this gateway, which its client does not know
UNKNOWN_PROMPT = (0,)  # a gateway has no tokenizer: each request counts as a prompt of one token


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What a prefill server has answered with status 200."""

    host: str
    port: int
    """Port of its control endpoint."""
    content: bytes


class PrefillPoster:
    """Has prefill servers compute bodies as they are. Used by the event loop only.

    http: sends the API key of prefill servers, and waits as long as they compute.
    """

    def __init__(self, prefills: PrefillPool, http: httpx.AsyncClient, metrics: FrontMetrics, clock: Clock) -> None:
        self._prefills = prefills
        self._http = http
        self._clock = clock
        self._failover = PrefillFailover(prefills, metrics, clock)

    async def post(self, rid: str, path: str, body: bytes, headers: Mapping[str, str]) -> PrefillAnswer:
        """The answer of the server with the fewest requests, or of another one if that refuses or fails it. Raises
        HeadraceError: what a server says of the request, or why none has computed it."""

        async def attempt(_left: GenerationRequest, choice: PrefillChoice, _servers: PromptServers) -> PrefillAnswer:
            return await self._answer(choice, path, body, headers)

        request = GenerationRequest(rid=rid, prompt=UNKNOWN_PROMPT, sampling=SamplingParams())
        return await self._failover.run(request, self._clock.now(), lambda: False, attempt)

    async def get(self, path: str) -> tuple[int, bytes]:
        """What the server with the fewest requests answers. Raises HeadraceError."""
        with self._prefills.chosen(UNKNOWN_PROMPT, "") as choice:
            url = choice.server.url
        try:
            response = await past_stale_connection(
                lambda extensions: self._http.get(f"{url}{path}", extensions=extensions)
            )
        except httpx.HTTPError as error:
            raise HeadraceError(connection_error(url, error)) from error
        return response.status_code, response.content

    async def _answer(self, choice: PrefillChoice, path: str, body: bytes, headers: Mapping[str, str]) -> PrefillAnswer:
        """Raises HeadraceError (at_prefill)."""
        server = choice.server
        assert server.target is not None, "it is up"
        port = server.target.control_port

        async def send(extensions: Extensions) -> httpx.Response:
            return await self._http.post(
                f"{server.url}{path}", content=body, headers=dict(headers), extensions=extensions
            )

        try:
            response = await past_stale_connection(send)
        except httpx.HTTPError as error:
            raise _at_prefill(connection_error(server.url, error)) from error
        if response.status_code != 200:
            said = response_error if response.status_code in KEY_STATUSES else stated_error
            raise _at_prefill(said(response.status_code, response.content, response.headers))
        return PrefillAnswer(server.host, port, response.content)


def _at_prefill(error: ErrorInfo) -> HeadraceError:
    return HeadraceError(msgspec.structs.replace(error, at_prefill=True))
