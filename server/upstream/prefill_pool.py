"""The prefill servers of a decode server: discovery, choice of the least loaded one, and those that requests name.

One task per server:   GET /v1/handoff ──► scheduler connects to its control endpoint ──► wait until it is down ─┐
                           ▲    │ no answer: pause, twice as long each time                                      │
                           └────┴────────────────────────────────────────────────────────────────────────────────┘
A server that a request names and that is not configured is connected to if --allow-prefill covers it, and kept while
it is up, up to MAX_NAMED of them.
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
from headrace.core.runtime.backoff import Backoff
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.addresses import url
from headrace.core.types.allow_list import Rules, canonical, require_allowed
from headrace.core.types.errors import HeadraceError, unavailable
from headrace.server.upstream.handoff_params import PrefillAddress
from headrace.server.upstream.prefill_call import PrefillCall
from headrace.transfer.sockets.curve_keys import ServerKeys

log = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
CONNECT_TIMEOUT_S = 5.0
MAX_NAMED = 64  # servers that requests have named and that are not configured
NO_PREFILL_SERVER = "no_prefill_server"


class Discovery(msgspec.Struct, frozen=True):
    """Fields of the response to GET /v1/handoff that a decode server uses."""

    protocol: tuple[int, ...]
    """Versions that the server speaks."""
    instance: str
    """Id of this run of the server."""
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the control endpoint."""
    bootstrap_port: int = 0
    """HTTP port that answers GET /v1/handoff, too; 0 for none."""


