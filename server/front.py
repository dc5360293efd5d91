"""The front end of one server: its service, and uvicorn with the application over it."""

import contextlib
from collections.abc import Iterator

import uvicorn

from core.config import Config
from server.app import create_app
from server.kv_events import endpoint
from server.link import ZmqSchedulerLink
from server.service import Service
from server.version import headrace_version


class HttpServer(uvicorn.Server):
    """uvicorn with the signals left to us: it would close its port before the work in flight has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FrontEnd:
    """What listens to clients, and talks to the scheduler at the given endpoint."""

    def __init__(self, config: Config, scheduler: str) -> None:
        self._config = config
        self.service = Service(ZmqSchedulerLink(scheduler), config)
        self._http = HttpServer(_uvicorn_config(config, self.service))

    async def serve(self) -> None:
        """Answer clients until close()."""
        await self._http.serve()

    def close(self) -> None:
        """Have serve() return."""
        self._http.should_exit = True

    async def tell_engine_news(self) -> None:
        """Print how far the stages have come, whenever that changes: for stages with logs on machines of their own."""
        told = ""
        while True:
            told = await self.service.next_engine_news(told)
            print(told, flush=True)

    def announce(self, seconds: float) -> None:
        """Print what listens where."""
        config, engine = self._config, self.service.engine
        assert engine is not None
        lines = [
            f"Headrace {headrace_version()}: {config.server.role} server for {self.service.model_name} "
            f"({config.model.dtype}, {config.model.device})",
            f"  http   http://{config.server.host}:{config.server.port}",
        ]
        if engine.desk_port:
            lines.append(f"  desk   tcp://{config.transfer.host}:{engine.desk_port}")
            lines += [f"  data   {address}  (stage {stage})" for stage, address in enumerate(engine.data)]
        if config.kv_events.port:
            lines.append(f"  events {endpoint(config.kv_events.host, config.kv_events.port)}  (prefix cache)")
        tokens = engine.kv_pages * config.engine.page_size
        lines.append(f"  kv     {engine.kv_pages:,} pages of {config.engine.page_size} tokens ({tokens:,} tokens)")
        lines += [f"  from   {url}  (prefill)" for url in config.server.prefill]
        lines.append(f"ready in {seconds:.1f} s; Ctrl-C drains")
        print("\n".join(lines), flush=True)


def _uvicorn_config(config: Config, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service, config.server),
        host=config.server.host,
        port=config.server.port,
        log_config=None,
        access_log=config.server.log_level == "debug",
        timeout_graceful_shutdown=2,  # what was in flight has been drained before
        lifespan="off",
    )
