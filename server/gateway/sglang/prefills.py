"""The prefill servers of a gateway for SGLang: which are up, which gets the next request, and what it answers."""

import logging
from collections.abc import Iterable, Mapping

import httpx
import msgspec

from headrace.core.types.allow_list import address_of
from headrace.core.types.errors import HeadraceError, unavailable
from headrace.integrations.peer.commands import ConnectServer, ServerState

log = logging.getLogger(__name__)

BUSY = (429, 503)  # answers after which another server is asked


class PrefillTarget:
    """One of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host, self.port = address_of(url)
        self.up = False
        self.reason = "it has not answered yet"
        self.unfit = False
        self.open = 0  # requests that it is computing

    @property
    def connect(self) -> ConnectServer:
        """The order to keep a session with it."""
        return ConnectServer(name=self.url, host=self.host, port=self.port, http=True)


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What a prefill server has answered."""

    host: str
    port: int
    status: int
    content: bytes


class PrefillTargets:
    """Used by the event loop only. http: sends the API key of prefill servers, and waits as long as they compute."""

    def __init__(self, urls: Iterable[str], http: httpx.AsyncClient) -> None:
        self.all = [PrefillTarget(url) for url in urls]
        self._http = http

    def update(self, state: ServerState) -> None:
        """A session with a server has begun, or ended."""
        for server in self.all:
            if server.url == state.name:
                if server.up != state.up:
                    text = "is up" if state.up else f"is down: {state.reason}"
                    log.log(logging.INFO if state.up else logging.WARNING, "prefill server %s %s", server.url, text)
                server.up, server.reason, server.unfit = state.up, state.reason, state.incompatible

    def problem(self) -> str:
        """Why no request can be computed; "" if one can."""
        if any(server.up for server in self.all):
            return ""
        return "no prefill server: " + "; ".join(f"{server.url}: {server.reason}" for server in self.all)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> PrefillAnswer:
        """Have one of the servers compute a body: the one with the fewest, then others if it cannot be reached or is
        too busy. Raises HeadraceError (503) if none can be reached."""
        failure: HeadraceError | None = None
        answer: PrefillAnswer | None = None
        for server in sorted((one for one in self.all if one.up), key=lambda one: one.open):
            server.open += 1
            try:
                response = await self._http.post(f"{server.url}{path}", content=body, headers=dict(headers))
            except httpx.HTTPError as error:
                reason = f"prefill server {server.url}: {type(error).__name__} {error}".rstrip()
                log.warning("%s", reason)
                failure = unavailable(reason, code="prefill_unreachable")
                continue
            finally:
                server.open -= 1
            answer = PrefillAnswer(server.host, server.port, response.status_code, response.content)
            if response.status_code not in BUSY:
                return answer
        if answer is not None:
            return answer
        raise failure or unavailable(self.problem(), code="no_prefill_server")

    async def get(self, path: str) -> tuple[int, bytes]:
        """What the first server that is up answers. Raises HeadraceError (503)."""
        for server in self.all:
            if server.up:
                try:
                    response = await self._http.get(f"{server.url}{path}")
                except httpx.HTTPError as error:
                    raise unavailable(f"prefill server {server.url}: {error}") from error
                return response.status_code, response.content
        raise unavailable(self.problem(), code="no_prefill_server")
