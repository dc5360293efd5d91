"""A gateway for SGLang decode engines: how it starts, hands over a request, drains and stops.

    router ──body──► rooms expect it ──► prefill server computes and holds ──► rooms load and write ──► answer
       └────body────► decode engine ──room, pages──► rooms ───────────────────────┘

Both sides get the same body at once, as SGLang's routers send it. The decode engine samples no first token: the prefill
server's goes into its metadata row, so the body goes on to the prefill server with the client's sampling options.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from functools import partial

import httpx
import msgspec

from headrace.core.config import GatewayConfig, TransferConfig
from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.stats import Sample, Stats
from headrace.core.types import refusals
from headrace.core.types.errors import (
    CANCELLED,
    ConfigError,
    ErrorInfo,
    HeadraceError,
)
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.addresses import host_port, usable_host
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.core.version import headrace_version
from headrace.gateway.base import BaseGateway
from headrace.gateway.metrics import GatewayMetrics, in_catalog, with_prefix
from headrace.gateway.pool_size import with_pool
from headrace.gateway.prefill_servers import HandoffModel, first_answer, wait_connected
from headrace.gateway.sglang.bodies import ListedModel, ListedModels, SglangBody, held_at, without_params
from headrace.gateway.sglang.decode_hosts import DecodeHosts
from headrace.gateway.sglang.engine_checks import EngineChecks
from headrace.gateway.sglang.prefills import PrefillAnswer, PrefillPoster
from headrace.gateway.sglang_nixl.engine_probe import probe
from headrace.gateway.sglang_nixl.handover import TESTED, HandoverOptions, KvHandover
from headrace.gateway.sglang_nixl.records import RoomLimits
from headrace.integrations.http_client import bearer, direct_async_client
from headrace.peer.records import PeerLimits
from headrace.server.config.gateway import decode_urls
from headrace.server.upstream.discovery_client import DiscoveryClient
from headrace.server.upstream.prefill_pool import CONNECT_TIMEOUT_S, PrefillPool
from headrace.transfer.sockets.curve_keys import known_servers


def _next_port(port: int) -> int:
    """The one after it, the same whenever the gateway is started: what engines have connected to leads to the new one,
    which notices them. 0, a free one, after 0 and the last."""
    return (port + 1) % (1 << 16) if port else 0


class SglangGateway(BaseGateway):
    """See the module's docstring. Used by the event loop only."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = direct_async_client(headers=bearer(config.prefill_api_key), timeout=timeout)
        self._keys = known_servers(config.curve_key, config.curve_server_keys)
        self._prefills = PrefillPool(
            config.prefill,
            config.prefill_api_key,
            self._connect,
            keys=self._keys,
            routing="least-load",
            clock=self.clock,
        )
        self._poster = PrefillPoster(self._prefills, self._http, self.front_metrics, self.clock)
        self._metrics = GatewayMetrics()
        self._handover: KvHandover | None = None
        self._hosts = DecodeHosts(decode_urls(config))  # used by the thread of the rooms
        self._checks: EngineChecks | None = None
        self.served_names: frozenset[str] = frozenset()
        """Of the model, at the prefill servers."""
        self._rooms: dict[str, asyncio.Future[ErrorInfo | None]] = {}  # by request
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """See BaseGateway: prefill servers. Decode engines register themselves."""
        config = self.config
        model, listed = await first_answer(config.prefill, self._served)
        self.served_names = frozenset(each.id for each in listed if each.parent is None)
        longest = listed[0].max_model_len
        if model.kv_cache is None:
            raise ConfigError(
                f"prefill server of {model.model}: GET /v1/handoff tells no shape of keys and values, so that SGLang "
                "decode engines cannot be served (another kind of cache, or an earlier version)"
            )
        shape = model.kv_cache
        geometry = Geometry(shape.dtype, shape.layers, shape.kv_heads, shape.head_dim, config.sglang_page_size)
        ask = partial(probe, geometry=geometry, api_key=config.decode_api_key, allow_untested=config.allow_untested)
        self._checks = EngineChecks(ask, self._on_verified)
        await self._checks.at_start(decode_urls(config))
        handover = with_pool(
            config, geometry, longest, lambda pages: self._make_handover(geometry, model, longest, pages)
        )
        self._handover = handover
        handover.start()
        self._prefills.start()
        await wait_connected(self._prefills)
        self.front_metrics.set_build(headrace_version(), "gateway", model.model)
        self._watch = asyncio.create_task(self._watch_threads(handover))
        bootstrap = host_port(usable_host(config.side_channel_host), handover.bootstrap_port)
        return "\n".join(
            [
                f"Headrace {headrace_version()}: gateway for {model.model} and SGLang decode engines "
                f"({shape.dtype}, pages of {geometry.page_size} tokens)",
                f"  {TESTED}",
                f"  bootstrap  {bootstrap}  (the second value of a router's --prefill URL PORT)",
            ]
        )

    async def hand_over(self, rid: str, path: str, body: SglangBody, headers: Mapping[str, str]) -> bytes:
        """Have a body's prompt computed and its KV written into the decode engine that asks for its room. Returns the
        answer to the router. Raises HeadraceError. Cancelling it gives up the prompt and the room."""
        try:
            handover = self._require()
        except HeadraceError as problem:
            self.refuse((body.room,) if body.room is not None else (), problem.info)
            raise
        if body.room is None:
            return (await self._poster.post(rid, path, msgspec.json.encode(body.fields), headers)).content
        request, began = secrets.token_hex(16), self.clock.now()
        ended = self._rooms[request] = self._loop.create_future()
        handover.rooms.expect(request, body.room)
        why = ErrorInfo(code=CANCELLED, message="the router's connection was closed", status=499)
        try:
            answer = await self._computed(rid, path, body.posted(f"sglang-{request}"), headers, ended)
            held = held_at(answer.content, answer.host, answer.port)
            handover.rooms.hold(request, body.room, held)
            if (error := await asyncio.shield(ended)) is not None:
                raise HeadraceError(error)
            self._metrics.handed_over(held.tokens)
            self._metrics.took("prefill", self.clock.now() - began)
            return without_params(answer.content)
        except HeadraceError as error:
            why = error.info
            raise
        finally:
            del self._rooms[request]
            if not ended.done():
                handover.rooms.withdraw(request, body.room, why)

    def refuse(self, rooms: Iterable[int], error: ErrorInfo) -> None:
        """Tell the decode engines that ask for these rooms that no KV will come, and why."""
        if self._handover is None or not self._handover.rooms.is_alive():
            return
        for room in rooms:
            request = secrets.token_hex(16)
            self._handover.rooms.expect(request, room)
            self._handover.rooms.withdraw(request, room, error)

    async def get(self, path: str) -> tuple[int, bytes]:
        """What a prefill server answers to a router's question. Raises HeadraceError."""
        self._require()
        return await self._poster.get(path)

    def not_ready(self) -> ErrorInfo | None:
        """Why prompts would not be handed over now (503), or None."""
        if (problem := self._ending()) is not None:
            return problem
        text = self._prefills.problem()
        if self._watch is None:
            return refusals.GATEWAY_STARTING.error(waiting=f": {text}" if text else "")
        return refusals.NO_PREFILL_SERVER.error(problem=text) if text else None

    def statistics(self) -> list[Stats]:
        """What /metrics shows."""
        up = Sample("prefill_servers_up", len(self._prefills.up()))
        found = [self.front_metrics.statistics(), self._metrics.statistics(), Stats((up,))]
        if self._handover is not None:
            found += [with_prefix(self._handover.rooms.statistics()), self._handover.rooms.connections()]
        return in_catalog(found)

    async def stop(self) -> None:
        """End all tasks and threads."""
        await super().stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._checks is not None:
            await self._checks.stop()
        await self._prefills.stop()
        if self._handover is not None:
            await asyncio.to_thread(self._handover.stop)
        await self._http.aclose()

    def _make_handover(self, geometry: Geometry, model: HandoffModel, longest: int, pages: int) -> KvHandover:
        """Raises ConfigError for ports that cannot be had, OSError for memory."""
        config = self.config
        return KvHandover(
            geometry,
            HandoverOptions(
                host=config.side_channel_host,
                bootstrap_port=config.bootstrap_port,
                rank_port=config.side_channel_port or _next_port(config.bootstrap_port),
                rooms=RoomLimits(bootstrap_s=config.bootstrap_timeout_s),
            ),
            PeerLimits(
                fingerprint=model.fingerprint or "",
                model=model.model,
                rules=allowed_prefills(config.prefill, ()),
                pages=pages,
                page_tokens=geometry.page_size,
                server_keys=self._keys,
            ),
            name=f"{socket.gethostname()}:{config.port} (gateway {os.getpid()})",
            max_model_len=longest,
            ended=self._on_thread_ended,
            server_state=self._on_thread_state,
            is_decode_host=lambda address: bool(self._hosts.urls_at(address)),
            registered=self._on_thread_registered,
            transfer=TransferConfig(curve_key=config.curve_key),
            api_key=config.prefill_api_key,
        )

    async def _served(self, url: str) -> tuple[HandoffModel, list[ListedModel]] | None:
        """What a prefill server serves, and under which names; None while it loads."""
        client = DiscoveryClient(self._http, self._http)
        model = msgspec.json.decode(await client.get(url, "/v1/handoff", key=True), type=HandoffModel)
        if not model.fingerprint:
            return None
        listed = msgspec.json.decode(await client.get(url, "/v1/models", key=True), type=ListedModels)
        return model, listed.data

    async def _computed(
        self, rid: str, path: str, posted: bytes, headers: Mapping[str, str], ended: "asyncio.Future[ErrorInfo | None]"
    ) -> PrefillAnswer:
        """A prefill server's answer. Raises HeadraceError, also if the room ends before."""
        computing = asyncio.ensure_future(self._poster.post(rid, path, posted, headers))
        try:
            await asyncio.wait((computing, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and (error := ended.result()) is not None:
                raise HeadraceError(error)
            return await computing
        finally:
            computing.cancel()

    def _require(self) -> KvHandover:
        """Raises HeadraceError (503) while requests are not handed over."""
        if (problem := self.not_ready()) is not None:
            raise HeadraceError(problem)
        assert self._handover is not None, "it is ready"
        return self._handover

    async def _watch_threads(self, handover: KvHandover) -> None:
        while handover.is_alive:
            await asyncio.sleep(1.0)
        self._fail("a thread that serves SGLang decode engines has ended")

    def _on_thread_ended(self, request: str, error: ErrorInfo | None) -> None:
        def resolve() -> None:
            future = self._rooms.get(request)
            if future is not None and not future.done():
                future.set_result(error)

        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(resolve)

    def _on_thread_registered(self, agent: str, address: str) -> None:
        urls = self._hosts.urls_at(address)

        def check() -> None:
            assert self._checks is not None, "the thread is started after it"
            self._checks.registered(agent, urls)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(check)

    def _on_verified(self, agent: str, wrong: str) -> None:
        assert self._handover is not None, "its thread has told of the agent"
        self._handover.rooms.verified(agent, wrong)

    def _connect(self, message: AddPrefill | RemovePrefill) -> None:
        """As PrefillPool asks a scheduler to."""
        assert self._handover is not None, "the pool is started after it"
        self._handover.peer.submit(message)

    def _on_thread_state(self, state: PrefillState) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._prefills.update, state)
