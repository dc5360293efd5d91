"""Answers that take their time: they notice a client that goes away, and start only when there is something to say."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.types.errors import ErrorInfo, HeadraceError

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; nobody is there to answer."""


def json_response(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run the work; cancel it and raise ClientGone when the client disconnects first. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # by us and nobody else
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


class EventWriter:
    """Server-sent events. The response starts with the first of them, so a failure before it keeps its status.
    Several tasks may write."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._writing = asyncio.Lock()
        self.started = False

    async def data(self, content: object, event: str = "") -> None:
        """One event with JSON data, under a name where the stream has named events."""
        head = f"event: {event}\n".encode() if event else b""
        await self._write(head + b"data: " + msgspec.json.encode(content) + b"\n\n")

    async def done(self) -> None:
        """The line that ends OpenAI's streams."""
        await self._write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        async with self._writing:
            if not self.started:
                self.started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


class Answer(Response):
    """Computes its JSON content while watching the client."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            content = await until_disconnect(receive, self._work())
        except ClientGone:
            return
        await json_response(content)(scope, receive, send)


class EventStream(Response):
    """Streams what the work writes. tell writes the error that ends a stream which has begun."""

    def __init__(
        self,
        work: Callable[[EventWriter], Coroutine[Any, Any, None]],
        tell: Callable[[EventWriter, ErrorInfo], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._work = work
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventWriter(send)
        try:
            await until_disconnect(receive, self._work(events))
        except ClientGone:
            return
        except HeadraceError as error:
            if not events.started:
                raise
            await self._tell(events, error.info)
        await events.end()
