"""The front end: the Service, and the HTTP server with the HTTP application."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from headrace.core.config import Config
from headrace.core.runtime.frames import FrameSocket
from headrace.core.runtime.liveness import read_activity
from headrace.core.runtime.output import say
from headrace.core.runtime.process import max_http_connections
from headrace.core.types.peers.addresses import everywhere, usable_url
from headrace.core.version import headrace_version
from headrace.server.app import create_app, create_bootstrap_app
from headrace.server.frontend.link.scheduler_link import SocketLink
from headrace.server.frontend.service import Service
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import HttpListeners
from headrace.server.http.server import HttpServer, LoopErrors
from headrace.server.launch.supervisor import Supervisor

NEWS_S = 1.0
LAST_ANSWERS_S = 0.5  # for requests that have just ended, or were not begun, to be answered


class FrontEnd:
    """HTTP servers on one port or two (--bootstrap-port), and the connection to the scheduler."""

    def __init__(
        self,
        config: Config,
        scheduler: FrameSocket,
        listeners: HttpListeners,
        supervisor: Supervisor,
        memory: Sequence[str],
    ) -> None:
        """supervisor: of the started scheduler. memory: how that of each rank is divided, in words."""
        self._config = config
        self.service = Service(
            SocketLink(scheduler),
            config,
            inspect_scheduler=partial(read_activity, supervisor.scheduler_pid),
            memory=memory,
            stage_watch=supervisor,
        )
        self._errors = LoopErrors()
        server = config.server
        self._connections = connections = HttpConnections(max_http_connections())
        self.service.metrics.include(connections.statistics, self._errors.statistics)
        self._listeners = [listeners.main]
        apps = [create_app(self.service)]
        if listeners.bootstrap:
            apps.append(create_bootstrap_app(self.service))
            self._listeners.append(listeners.bootstrap)
        self._http = [HttpServer(app, connections, server.keep_alive_s) for app in apps]

    async def serve(self) -> None:
        """Serve HTTP until close(). When one port closes, so does the other. Raises ConfigError if one is taken."""
        asyncio.get_running_loop().set_exception_handler(self._errors)
        serving = [
            asyncio.create_task(http.serve(sockets)) for http, sockets in zip(self._http, self._listeners, strict=True)
        ]
        await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        self.close()
        await asyncio.gather(*serving)

    async def drain(self) -> None:
        """Be not ready, and end when all open requests have: see Service.drain()."""
        server = self._config.server
        self._connections.leave()
        await self.service.drain(server.drain_timeout_s, server.drain_grace_s, self._connections.close_idle)

    async def end(self, serving: "asyncio.Future[None]") -> None:
        """Make serve() return, which is awaited elsewhere. What is not answered at once is not answered any more:
        bodies that have not come, clients that do not read."""
        self.close()
        await asyncio.wait((serving,), timeout=LAST_ANSWERS_S)
        self._connections.cut()
        await serving

    def close(self) -> None:
        """Make serve() return."""
        for http in self._http:
            http.close()

    async def print_engine_status(self) -> None:
        """Print the status of the stages whenever it changes, every NEWS_S at most: external stages have their logs
        elsewhere."""
        printed = ""
        while True:
            printed = await self.service.readiness.next_engine_news(printed)
            say(printed)
            await asyncio.sleep(NEWS_S)

    async def announce(self, started: float) -> None:
        """Print the addresses of the server, whose stages are loaded, and that it is ready; waits until /ready says so,
        too. started: time.monotonic() then."""
        config, server = self._config, self._config.server
        info, stages = self.service.control.require_stages()
        http = usable_url("http", server.host, server.port) + everywhere(server.host)
        lines = [
            f"Headrace {headrace_version()}: {config.server.role} server for {self.service.model.name} "
            f"({config.model.dtype}, {config.model.device})",
            f"  http   {http}  (its page; also /metrics, /ready)",
        ]
        if server.role == "prefill" and server.bootstrap_port:
            query = usable_url("http", server.host, server.bootstrap_port)
            lines.append(f"  query  {query}  (where the control endpoint is)")
        if info.control_port:
            host = config.transfer.host
            lines.append(f"  control endpoint   {usable_url('tcp', host, info.control_port)}{everywhere(host)}")
            names = (config.scheduler.layout.name(rank) for rank in stages.data_ranks)
            data = zip(stages.data_endpoints, names, strict=True)
            lines += [f"  data   {address}  ({name})" for address, name in data]
        if config.kv_events.port:
            events = config.kv_events
            lines.append(
                f"  events {usable_url('tcp', events.host, events.port)}{everywhere(events.host)}  (prefix cache)"
            )
        tokens = stages.kv_pages * config.engine.page_size
        each = f" in each of {config.scheduler.dp} replicas" if config.scheduler.dp > 1 else ""
        lines.append(
            f"  kv     {stages.kv_pages:,} pages of {config.engine.page_size} tokens ({tokens:,} tokens){each}"
        )
        lines += [f"  from   {url}  (prefill)" for url in config.server.prefill]
        if (why := self.service.readiness.not_ready()) is not None:
            lines.append(f"not ready yet: {why.message}")
            say("\n".join(lines))
            lines = []
            await self.service.readiness.wait_ready()
        lines.append(f"ready in {time.monotonic() - started:.1f} s; Ctrl-C drains")
        say("\n".join(lines))
