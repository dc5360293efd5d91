"""HTTP connections to prefill servers that were kept, and closed meanwhile."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
Extensions = dict[str, Any]
"""Of an HTTP request, for httpx."""


async def past_stale_connection(send: Callable[[Extensions], Awaitable[T]]) -> T:
    """Send a request, and once more if the server had closed the idle connection before it could see it. send: sends it
    with these extensions. Raises httpx.HTTPError, and what `send` raises."""
    connection = _ConnectionTrace()
    try:
        return await send({"trace": connection.saw})
    except httpx.HTTPError as error:
        if not connection.was_stale(error):
            raise
        first = error
    try:
        return await send({})
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise first from error


class _ConnectionTrace:
    """What httpcore tells of the connection of one HTTP request, as its "trace" extension."""

    def __init__(self) -> None:
        self._connected = self._sent = self._heard = False

    async def saw(self, event: str, _info: object) -> None:
        self._connected = self._connected or event == "connection.connect_tcp.started"
        self._sent = self._sent or event == "http11.send_request_headers.started"
        self._heard = self._heard or event == "http11.receive_response_headers.complete"

    def was_stale(self, error: httpx.HTTPError) -> bool:
        """Whether the request went into a connection that was kept from an earlier one, and that ended unanswered."""
        ended = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)
        return ended and self._sent and not self._connected and not self._heard
