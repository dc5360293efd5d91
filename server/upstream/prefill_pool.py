"""The prefill servers of a decode server: finding their control endpoints, and choosing the least loaded one of its
own, or finding the one that a request names.

One task per server:   discover (GET /v1/handoff) ──► have the scheduler dial its control endpoint ──► wait until it is
down ─┐
                           ▲          │ no answer: wait a little longer each time                                  │
                           └──────────┴────────────────────────────────────────────────────────────────────────────┘
A server that a request names and that is none of our own is dialled if --allow-prefill covers it, and kept while it is
up, up to a number of them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.core.messages.frontend import AddPrefill, AnyFrontendRequest, PrefillState, RemovePrefill
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.addresses import url
from headrace.core.types.allow_list import Rules, canonical, require_allowed
from headrace.core.types.errors import HeadraceError, unavailable
from headrace.server.upstream.handoff_params import Address
from headrace.server.upstream.prefill_request import PrefillCall
from headrace.transfer.sockets.curve_keys import ServerKeys

log = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
DIAL_TIMEOUT_S = 5.0
MAX_NAMED = 64  # servers that requests have named, and that are none of our own
NO_PREFILL_SERVER = "no_prefill_server"


class Discovery(msgspec.Struct, frozen=True):
    """What GET /v1/handoff answers, as far as a decode server needs it. bootstrap_port: where else it is answered."""

    protocol: tuple[int, ...]
    instance: str
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    bootstrap_port: int = 0


class PrefillServer:
    """One URL and what is known of it. users: requests that have named it and go on."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.host = canonical(parts.hostname or "")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.users = 0
        self.up = False
        self.reason = "not reached yet"
        self.outstanding_tokens = 0
        self.dialled: Discovery | None = None
        self.changed = asyncio.Event()

    def endpoint(self, control_port: int) -> str:
        return url("tcp", urlsplit(self.url).hostname or "", control_port)

    def answers_to(self, address: Address) -> bool:
        """Whether a request that gives this address means this server."""
        found = self.dialled
        if found is not None and address.engine and address.engine == found.instance:
            return True
        if canonical(address.host) != self.host:
            return False
        if address.kind == "control_server":
            return found is not None and address.port == found.control_port
        return address.port == self.port or (found is not None and address.port == found.bootstrap_port)


class PrefillPool:
    """Owns the HTTP client to the prefill servers. post sends to the scheduler, in order. keys: their CURVE keys.
    rules: which servers requests may name (see headrace.core.types.allow_list)."""

    def __init__(
        self,
        urls: tuple[str, ...],
        api_key: str,
        post: Callable[[AnyFrontendRequest], None],
        transport: httpx.AsyncBaseTransport | None = None,
        keys: ServerKeys | None = None,
        *,
        rules: Rules = (),
    ) -> None:
        self._keys = keys or ServerKeys(())
        self._servers = {url: PrefillServer(url) for url in urls}
        self._named: dict[str, PrefillServer] = {}  # the one used last at the end
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._rules = rules
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
        tasks = [*self._tasks, *self._keepers.values(), *self._fetches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def update(self, state: PrefillState) -> None:
        """The scheduler's control client has news of a server."""
        server = self._servers.get(state.name) or self._named.get(state.name)
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

    def find(self, address: Address) -> PrefillServer | None:
        """The server that a request means, if it is one that is dialled already."""
        known = (*self._servers.values(), *self._named.values())
        return next((server for server in known if server.answers_to(address)), None)

    @contextlib.asynccontextmanager
    async def visit(self, address: Address) -> AsyncIterator[PrefillServer]:
        """The server that a request names, for as long as the request takes. Raises HeadraceError: 403 for one that may
        not be dialled, 503 for one that does not answer, or for too many."""
        server = self.find(address) or self._dial_named(address)
        named = server.url in self._named
        if named:
            self._named[server.url] = self._named.pop(server.url)
        server.users += 1
        try:
            if not server.up and (not named or not await self._came_up(server, DIAL_TIMEOUT_S)):
                raise unavailable(f"prefill server {server.url}: {server.reason}", code=NO_PREFILL_SERVER)
            yield server
        finally:
            server.users -= 1
            if named and not server.up and not server.users:
                self._forget(server)

    def _dial_named(self, address: Address) -> PrefillServer:
        """Begin to talk to a server that is none of our own."""
        lost = next(
            (s for s in self._servers.values() if s.dialled is None and s.host == canonical(address.host)), None
        )
        if lost is not None:  # probably this one, and there is no telling before it has answered
            raise unavailable(f"prefill server {lost.url}: {lost.reason}", code=NO_PREFILL_SERVER)
        require_allowed(self._rules, address.host, address.port)
        if len(self._named) >= MAX_NAMED:
            idle = next((server for server in self._named.values() if not server.users), None)
            if idle is None:
                raise unavailable(
                    f"{MAX_NAMED} prefill servers that requests have named are in use", code=NO_PREFILL_SERVER
                )
            self._forget(idle)
        scheme = "tcp" if address.kind == "control_server" else "http"
        server = PrefillServer(url(scheme, canonical(address.host), address.port))
        self._named[server.url] = server
        if address.kind == "http":
            self._keepers[server.url] = asyncio.create_task(self._keep(server))
        else:
            self._dial(server, Discovery((), address.engine, address.port))
        return server

    def _forget(self, server: PrefillServer) -> None:
        if self._named.pop(server.url, None) is None:
            return
        if (keeper := self._keepers.pop(server.url, None)) is not None:
            keeper.cancel()
        if server.dialled is not None:
            self._post(RemovePrefill(name=server.url))

    def fetch(self, server: PrefillServer, tokens: int, body: dict[str, Any]) -> PrefillCall:
        """The HTTP half of a ticket; counts as load of the server until it is answered or closed."""

        def load(change: int) -> None:
            server.outstanding_tokens += change * tokens

        return PrefillCall(self._http, server.url, body, load, self._fetches)

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
                if await self._came_up(server, DISCOVERY_TIMEOUT_S + pause_s):
                    pause_s = FIRST_PAUSE_S
                    await self._until_down(server)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _dial(self, server: PrefillServer, found: Discovery) -> None:
        """Have the scheduler talk to the control endpoint that was found, unless it does already."""
        if found == server.dialled:
            return
        if server.dialled is not None:
            self._post(RemovePrefill(name=server.url))
        server.dialled = found
        endpoint = server.endpoint(found.control_port)
        self._post(AddPrefill(name=server.url, endpoint=endpoint, server_key=self._keys.of(server.url)))

    async def _came_up(self, server: PrefillServer, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while not server.up:
                    server.changed.clear()
                    await server.changed.wait()
        except TimeoutError:
            server.reason = server.reason or "its control endpoint does not answer"
        return server.up

    async def _until_down(self, server: PrefillServer) -> None:
        while server.up:
            server.changed.clear()
            await server.changed.wait()

    async def _discover(self, server: PrefillServer) -> Discovery:
        """Raises HeadraceError when the server does not tell where its control endpoint is."""
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
