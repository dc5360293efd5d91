"""The decode engines of a gateway: found at the start, and watched afterwards.

    unknown ──probe──► up ◄──handshake every second──► down (its process is gone, or does not answer)
       └── refused: the gateway ends (at the start)  └── another handshake ──probe──► refused: it has other values

A handshake goes by the side channel and costs the engine nothing; a probe is in the log of its HTTP server.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import httpx

from headrace.core.runtime.background import cancel_all
from headrace.core.types import refusals
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.decode_address import DecodeAddress
from headrace.gateway.engine_http import EngineUnreachable
from headrace.gateway.vllm.engine_client import EngineClient
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine, EngineGone
from headrace.gateway.vllm_nixl.wire import HandshakePayload

log = logging.getLogger(__name__)

PROBE_S = 1.0  # between two probes of an engine, or handshakes with it
NEWS_S = 10.0  # between two lines about an engine that is waited for
PROBES_MISSED = 3  # after which an engine that does not answer counts as down; a busy one may be slow


Probe = Callable[[DecodeAddress], DecodeEngine]
"""Blocking. Raises EngineUnreachable, EngineGone, ConfigError."""
Handshake = Callable[[DecodeAddress], HandshakePayload]
"""Likewise."""


class WatchedEngine:
    """One decode engine and its state."""

    def __init__(self, address: DecodeAddress, client: EngineClient) -> None:
        self.address = address
        self.client = client
        self.found: DecodeEngine | None = None  # as of the last probe that it has answered and passed
        self.up = False
        self.reason = "it was not asked yet"  # why it is not up
        self.payload: HandshakePayload | None = None  # of the process that was probed last
        self.missed = 0  # handshakes without an answer since the last one with
        self.ended = ""  # engine id of the last process that is known to have ended

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return self.address.url


class DecodeEngines:
    """Probes decode engines."""

    def __init__(
        self, addresses: Iterable[DecodeAddress], http: httpx.AsyncClient, probe: Probe, handshake: Handshake
    ) -> None:
        self.all = [WatchedEngine(address, EngineClient(http, address.url)) for address in addresses]
        self._probe = probe
        self._handshake = handshake
        self._refreshed = -PROBE_S  # when the names of adapters were looked at
        self._tasks: list[asyncio.Task[None]] = []

    async def find(self) -> DecodeEngine:
        """Wait for all engines. Returns one of them; the others serve the same KV. Raises ConfigError for one that
        cannot be served, and for two that differ."""
        tasks = [asyncio.create_task(self._find(engine)) for engine in self.all]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        for one in found[1:]:
            if differs := one.differs_from(found[0]):
                raise ConfigError(f"the decode engines differ, so that KV for one is none for the other: {differs}")
        return found[0]

    def watch(self, on_gone: Callable[[DecodeEngine], None], on_up: Callable[[list[DecodeEngine]], None]) -> None:
        """Look at the engines every second from now on. on_gone: called with an engine whose process has ended. on_up:
        with those that are up, whenever one of them is another one."""
        self._tasks = [asyncio.create_task(self._watch(engine, on_gone, on_up)) for engine in self.all]

    async def stop(self) -> None:
        """End the watch."""
        await cancel_all(self._tasks)

    def problem(self) -> str:
        """What is wrong with the engines, in words; "" for nothing. Engines that are down are a problem if all are."""
        refused = [engine for engine in self.all if engine.found is not None and not engine.up and not engine.missed]
        down = self.all if not any(engine.up for engine in self.all) else refused
        return "; ".join(f"decode engine {engine.url}: {engine.reason}" for engine in down)

    def client(self) -> EngineClient:
        """Of an engine that is up. Raises HeadraceError (503)."""
        for engine in self.all:
            if engine.up:
                return engine.client
        raise refusals.NO_DECODE_ENGINE.raised(problem=self.problem())

    async def has_adapter(self, name: str) -> bool:
        """Whether an engine has a LoRA adapter of this name. Adapters come and go while an engine runs."""
        now = asyncio.get_running_loop().time()
        if name not in self._adapters() and now - self._refreshed >= PROBE_S:
            self._refreshed = now
            for engine in (engine for engine in self.all if engine.up):
                with contextlib.suppress(EngineUnreachable, ConfigError):  # the watch tells
                    engine.found = await asyncio.to_thread(self._probe, engine.address)
        return name in self._adapters()

    def _adapters(self) -> set[str]:
        return {name for engine in self.all if engine.found is not None for name in engine.found.adapters}

    def up(self) -> list[DecodeEngine]:
        """The engines that are up."""
        return [engine.found for engine in self.all if engine.up and engine.found is not None]

    def agents(self) -> list[str]:
        """NIXL agents of the engines that are up."""
        return [engine.agent for engine in self.up()]

    async def _find(self, engine: WatchedEngine) -> DecodeEngine:
        """Probe until there is an answer. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        told = -NEWS_S
        while True:
            try:
                engine.found = await asyncio.to_thread(self._probe, engine.address)
            except EngineUnreachable as error:
                engine.reason = f"{error}; waiting for it"
                if loop.time() - told >= NEWS_S:
                    told = loop.time()
                    log.info("decode engine %s: %s", engine.url, engine.reason)
                await asyncio.sleep(PROBE_S)
                continue
            engine.up, engine.reason = True, ""
            log.info("decode engine %s: vLLM %s with %s", engine.url, engine.found.vllm_version, engine.found.model)
            return engine.found

    async def _watch(
        self,
        engine: WatchedEngine,
        on_gone: Callable[[DecodeEngine], None],
        on_up: Callable[[list[DecodeEngine]], None],
    ) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            known, was_up, reason = engine.found, engine.up, engine.reason
            assert known is not None, "find() has returned"
            try:
                await self._check(engine, known, on_gone)
            except Exception:  # the watch goes on, whatever an engine sends
                log.exception("the look at decode engine %s has failed", engine.url)
            if engine.up and (not was_up or engine.found != known):
                on_up(self.up())
            if (engine.up, engine.reason) != (was_up, reason):
                level = logging.INFO if engine.up else logging.WARNING
                log.log(level, "decode engine %s is %s", engine.url, "up" if engine.up else f"down: {engine.reason}")

    async def _check(self, engine: WatchedEngine, known: DecodeEngine, on_gone: Callable[[DecodeEngine], None]) -> None:
        """Look once at an engine that was found before."""
        try:
            payload = await asyncio.to_thread(self._handshake, engine.address)
            if engine.up and payload == engine.payload:
                engine.missed = 0
                return
            found = await asyncio.to_thread(self._probe, engine.address)
            engine.payload = payload
        except EngineUnreachable as error:
            engine.missed += 1
            gone = isinstance(error, EngineGone)
            if not gone and engine.missed < PROBES_MISSED:
                return
            engine.up, engine.reason = False, str(error)
            if gone:
                _end(engine, known, on_gone)
            return
        except ConfigError as error:
            engine.up, engine.reason, engine.missed = False, str(error), 0
            return
        engine.missed = 0
        engine.reason = found.differs_from(known)
        engine.up = not engine.reason
        if engine.up:
            engine.found = found
        if found.engine_id != known.engine_id:
            _end(engine, known, on_gone)


def _end(engine: WatchedEngine, ended: DecodeEngine, on_gone: Callable[[DecodeEngine], None]) -> None:
    """Tell once that a process of an engine has ended."""
    if engine.ended != ended.engine_id:
        engine.ended = ended.engine_id
        on_gone(ended)
