"""Whether a worker is registered with Dynamo: as long as its server serves.

GET /ready every second ─┬─ 200 ──────────────────────► registered
                         └─ 503, or no answer twice ──► not registered; requests that come are answered with an error
                                                        that the frontend migrates
A server that comes back as another one than was registered (page size, context length, model) ends the worker, so that
whoever has started it starts it again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.core.types.errors import PREFILL_LOST, PREFILL_UNREACHABLE, ErrorInfo, HeadraceError
from headrace.integrations.dynamo.server import Description, Server

log = logging.getLogger(__name__)
POLL_S = 1.0
PATIENCE = 2
"""Times that a server gives no answer before it counts as gone: one that is busy may answer late."""


class Endpoint(Protocol):
    """What Dynamo's endpoint is needed for."""

    async def register_endpoint_instance(self) -> None:
        """Take requests from now on."""

    async def unregister_endpoint_instance(self) -> None:
        """Take none."""


class Presence:
    """Keeps the registration of one worker true. changed: called with a reason when the worker has to end."""

    def __init__(self, server: Server, described: Description, endpoint: Endpoint, changed: Callable[[str], None]):
        self._server = server
        self._described = described
        self._endpoint = endpoint
        self._changed = changed
        self._registered = True  # by Dynamo's runtime, when it begins to serve
        self._silent = 0

    async def watch(self) -> None:
        """Look after it until the task is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.look(await self._server.problem())

    async def look(self, problem: ErrorInfo | None) -> None:
        """Take note of whether the server serves."""
        silent = problem is not None and problem.code in (PREFILL_LOST, PREFILL_UNREACHABLE)
        self._silent = self._silent + 1 if silent else 0
        if problem is None and not self._registered:
            await self._come_back()
        elif problem is not None and self._registered and (not silent or self._silent >= PATIENCE):
            log.warning("%s; not registered with Dynamo until it is ready again", problem.message)
            await self._endpoint.unregister_endpoint_instance()
            self._registered = False

    async def _come_back(self) -> None:
        try:
            found = await self._server.describe()
        except HeadraceError:
            return
        if (was := _identity(self._described)) != (now := _identity(found)):
            self._changed(f"{self._server.url} has come back as another server: {now}, not {was}")
            return
        await self._endpoint.register_endpoint_instance()
        self._registered = True
        log.info("%s is ready again: registered with Dynamo", self._server.url)


def _identity(description: Description) -> dict[str, object]:
    """What has to stay as it was registered."""
    fields = msgspec.structs.asdict(description)
    return {name: value for name, value in fields.items() if name != "instance"}
