"""An HTTP server that answers as an OpenAI server would, in its own time: for tests of a client."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = Callable[[int, dict[str, Any], asyncio.StreamWriter], Any]
TOKEN = {"choices": [{"index": 0, "text": "x"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
}


def answer(status: int, body: object) -> bytes:
    content = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: object) -> bytes:
    return chunk(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = STREAM + event(TOKEN) + event(TOKEN) + event(USAGE) + event(b"[DONE]") + chunk(b"")


class EventServer:
    """reply: writes the answer to a POST; gets its number, body and connection. posts: the bodies so far."""

    def __init__(self, reply: Reply, *, models: tuple[str, ...] = ("m",), key: str = "", role: str = "null") -> None:
        self._reply = reply
        self._models = models
        self._key = key
        self._role = role
        self.posts: list[dict[str, Any]] = []
        self.url = ""
        self.answers: dict[str, tuple[int, object]] = {}
        """Status and body by path, in the place of an honest server's."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                method, path, _ = line.decode().split()
                if self._key and headers.get("authorization") != f"Bearer {self._key}":
                    writer.write(answer(401, {"error": {"message": "no key", "code": "unauthorized"}}))
                elif method == "POST":
                    body = json.loads(await reader.readexactly(int(headers["content-length"])))
                    self.posts.append({"path": path, **body})
                    await self._reply(len(self.posts) - 1, body, writer)
                elif path in self.answers:
                    writer.write(answer(*self.answers[path]))
                elif path == "/v1/models":
                    data = [{"id": name, "max_model_len": 4096} for name in self._models]
                    writer.write(answer(200, {"data": data}))
                elif path == "/server_info" and self._role:
                    info = {"instance_id": "i", "version": "1", "disaggregation_mode": self._role}
                    writer.write(answer(200, info))
                else:
                    writer.write(answer(404, {}))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def serving(server: EventServer) -> Iterator[EventServer]:
    """The server in a thread of its own for the length of a with block."""
    loop = asyncio.new_event_loop()
    stop, ready = asyncio.Event(), threading.Event()

    async def run() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


async def reply_at_once(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE)
