"""The prefill servers of a decode server: discovery, the choice of one for each prompt, and those that requests name.

One task per server:   GET /v1/handoff ──► scheduler connects to its control endpoint ──► watch until it is down ─┐
                           ▲    │ no answer: pause, twice as long each time                                      │
                           └────┴────────────────────────────────────────────────────────────────────────────────┘
A server that a request names and that is not configured is connected to if --allow-prefill covers it, and kept while
it is up, up to MAX_NAMED of them. The API key goes only to servers that --prefill or --allow-prefill names by host and
port; where another one wants a key, GET /query, which needs none, says where its control endpoint is.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterator, Mapping, Sequence

import httpx
import msgspec

from headrace.core.config import Routing
from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.messages.replies import PrefillState
from headrace.core.runtime.background import cancel_all, keep_running
from headrace.core.runtime.clock import Clock, SystemClock
from headrace.core.runtime.rate_limit import Backoff
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.peers.addresses import url
from headrace.core.types.peers.allow_list import Rules, canonical, is_named, require_allowed
from headrace.core.types.requests.images import ImageInput
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.integrations.http_client import PROMPT_TIMEOUT, bearer, direct_async_client
from headrace.server.routing.failover import MoveReason, avoided_s
from headrace.server.routing.replica_load import Sent
from headrace.server.routing.replica_router import ReplicaRouter
from headrace.server.upstream.bounded_response import PLAIN, read_bounded
from headrace.server.upstream.discovery_client import MAX_BYTES, Discovery, DiscoveryClient, Feature
from headrace.server.upstream.handoff_params import PrefillAddress
from headrace.server.upstream.prefill_call import CallObserver, PrefillCall, stated_error
from headrace.server.upstream.prefill_server import PrefillServer
from headrace.server.upstream.server_watch import ServerWatch
from headrace.transfer.sockets.curve_keys import ServerKeys

log = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
CONNECT_TIMEOUT_S = 5.0
MAX_NAMED = 64  # servers that requests have named and that are not configured
AVOID_S = 1.0  # at most, for which a server that has failed a prompt gets none that another one could compute
MISSING: dict[Feature, tuple[refusals.Refusal, str]] = {  # refusal and name of what no prefill server knows
    "structured_outputs": (refusals.NO_STRUCTURED_OUTPUT, "structured output"),
    "penalties": (refusals.NO_PENALTIES, "penalties and logit_bias"),
    "hidden_states": (refusals.NO_HIDDEN_STATES, "hidden states"),
    "images": (refusals.NO_IMAGES, "images"),
}


class PrefillChoice(msgspec.Struct, frozen=True):
    """The server that a prompt goes to."""

    server: PrefillServer
    sent: Sent | None
    """How the router counts it; None for a server that is not configured."""


class PrefillPool:
    """Finds prefill servers and keeps the scheduler connected to them. Owns the HTTP client for prompts.

    urls: the configured servers (--prefill). post: sends to the scheduler. transport: in place of the network.
    keys: CURVE keys of the servers. rules: servers that requests may name (see headrace.core.types.peers.allow_list).
    routing: how a configured server is chosen.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        api_key: str,
        post: Callable[[AddPrefill | RemovePrefill], None],
        transport: httpx.AsyncBaseTransport | None = None,
        keys: ServerKeys | None = None,
        *,
        rules: Rules = (),
        routing: Routing = "score",
        compares: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """compares: what a server is expected to take is asked for, so that its load is followed."""
        self._clock = clock or SystemClock()
        self._compares = compares
        self._by_score = routing == "score" and len(urls) > 1
        self._router = ReplicaRouter(len(urls), random.Random())
        self._keys = keys or ServerKeys(())
        self._servers = {url: PrefillServer(url) for url in urls}
        self._named: dict[str, PrefillServer] = {}  # least recently used first
        self._named_tasks: dict[str, asyncio.Task[None]] = {}
        self._rules = rules
        self._post = post
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = direct_async_client(
            headers=bearer(api_key), timeout=PROMPT_TIMEOUT, limits=limits, transport=transport
        )
        self._without_key = direct_async_client(timeout=PROMPT_TIMEOUT, limits=limits, transport=transport)
        self._discovery = DiscoveryClient(self._http, self._without_key)
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect to the configured servers."""
        self._tasks = [asyncio.create_task(self._kept(server)) for server in self._servers.values()]

    async def stop(self) -> None:
        """Cancel all tasks and prompts, and close the HTTP connections."""
        await cancel_all([*self._tasks, *self._named_tasks.values(), *self._calls])
        await self._http.aclose()
        await self._without_key.aclose()

    def update(self, state: PrefillState) -> None:
        """Note that the scheduler has connected to a server, or lost it."""
        server = self._servers.get(state.name) or self._named.get(state.name)
        if server is None or server.target is None:
            return
        if (server.up, server.reason) != (state.up, state.reason):
            level = logging.WARNING if server.was_up else logging.INFO  # until then it is only not there yet
            log.log(level, "prefill server %s is %s", state.name, "up" if state.up else f"down: {state.reason}")
        if server.up != state.up:
            server.changed_at = self._clock.now()
        server.was_up |= state.up
        server.up, server.reason, server.unfit = state.up, state.reason, state.unfit
        server.changed.set()

    def servers(self) -> list[PrefillServer]:
        """The configured servers."""
        return list(self._servers.values())

    def up(self) -> list[PrefillServer]:
        """The configured servers that prompts can be sent to now."""
        return [server for server in self._servers.values() if server.up]

    def known(self) -> list[PrefillServer]:
        """The configured servers, and those that requests have named."""
        return [*self._servers.values(), *self._named.values()]

    def problem(self) -> str | None:
        """Why no prompt can be sent to a configured server now, or None."""
        if self.up():
            return None
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers.values())
        return f"no prefill server is reachable ({reasons})" if reasons else "no prefill server is configured"

    @contextlib.contextmanager
    def chosen(
        self,
        prompt: tuple[int, ...],
        salt: str,
        images: Sequence[ImageInput] = (),
        *,
        tried: Container[str] = (),
        needs: Collection[Feature] = (),
        prefer: str = "",
    ) -> Iterator[PrefillChoice]:
        """The reachable configured server for a prompt, which counts as its load while the context lasts, or until it
        is answered. tried: URLs of servers that are not to get it. needs: what the server has to know. prefer: URL of
        the server that gets it if it can. Raises HeadraceError (503) if none is reachable."""
        servers = list(self._servers.values())
        up = [number for number, server in enumerate(servers) if server.up and server.url not in tried]
        if not up:
            raise refusals.NO_PREFILL_SERVER.raised(problem=self.problem() or "")
        for feature in needs:
            up = self._knowing(up, feature)
        up = [number for number in up if servers[number].url == prefer] or up
        if self._by_score:
            sent = self._router.choose(pack(prompt), salt, up, self._clock.now(), images)
        else:
            sent = self._router.least_loaded(len(prompt), up, self._clock.now())
        try:
            yield PrefillChoice(servers[sent.replica], sent)
        finally:
            self._router.done(sent)

    def forecast(self, choice: PrefillChoice) -> RemoteForecast | None:
        """What the chosen server is expected to take; None where it has not said what computing costs it."""
        return None if choice.sent is None else self._router.forecast(choice.sent, self._clock.now())

    def withdraw(self, choice: PrefillChoice) -> None:
        """The prompt does not go to the chosen server: it is computed where it is decoded."""
        if choice.sent is not None:
            self._router.withdraw(choice.sent)

    def handed_over(self, choice: PrefillChoice, seconds: float) -> None:
        """The KV has come. seconds: what that took beside the server's own queue and computing."""
        if choice.sent is not None:
            self._router.handed_over(choice.sent, seconds)

    @contextlib.contextmanager
    def chosen_by_router(
        self, server: PrefillServer, prompt: tuple[int, ...], needs: Collection[Feature] = ()
    ) -> Iterator[PrefillChoice]:
        """A server that a request has named, as chosen() has it. Raises HeadraceError (503) if it does not know what is
        needed."""
        for feature in needs:
            if not server.knows((feature,)):
                kind, what = MISSING[feature]
                raise kind.raised(names=server.url, what=what)
        number = self._number(server)
        sent = None if number is None else self._router.least_loaded(len(prompt), [number], self._clock.now())
        try:
            yield PrefillChoice(server, sent)
        finally:
            if sent is not None:
                self._router.done(sent)

    def _knowing(self, up: list[int], feature: Feature) -> list[int]:
        """Those of these servers that know a feature. Raises HeadraceError (503) if there is none."""
        servers = list(self._servers.values())
        found = [number for number in up if servers[number].knows((feature,))]
        if not found:
            kind, what = MISSING[feature]
            names = ", ".join(servers[number].url for number in up)
            raise kind.raised(names=names, what=what)
        return found

    def has_other(self, tried: Container[str], needs: Collection[Feature] = ()) -> bool:
        """Whether a configured server is reachable that is not among these URLs, and knows what is needed."""
        return any(server.up and server.url not in tried and server.knows(needs) for server in self._servers.values())

    def avoid(self, choice: PrefillChoice, error: ErrorInfo, reason: MoveReason) -> None:
        """The chosen server has failed its prompt: for a moment, later ones go elsewhere if they can."""
        now = self._clock.now()
        if choice.sent is not None and (seconds := avoided_s(error, reason, AVOID_S)) > 0:
            self._router.avoid(choice.sent.replica, now + seconds)

    def find(self, address: PrefillAddress) -> PrefillServer | None:
        """The server with this address, if the scheduler was told to connect to it already."""
        return next((server for server in self.known() if server.matches(address)), None)

    @contextlib.asynccontextmanager
    async def connected(self, address: PrefillAddress) -> AsyncIterator[PrefillServer]:
        """A connected server with this address, kept while the context lasts; connects if it is not connected yet.
        One that is down is looked for at once: the router that names it may know that it has started again.
        Raises HeadraceError: 403 if it is not allowed, 503 if it does not answer or too many are in use."""
        server = self.find(address) or await self._found_again(address) or self._connect_named(address)
        named = server.url in self._named
        if named:
            self._named[server.url] = self._named.pop(server.url)
        server.users += 1
        try:
            if not server.up and not await server.found(CONNECT_TIMEOUT_S):
                raise refusals.PREFILL_DOWN.raised(url=server.url, reason=server.reason)
            yield server
        finally:
            server.users -= 1
            if named and not server.up and not server.users:
                self._forget(server)

    async def _found_again(self, address: PrefillAddress) -> PrefillServer | None:
        """The configured server with an address that is not known: one of its host that is down may have started with
        another control port. None if the host has no such server. Raises HeadraceError (503) if they stay down."""
        down = [server for server in self._servers.values() if server.host == canonical(address.host) and not server.up]
        for server in down:
            if await server.found(CONNECT_TIMEOUT_S) and server.matches(address):
                return server
        for server in down:
            if not server.up:
                raise refusals.PREFILL_DOWN.raised(url=server.url, reason=server.reason)
        return None

    def _connect_named(self, address: PrefillAddress) -> PrefillServer:
        """Connect to a server that is not configured."""
        host = canonical(address.host)
        require_allowed(self._rules, address.host, address.port)
        if len(self._named) >= MAX_NAMED:
            idle = next((server for server in self._named.values() if not server.users), None)
            if idle is None:
                raise refusals.PREFILLS_NAMED.raised(most=MAX_NAMED)
            self._forget(idle)
        scheme = "tcp" if address.kind == "control" else "http"
        server = PrefillServer(url(scheme, host, address.port))
        self._named[server.url] = server
        if address.kind == "http":
            self._named_tasks[server.url] = asyncio.create_task(self._kept(server))
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

    def prefill_call(self, choice: PrefillChoice, body: PrefillRequest, observer: CallObserver) -> PrefillCall:
        """A prompt to send to the server that was chosen for it."""
        router, sent = self._router, choice.sent

        def posted() -> None:
            if sent is not None:
                router.posted(sent, self._clock.now())

        def answered() -> None:
            if sent is not None:
                router.done(sent)

        http = self._http if self._gets_key(choice.server) else self._without_key
        return PrefillCall(
            http, choice.server.url, body, observer, posted=posted, answered=answered, running=self._calls
        )

    def refetch_call(self, server: PrefillServer, body: PrefillRequest, observer: CallObserver) -> PrefillCall:
        """A prompt to send to a server that has computed it before. It does not count as load."""
        http = self._http if self._gets_key(server) else self._without_key
        return PrefillCall(
            http, server.url, body, observer, posted=lambda: None, answered=lambda: None, running=self._calls
        )

    async def ask(
        self, server: PrefillServer, path: str, body: bytes, headers: Mapping[str, str], *, method: str = "POST"
    ) -> bytes:
        """The answer to a short question. Raises HeadraceError for another status than 200, ValueError for an
        answer that is too long, httpx.HTTPError."""
        http = self._http if self._gets_key(server) else self._without_key
        async with http.stream(method, f"{server.url}{path}", content=body, headers={**PLAIN, **headers}) as response:
            content = await read_bounded(response, MAX_BYTES)
        if response.status_code != 200:
            raise HeadraceError(stated_error(response.status_code, content, response.headers))
        return content

    async def _kept(self, server: PrefillServer) -> None:
        await keep_running(f"the maintenance of prefill server {server.url}", lambda: self._maintain(server))

    async def _maintain(self, server: PrefillServer) -> None:
        """Discover a server, have the scheduler connect to it, and begin again when it is down."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            pause_s = backoff.next_delay()
            server.attempts += 1
            server.changed.clear()
            server.wanted.clear()
            try:
                found = await self._discovery.discover(server.url, key=self._gets_key(server))
            except HeadraceError as error:
                server.reason, server.failed = error.info.message, server.attempts
                server.changed.set()
                log.debug("prefill server %s: %s", server.url, server.reason)
            else:
                self._connect(server, found)
                if await server.came_up(DISCOVERY_TIMEOUT_S + pause_s):
                    backoff.reset()
                    await self._watch(server)
                    pause_s = backoff.next_delay()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await server.wanted.wait()

    def _connect(self, server: PrefillServer, found: Discovery) -> None:
        """Have the scheduler connect to the control endpoint that was found, unless it was told to already."""
        if found == server.target:
            return
        if server.target is not None:
            self._post(RemovePrefill(name=server.url))
            if (number := self._number(server)) is not None:
                self._router.reset(number)
            server.target = None
        endpoint = server.endpoint(found.control_port)
        self._post(AddPrefill(name=server.url, endpoint=endpoint, server_key=self._keys.of(server.url)))
        server.target = found

    def _number(self, server: PrefillServer) -> int | None:
        """The number of a configured server in the router."""
        return next((number for number, each in enumerate(self._servers.values()) if each is server), None)

    async def _watch(self, server: PrefillServer) -> None:
        """Learn what the choice goes by, until the server is down."""
        number = self._number(server)
        if number is None or not (self._by_score or self._compares):
            await server.until_down()
            return
        watch = ServerWatch(
            self._router,
            number,
            server.host,
            self._clock,
            lambda: self._discovery.get(server.url, "/v1/handoff", key=self._gets_key(server)),
            server.until_down,
        )
        await watch.until_down()

    def _gets_key(self, server: PrefillServer) -> bool:
        return server.url in self._servers or is_named(self._rules, server.host, server.port)
