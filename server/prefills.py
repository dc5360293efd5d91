"""The prefill servers of a decode server: finding their desks, and choosing the least loaded one.

One task per server:   discover (GET /v1/handoff) ──► have the scheduler dial its desk ──► wait until it is down ─┐
                           ▲          │ no answer: wait a little longer each time                                  │
                           └──────────┴────────────────────────────────────────────────────────────────────────────┘
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from core.codec import NO_MESSAGE
from core.errors import HeadraceError, unavailable
from core.intake import AddPrefill, IntakeMessage, PrefillState, RemovePrefill
from server.fetch import Fetch
from server.keys import ServerKeys

log = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
NO_PREFILL_SERVER = "no_prefill_server"


class Discovery(msgspec.Struct, frozen=True):
    """What GET /v1/handoff answers, as far as a decode server needs it."""

    protocol: tuple[int, ...]
    instance: str
    desk_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class PrefillServer:
    """One configured URL and what is known of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.up = False
        self.reason = "not reached yet"
        self.outstanding_tokens = 0
        self.dialled: Discovery | None = None
        self.changed = asyncio.Event()

    def endpoint(self, desk_port: int) -> str:
        host = urlsplit(self.url).hostname or ""
        return f"tcp://[{host}]:{desk_port}" if ":" in host else f"tcp://{host}:{desk_port}"


class PrefillPool:
    """Owns the HTTP client to the prefill servers. post sends to the scheduler, in order. keys: their CURVE keys."""

    def __init__(
        self,
        urls: tuple[str, ...],
        api_key: str,
        post: Callable[[IntakeMessage], None],
        transport: httpx.AsyncBaseTransport | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        self._keys = keys or ServerKeys(())
        self._servers = {url: PrefillServer(url) for url in urls}
        self._post = post
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The prompt may wait in the prefill's queue for long: the scheduler's deadlines end a request, not HTTP's.
        timeout = httpx.Timeout(None, connect=DISCOVERY_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=transport)
        self._tasks: list[asyncio.Task[None]] = []
        self._fetches: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(server)) for server in self._servers.values()]

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._fetches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def update(self, state: PrefillState) -> None:
        """The scheduler's dialer has news of a server."""
        server = self._servers.get(state.name)
        if server is None or server.dialled is None:
            return
        if (server.up, server.reason) != (state.up, state.reason):
            log.info("prefill server %s is %s %s", state.name, "up" if state.up else "down:", state.reason)
        server.up, server.reason = state.up, state.reason
        server.changed.set()

    def states(self) -> list[PrefillServer]:
        return list(self._servers.values())

    def problem(self) -> str | None:
        """Why no prompt can be fetched now, or None."""
        if any(server.up for server in self._servers.values()):
            return None
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers.values())
        return f"no prefill server is reachable ({reasons})" if reasons else "no prefill server is configured"

    def choose(self) -> PrefillServer:
        """The reachable server with the fewest prompt tokens of ours. Raises HeadraceError (503) when there is none."""
        up = [server for server in self._servers.values() if server.up]
        if not up:
            raise unavailable(self.problem() or "", code=NO_PREFILL_SERVER)
        return min(up, key=lambda server: server.outstanding_tokens)

    def fetch(self, server: PrefillServer, tokens: int, body: dict[str, Any]) -> Fetch:
        """The HTTP half of a ticket; counts as load of the server until it is answered or closed."""

        def load(change: int) -> None:
            server.outstanding_tokens += change * tokens

        return Fetch(self._http, server.url, body, load, self._fetches)

    async def _keep(self, server: PrefillServer) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            server.changed.clear()
            try:
                found = await self._discover(server)
            except HeadraceError as error:
                server.reason = error.info.message
                log.debug("prefill server %s: %s", server.url, server.reason)
            else:
                self._dial(server, found)
                if await self._came_up(server, pause_s):
                    pause_s = FIRST_PAUSE_S
                    await self._until_down(server)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _dial(self, server: PrefillServer, found: Discovery) -> None:
        """Have the scheduler talk to the desk that was found, unless it does already."""
        if found == server.dialled:
            return
        if server.dialled is not None:
            self._post(RemovePrefill(name=server.url))
        server.dialled = found
        endpoint = server.endpoint(found.desk_port)
        self._post(AddPrefill(name=server.url, endpoint=endpoint, server_key=self._keys.of(server.url)))

    async def _came_up(self, server: PrefillServer, within_s: float) -> bool:
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S + within_s):
                while not server.up:
                    server.changed.clear()
                    await server.changed.wait()
        except TimeoutError:
            server.reason = server.reason or "its desk does not answer"
        return server.up

    async def _until_down(self, server: PrefillServer) -> None:
        while server.up:
            server.changed.clear()
            await server.changed.wait()

    async def _discover(self, server: PrefillServer) -> Discovery:
        """Raises HeadraceError when the server does not tell where its desk is."""
        try:
            response = await self._http.get(f"{server.url}/v1/handoff", timeout=DISCOVERY_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise unavailable(f"GET /v1/handoff failed: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise unavailable(f"GET /v1/handoff answered {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=Discovery)
        except NO_MESSAGE as error:
            raise unavailable(f"GET /v1/handoff answered something else: {error}") from error