class PrefillServer:
    """One prefill server and its state."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.host = canonical(parts.hostname or "")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.users = 0  # open requests that name it
        self.up = False  # the scheduler has a session with its control endpoint
        self.reason = "not reached yet"  # why it is down
        self.outstanding_tokens = 0  # prompt tokens sent to it and not answered
        self.target: Discovery | None = None  # what the scheduler was told to connect to
        self.changed = asyncio.Event()  # set when up changes

    def endpoint(self, control_port: int) -> str:
        """ZMQ address of the control endpoint at this port."""
        return url("tcp", urlsplit(self.url).hostname or "", control_port)

    def matches(self, address: PrefillAddress) -> bool:
        """Whether a request with this address means this server."""
        found = self.target
        if found is not None and address.engine and address.engine == found.instance:
            return True
        if canonical(address.host) != self.host:
            return False
        if address.kind == "control":
            return found is not None and address.port == found.control_port
        return address.port == self.port or (found is not None and address.port == found.bootstrap_port)


class PrefillPool:
    """Finds prefill servers and keeps the scheduler connected to them. Owns the HTTP client for prompts.

    urls: the configured servers (--prefill). post: sends to the scheduler. transport: in place of the network.
    keys: CURVE keys of the servers. rules: servers that requests may name (see headrace.core.types.allow_list).
    """

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
        self._named: dict[str, PrefillServer] = {}  # least recently used first
        self._named_tasks: dict[str, asyncio.Task[None]] = {}
        self._rules = rules
        self._post = post
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A prompt may wait in the prefill server's queue for long: the scheduler's deadlines end a request, not HTTP's.
        timeout = httpx.Timeout(None, connect=DISCOVERY_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=transport)
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect to the configured servers."""
        self._tasks = [asyncio.create_task(self._maintain(server)) for server in self._servers.values()]

    async def stop(self) -> None:
        """Cancel all tasks and prompts, and close the HTTP connections."""
        tasks = [*self._tasks, *self._named_tasks.values(), *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def update(self, state: PrefillState) -> None:
        """Note that the scheduler has connected to a server, or lost it."""
        server = self._servers.get(state.name) or self._named.get(state.name)
        if server is None or server.target is None:
            return
        if (server.up, server.reason) != (state.up, state.reason):
            log.info("prefill server %s is %s %s", state.name, "up" if state.up else "down:", state.reason)
        server.up, server.reason = state.up, state.reason
        server.changed.set()

    def servers(self) -> list[PrefillServer]:
        """The configured servers."""
        return list(self._servers.values())

    def problem(self) -> str | None:
        """Why no prompt can be sent to a configured server now, or None."""
        if any(server.up for server in self._servers.values()):
            return None
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers.values())
        return f"no prefill server is reachable ({reasons})" if reasons else "no prefill server is configured"

    def least_loaded(self) -> PrefillServer:
        """The reachable configured server with the fewest outstanding prompt tokens of this decode server. Raises
        HeadraceError (503) if none is reachable."""
        up = [server for server in self._servers.values() if server.up]
        if not up:
            raise unavailable(self.problem() or "", code=NO_PREFILL_SERVER)
        return min(up, key=lambda server: server.outstanding_tokens)

    def find(self, address: PrefillAddress) -> PrefillServer | None:
        """The server with this address, if the scheduler was told to connect to it already."""
        known = (*self._servers.values(), *self._named.values())
        return next((server for server in known if server.matches(address)), None)

    @contextlib.asynccontextmanager
    async def connected(self, address: PrefillAddress) -> AsyncIterator[PrefillServer]:
        """A connected server with this address, kept while the context lasts; connects if it is not connected yet.
        Raises HeadraceError: 403 if it is not allowed, 503 if it does not answer or too many are in use."""
        server = self.find(address) or self._connect_named(address)
        named = server.url in self._named
        if named:
            self._named[server.url] = self._named.pop(server.url)
        server.users += 1
        try:
            if not server.up and (not named or not await self._came_up(server, CONNECT_TIMEOUT_S)):
                raise unavailable(f"prefill server {server.url}: {server.reason}", code=NO_PREFILL_SERVER)
            yield server
        finally:
            server.users -= 1
            if named and not server.up and not server.users:
                self._forget(server)

    def _connect_named(self, address: PrefillAddress) -> PrefillServer:
        """Connect to a server that is not configured."""
        host = canonical(address.host)
        undiscovered = next((s for s in self._servers.values() if s.target is None and s.host == host), None)
        if undiscovered is not None:  # probably this one; its ports are unknown until it answers
            raise unavailable(f"prefill server {undiscovered.url}: {undiscovered.reason}", code=NO_PREFILL_SERVER)
        require_allowed(self._rules, address.host, address.port)
        if len(self._named) >= MAX_NAMED:
            idle = next((server for server in self._named.values() if not server.users), None)
            if idle is None:
                message = f"{MAX_NAMED} prefill servers that requests have named are in use"
                raise unavailable(message, code=NO_PREFILL_SERVER)
            self._forget(idle)
        scheme = "tcp" if address.kind == "control" else "http"
        server = PrefillServer(url(scheme, host, address.port))
        self._named[server.url] = server
        if address.kind == "http":
            self._named_tasks[server.url] = asyncio.create_task(self._maintain(server))
        else:
            self._connect(server, Discovery((), address.engine, address.port))
        return server

    def _forget(self, server: PrefillServer) -> None:
        if self._named.pop(server.url, None) is None:
            return
        if (task := self._named_tasks.pop(server.url, None)) is not None:
            task.cancel()
        if server.target is not None:
            self._post(RemovePrefill(name=server.url))

    def prefill_call(self, server: PrefillServer, tokens: int, body: dict[str, Any]) -> PrefillCall:
        """A prompt to send to the server; counts as load of so many tokens until it is answered or closed."""

        def load(change: int) -> None:
            server.outstanding_tokens += change * tokens

        return PrefillCall(self._http, server.url, body, load, self._calls)

    async def _maintain(self, server: PrefillServer) -> None:
        """Discover a server, have the scheduler connect to it, and begin again when it is down."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            pause_s = backoff.next_delay()
            server.changed.clear()
            try:
                found = await self._discover(server)
            except HeadraceError as error:
                server.reason = error.info.message
                log.debug("prefill server %s: %s", server.url, server.reason)
            else:
                self._connect(server, found)
                if await self._came_up(server, DISCOVERY_TIMEOUT_S + pause_s):
                    backoff.reset()
                    await self._until_down(server)
                    pause_s = backoff.next_delay()
            await asyncio.sleep(pause_s)

    def _connect(self, server: PrefillServer, found: Discovery) -> None:
        """Have the scheduler connect to the control endpoint that was found, unless it was told to already."""
        if found == server.target:
            return
        if server.target is not None:
            self._post(RemovePrefill(name=server.url))
        server.target = found
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
        """Ask a server where its control endpoint is. Raises HeadraceError (503)."""
        try:
            response = await self._http.get(f"{server.url}/v1/handoff", timeout=DISCOVERY_TIMEOUT_S)
        except Exception as error:  # not only httpx's: if its task ended, the server would never be found again
            raise unavailable(f"GET /v1/handoff failed: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise unavailable(f"GET /v1/handoff answered {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=Discovery)
        except NO_MESSAGE as error:
            raise unavailable(f"GET /v1/handoff sent an unexpected response: {error}") from error
