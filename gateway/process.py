"""`headrace gateway`: one gateway from start to exit status.

    ports bound ─► HTTP serves (/ready: 503) ─► engines, prefill servers ─► ready ─► signal ─► drained ─► stopped

A first SIGTERM, Ctrl-C or SIGHUP drains: requests are refused, open ones end, decode engines read what they were told
of, for --drain-timeout at most. A second one ends it at once.

Run as a module, it is a child process of `headrace serve`: its configuration comes on standard input. SIGTERM, from the
parent or from a service manager that sends it to all processes, drains it; the parent kills it when it is to end at
once.
"""

import asyncio
import logging
import sys
import time
from contextlib import ExitStack
from typing import Any

import msgspec
from fastapi import FastAPI

from headrace.core.config import GatewayConfig
from headrace.core.runtime.background import first_of
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.output import complain, say
from headrace.core.runtime.process import (
    CONFIGURATION_MISTAKE,
    die_with_parent,
    freeze_loaded,
    limit_integers,
    max_http_connections,
    raise_descriptor_limit,
)
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import everywhere, usable_url
from headrace.core.types.peers.decode_address import parse_decodes
from headrace.core.version import headrace_version
from headrace.gateway.base import BaseGateway
from headrace.gateway.sglang.gateway import SglangGateway
from headrace.gateway.sglang.routes import create_sglang_app
from headrace.gateway.vllm.gateway import VllmGateway
from headrace.gateway.vllm.routes import create_vllm_app
from headrace.server.frontend import request_log
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import bind
from headrace.server.http.server import HttpServer, LoopErrors
from headrace.server.launch.stop_signals import StopSignals
from headrace.transfer.backends.writer_locks import sweep

log = logging.getLogger(__name__)

FAILED = 1
LAST_ANSWERS_S = 0.5


def run(config: GatewayConfig, stop: StopSignals | None = None) -> int:
    """Run a gateway until a signal. Returns the exit status. stop: signals that are counted already. Raises ConfigError
    for an HTTP port that cannot be bound, and for engines and servers that do not fit."""
    configure_logging(config.log_level, "gateway", config.log_format, unlimited={request_log.__name__})
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_descriptor_limit()
    limit_integers()
    sweep()  # pools in shared memory of gateways that were killed
    stop = stop or StopSignals()
    with ExitStack() as bound:
        listeners = bind(config.host, config.port, "port")
        for listener in listeners:
            bound.callback(listener.close)
        return asyncio.run(_until_stopped(config, listeners, stop))


def run_child() -> int:
    """Entry point of a child of `headrace serve`. Returns the exit status."""
    stop = StopSignals(most=1)
    die_with_parent(int(sys.argv[1]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)
    try:
        return run(config, stop)
    except ConfigError as error:
        complain(error)
        return CONFIGURATION_MISTAKE


async def _until_stopped(config: GatewayConfig, listeners: list[Any], stop: StopSignals) -> int:
    with stop.attached():
        gateway, app = _make(config)
        http = _Http(gateway, app, listeners)
        try:
            return await _serve(config, gateway, http, stop)
        finally:
            await gateway.stop()
            await http.end()


def _make(config: GatewayConfig) -> tuple[BaseGateway, FastAPI]:
    """A gateway for the decode engines of a kind, and its routes."""
    if config.decode_engine == "sglang":
        sglang = SglangGateway(config)
        return sglang, create_sglang_app(sglang)
    vllm = VllmGateway(config)
    return vllm, create_vllm_app(vllm)


async def _serve(config: GatewayConfig, gateway: BaseGateway, http: "_Http", stop: StopSignals) -> int:
    started = time.monotonic()
    say(_beginning(config, http.port))
    over = asyncio.ensure_future(first_of(stop.first.wait(), gateway.failed, http.serving))
    starting = asyncio.ensure_future(gateway.start())
    await asyncio.wait((over, starting), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        say(_announcement(config, starting.result(), http.port, time.monotonic() - started))
        freeze_loaded()
        await over
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if not stop.first.is_set():
        return FAILED
    stop.say_draining()
    http.leave()
    await first_of(gateway.drain(), stop.second.wait(), gateway.failed)
    return stop.status


class _Http:
    """The HTTP server of a gateway, which serves from the beginning."""

    def __init__(self, gateway: BaseGateway, app: FastAPI, listeners: list[Any]) -> None:
        config, errors = gateway.config, LoopErrors()
        self.port: int = listeners[0].getsockname()[1]
        self._connections = HttpConnections(max_http_connections())
        gateway.front_metrics.include(self._connections.statistics, errors.statistics)
        asyncio.get_running_loop().set_exception_handler(errors)
        self._server = HttpServer(app, self._connections, config.keep_alive_s)
        self.serving: asyncio.Future[None] = asyncio.ensure_future(self._server.serve(listeners))

    def leave(self) -> None:
        """Close each connection with its next answer."""
        self._connections.leave()

    async def end(self) -> None:
        """Close the port; what is not answered at once is not answered any more."""
        self._server.close()
        await asyncio.wait((self.serving,), timeout=LAST_ANSWERS_S)
        self._connections.cut()
        await self.serving


def _address(config: GatewayConfig, port: int) -> str:
    return usable_url("http", config.host, port) + everywhere(config.host)


def _beginning(config: GatewayConfig, port: int) -> str:
    """What is waited for, before anything of it has answered."""
    lines = [f"Headrace {headrace_version()}: gateway at {_address(config, port)}, waiting for"]
    if config.decode_engine == "vllm":
        decodes = parse_decodes(config.decode)
        lines += [f"  decode   {one.url}  (side channel {one.side_channel})" for one in decodes]
    lines += [f"  prefill  {url}" for url in config.prefill]
    return "\n".join(lines)


def _announcement(config: GatewayConfig, served: str, port: int, seconds: float) -> str:
    """What is served, once it is."""
    return "\n".join(
        [
            served,
            f"  http   {_address(config, port)}  (a prefill server for routers; also /metrics, /ready)",
            f"ready in {seconds:.1f} s; Ctrl-C drains",
        ]
    )


if __name__ == "__main__":
    sys.exit(run_child())
