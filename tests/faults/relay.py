"""A TCP relay that does what bad networks do: delays, cuts, trickles, falls silent, resets.

    decode server ──up──► 127.0.0.2:PORT  relay  127.0.0.1:PORT ──► prefill server
                  ◄─down─                                       ◄──

A decode server connects to the host of its --prefill URL, at the ports that the prefill server names: a relay with the
same port numbers at another loopback address is between the two for every connection.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

BUFFER_BYTES = 64 << 10
TURN_S = 0.02
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST

DRAW = random.Random()  # its own: relays run on threads, beside tests that seed the common one


@dataclass
class Way:
    """One direction of all connections of a relay. Changes count at once."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Longest additional delay, drawn for every piece. Bytes stay in order."""
    bytes_per_s: float = 0.0
    """0: any number."""
    piece: int = 0
    """Most bytes written at once, the number drawn anew each time; 1: byte by byte. 0: as they come."""
    silent: bool = False
    """Nothing goes through, and connections stay open. What was kept goes on afterwards."""

    def clear(self) -> None:
        """Make it a good network again."""
        self.__init__()  # type: ignore[misc]


class Relay:
    """Runs on a thread, from its constructor to close()."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.up, self.down = Way(), Way()
        self.refusing = False
        """New connections are reset."""
        self._target = target
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listen, started), daemon=True)
        self._thread.start()
        assert started.wait(10)
        assert self._server is not None, f"the relay cannot listen at {listen}"

    def reset(self) -> None:
        """End every connection with RST, at both ends."""
        self._call(lambda: [link.reset(link.client, link.server) for link in set(self._links)])

    def half_open(self) -> None:
        """The prefill server's end of every connection is reset; the decode server's stays open and silent."""
        self._call(lambda: [link.reset(link.server) for link in set(self._links)])

    def clear(self) -> None:
        """Make both directions good again; connections that are half open end."""
        self.refusing = False
        self.up.clear()
        self.down.clear()
        self._call(lambda: [link.reset(link.client) for link in set(self._links) if link.halved])

    def close(self) -> None:
        """End all connections and the thread."""
        self._call(self._loop.stop)
        self._thread.join(10)

    def _call(self, action: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _run(self, listen: tuple[str, int], started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with suppress(OSError):
                self._server = self._loop.run_until_complete(
                    asyncio.start_server(self._serve, *listen, limit=BUFFER_BYTES, reuse_address=True)
                )
            started.set()
            if self._server is not None:
                self._loop.run_forever()
                self._server.close()
                for link in set(self._links):
                    link.reset(link.client, link.server)
                tasks = asyncio.all_tasks(self._loop)
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.refusing:
            _reset(client)
            return
        with suppress(OSError, asyncio.CancelledError):
            try:
                answers, server = await asyncio.open_connection(*self._target, limit=BUFFER_BYTES)
            except OSError:
                _reset(client)
                return
            link = _Link(client, server)
            self._links.add(link)
            try:
                await asyncio.gather(
                    link.pump(reader, server, self.up, client), link.pump(answers, client, self.down, server)
                )
            finally:
                self._links.discard(link)
                _reset(client)
                _reset(server)


class _Link:
    """The two connections of one decode server's connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.halved = False
        for writer in (client, server):
            with suppress(OSError):
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset(self, *ends: asyncio.StreamWriter) -> None:
        """Reset these of its ends."""
        self.halved = len(ends) == 1
        for end in ends:
            _reset(end)

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, source: asyncio.StreamWriter
    ) -> None:
        """Forward one direction until its source ends. A delay does not slow it down: pieces are in flight."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        writing = asyncio.create_task(self._write(line, writer, way))
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while data := await reader.read(BUFFER_BYTES):
                due = max(due, loop.time() + way.delay_s + DRAW.uniform(0, way.jitter_s))
                await line.put((due, data))
        except ConnectionError:
            pass
        await line.put((0.0, b""))
        await writing
        if not self.halved:  # the end of one is the end of the other
            with suppress(OSError):
                writer.write_eof()

    async def _write(self, line: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, way: Way) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await line.get()
            if not data:
                return
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            while data:
                while way.silent or self.halved:
                    if self.client.is_closing():
                        return
                    await asyncio.sleep(TURN_S)
                size = DRAW.randint(1, way.piece) if way.piece else len(data)
                if way.bytes_per_s:
                    size = min(size, max(1, int(way.bytes_per_s * TURN_S)))
                    await asyncio.sleep(size / way.bytes_per_s)
                piece, data = data[:size], data[size:]
                if not await _written(writer, piece, flush=bool(way.piece)):
                    data = b""


async def _written(writer: asyncio.StreamWriter, piece: bytes, flush: bool) -> bool:
    """Whether it could be written. flush: as a segment of its own."""
    try:
        writer.write(piece)
        await writer.drain()
        if flush:
            await asyncio.sleep(0)
    except OSError:
        return False
    return not writer.is_closing()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, AttributeError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
