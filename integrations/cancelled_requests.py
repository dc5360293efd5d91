"""An httpx transport whose requests may be cancelled at any moment without leaving a connection behind.

    assigned to a connection ──► connected ──► head sent ──────► response ──► being closed ──► connection idle
    └─ cancelled here: goes on, and ends ─────►┘└─ cancelled here: closed ────►┘└─ here: goes on ─►┘

httpcore keeps a connection for ever when its request is cancelled in the first or in the last of these: it is then
neither idle nor closed, and counts as one that is in use (https://github.com/encode/httpcore/issues/1093, seen in
1.0.9). Clients that leave are everyday life for a server that asks others, so what is cancelled there is let go on, in
a task of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import httpx

Trace = Callable[[str, object], Awaitable[None]]
"""httpcore's extension of that name: what happens to a request, as it happens."""
HEAD = "http11.send_request_headers.started"


class GivenUp(Exception):
    """Nobody waits for the response any more. Reaches no caller."""


class CancellableTransport(httpx.AsyncBaseTransport):
    """Sends requests by another transport, each in a task of its own. Used by one event loop."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._ending: set[asyncio.Task[None]] = set()  # closing responses, and requests that were cancelled

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncBaseTransport."""
        moment = _Moment(request.extensions.get("trace"))
        request.extensions = {**request.extensions, "trace": moment.saw}
        sending = asyncio.create_task(self._inner.handle_async_request(request))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._go_on(_end(sending, moment))
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, self._go_on)
        return response

    async def aclose(self) -> None:
        """Close all connections, those that are being made included."""
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._inner.aclose()

    def _go_on(self, ending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


class _Body(httpx.AsyncByteStream):
    """The body of a response, which is closed to the end."""

    def __init__(
        self, inner: httpx.AsyncByteStream, go_on: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        """go_on: runs a coroutine to its end."""
        self._inner = inner
        self._go_on = go_on

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        """See httpx.AsyncByteStream."""
        await asyncio.shield(self._go_on(self._inner.aclose()))


class _Moment:
    """How far a request has come."""

    def __init__(self, trace: Trace | None) -> None:
        """trace: of the caller, which is told everything."""
        self._trace = trace
        self.begun = False
        """Its head is being sent: cancelling it closes the connection from now on."""
        self.given_up = False

    async def saw(self, event: str, info: object) -> None:
        """See Trace. Raises GivenUp before the head of a request that was given up."""
        if event == HEAD:
            if self.given_up:
                raise GivenUp
            self.begun = True
        if self._trace is not None:
            await self._trace(event, info)


async def _end(sending: "asyncio.Task[httpx.Response]", moment: _Moment) -> None:
    """End a request whose caller was cancelled."""
    moment.given_up = True
    if moment.begun:
        sending.cancel()
    try:
        await asyncio.wait({sending})
    finally:
        sending.cancel()
    if not sending.cancelled() and sending.exception() is None:
        await sending.result().aclose()
