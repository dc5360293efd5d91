"""What gateways of all kinds are to their process and to operations: start, health, open requests, drain, stop."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

from headrace.core.config import GatewayConfig
from headrace.core.runtime.clock import SystemClock
from headrace.core.stats import Stats
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.status.recent_events import RecentEvents
from headrace.server.telemetry.prometheus import FrontMetrics

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


class BaseGateway(ABC):
    """See the module's docstring. Used by the event loop only."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.clock = SystemClock()
        self.front_metrics = FrontMetrics()
        self.recent = RecentEvents()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to a sentence when one of its threads has ended: it cannot serve any more."""
        self._draining = False
        self._open = 0  # requests that are being answered

    @abstractmethod
    async def start(self) -> str:
        """Find the servers on both sides, and begin to serve. Returns lines that say what is served. Raises ConfigError
        for servers that do not fit, and for ports and memory that cannot be had."""

    @abstractmethod
    def not_ready(self) -> ErrorInfo | None:
        """Why prompts would not be handed over now (503), or None."""

    @abstractmethod
    def statistics(self) -> list[Stats]:
        """What /metrics shows."""

    def engine_metrics(self) -> bytes:
        """Text of /metrics besides: gauges under the names that the engines of its kind have for them."""
        return b""

    def unhealthy(self) -> ErrorInfo | None:
        """Why this process counts as dead (503), or None."""
        return refusals.UNHEALTHY.error(problem=self.failed.result()) if self.failed.done() else None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A request that is being answered: drain() waits for it."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def drain(self) -> None:
        """Refuse requests from now on; return when nothing is open any more, or --drain-timeout is over."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s):
                while self._in_use():
                    await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """End all tasks and threads."""
        self._draining = True

    def _in_use(self) -> bool:
        """Whether drain() has to wait."""
        return self._open > 0

    def _ending(self) -> ErrorInfo | None:
        """Why nothing is served any more (503), or None."""
        if (problem := self.unhealthy()) is not None:
            return problem
        return refusals.GATEWAY_DRAINING.error() if self._draining else None

    def _fail(self, message: str) -> None:
        if not self.failed.done():
            log.error("%s", message)
            self.failed.set_result(message)
