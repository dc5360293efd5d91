"""JSON responses and server-sent events whose work is cancelled when the client disconnects.

Large parts of responses are made and encoded beside the event loop, bit by bit, so that others are served meanwhile:
logprobs of a prompt of 60,000 tokens are 15 MB of JSON, which takes seconds to put together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.types.errors import ErrorInfo, HeadraceError

T = TypeVar("T")
LARGE = 256  # positions whose logprobs are put together on the event loop; more take a thread
PART = 64  # items of a list that are encoded at once; the event loop gets its turn between two parts
PART_BYTES = 1 << 18  # of a body that are written at once; the event loop gets its turn between two parts


class ClientDisconnected(Exception):
    """The client has closed its connection."""


def json_response(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with JSON that is known already."""
    return _InParts(msgspec.json.encode(content), status, headers, media_type="application/json")


class _InParts(Response):
    """A response that is written as fast as the client reads it: a body of 60 MB that is written at once is copied
    several times on the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_parts(send, bytes(self.body), more=False)


async def _send_parts(send: Send, body: bytes, *, more: bool) -> None:
    """Send what is to come of a response's body, or some of it."""
    for at in range(0, max(1, len(body)), PART_BYTES):
        to_come = more or at + PART_BYTES < len(body)
        await send({"type": "http.response.body", "body": body[at : at + PART_BYTES], "more_body": to_come})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run the work. Raises ClientDisconnected, after cancelling it, if the client disconnects first. The request's body
    must have been read."""
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
        if gone and task.uncancel() == 0:  # nothing but watch() has cancelled it
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


class EventWriter:
    """Writes server-sent events. The response starts with the first event, so a failure before it has its own status.
    Several tasks may write."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._writing = asyncio.Lock()
        self.started = False
        """Whether an event was written."""

    async def data(self, content: object, event: str = "") -> None:
        """Write one event with JSON data. event: its name, "" for an event without one."""
        head = f"event: {event}\n".encode() if event else b""
        await self._write(head + b"data: " + msgspec.json.encode(content) + b"\n\n")

    async def done(self) -> None:
        """Write the [DONE] line that ends OpenAI's and SGLang's streams."""
        await self._write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        async with self._writing:
            if not self.started:
                self.started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_parts(self._send, body, more=True)


class JsonAnswer(Response):
    """A JSON response whose content is computed by work; cancels the work if the client disconnects."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work and send its result."""
        try:
            content = await until_disconnect(receive, self._work())
        except ClientDisconnected:
            return
        await json_response(content)(scope, receive, send)


class EventStream(Response):
    """A stream of the events that work writes; cancels the work if the client disconnects. write_error ends a stream
    that fails after its first event; a failure before it becomes an error response."""

    def __init__(
        self,
        work: Callable[[EventWriter], Coroutine[Any, Any, None]],
        write_error: Callable[[EventWriter, ErrorInfo], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._work = work
        self._write_error = write_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work, which sends events."""
        events = EventWriter(send)
        try:
            await until_disconnect(receive, self._work(events))
        except ClientDisconnected:
            return
        except HeadraceError as error:
            if not events.started:
                raise
            await self._write_error(events, error.info)
        await events.end()


async def made_aside(make: Callable[[], T], positions: int) -> T:
    """What make returns; its long lists are JSON already if it is about many positions. make may run in a thread. A
    response may have thousands of small choices: others get their turn before each."""
    if positions <= LARGE:
        await asyncio.sleep(0)
        return make()
    return await asyncio.to_thread(lambda: _encoded(make))


def _encoded(make: Callable[[], T]) -> T:
    made: T = encode_lists(make())
    return made


def encode_lists(value: Any) -> Any:
    """The value with JSON in the place of its long lists, those within its objects and short lists included."""
    if isinstance(value, msgspec.Struct):
        return type(value)(**encode_lists(msgspec.structs.asdict(value)))
    if isinstance(value, dict):
        return {key: encode_lists(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PART:
        return [encode_lists(each) for each in value]
    parts = (msgspec.json.encode(value[at : at + PART])[1:-1] for at in range(0, len(value), PART))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
