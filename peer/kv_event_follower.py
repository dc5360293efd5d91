"""Follows the KV events of one server over ZMQ (docs/operations.md has the messages).

SUB     topic, sequence, batch                      live
DEALER  empty, first sequence wanted ──► empty, topic, sequence, batch ... empty, empty, -1, empty
                                                    what was published before, or missed: asked for at a gap

A gap that cannot be filled empties what is known of the server, as later events may refer to pages that are gone. Live
numbers only grow: one that does not is of a server that was started again, and is followed from its beginning.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio

from headrace.core.messages.kv_events import KvEventBatch
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.peers.addresses import url

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
QUEUED = 10_000  # batches
REPLAY_TIMEOUT_S = 5.0
END = (1 << 64) - 1  # sequence -1

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class KvEventSource(msgspec.Struct, frozen=True):
    """Where a prefill server publishes its KV events, on the host that serves its HTTP."""

    port: Port
    replay_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: it replays nothing."""
    topic: str = ""


class KvEventFollower:
    """Passes on the batches of one server in order, each once.

    forget: called when what is known of the server's cache may be wrong.
    """

    def __init__(
        self,
        host: str,
        source: KvEventSource,
        apply: Callable[[KvEventBatch], None],
        forget: Callable[[], None],
    ) -> None:
        self._host = host
        self._source = source
        self._apply = apply
        self._forget = forget
        self._next: int | None = None  # sequence wanted; None before anything has come
        self._live = -1  # the newest sequence that came live
        self._decoder = msgspec.msgpack.Decoder(KvEventBatch)

    async def run(self) -> None:
        """Follow until cancelled, from the first batch that the server has. Nothing comes while it is unreachable."""
        self._begin()
        context = zmq.asyncio.Context()
        try:
            live = self._socket(context, zmq.SUB, self._source.port)
            live.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            await self._catch_up(context)
            while True:
                await self._take(await live.recv_multipart(), context)
        finally:
            context.destroy(linger=0)

    def _begin(self) -> None:
        """Nothing is known of the server."""
        self._next, self._live = None, -1
        self._forget()

    def _socket(self, context: zmq.asyncio.Context, kind: int, port: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.rcvhwm, socket.maxmsgsize, socket.linger, socket.ipv6 = QUEUED, MAX_MESSAGE_BYTES, 0, True
        socket.connect(url("tcp", self._host, port))
        return socket

    async def _take(self, frames: list[Any], context: zmq.asyncio.Context) -> None:
        """A live batch."""
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        number = int.from_bytes(frames[1], "big")
        if number <= self._live:
            self._begin()
            await self._catch_up(context)
        self._live = number
        if self._next is not None and number > self._next:
            await self._catch_up(context)
        self._accept(number, frames[2])

    def _accept(self, number: int, content: bytes) -> None:
        """A batch, live or replayed. Those that came before are dropped."""
        if self._next is not None and number < self._next:
            return
        if self._next is not None and number > self._next:
            log.info("server %s: KV events %d to %d are lost", self._host, self._next, number - 1)
            self._forget()
        self._next = number + 1
        try:
            self._apply(self._decoder.decode(content))
        except NO_MESSAGE as error:
            log.warning("server %s sent no KV events: %s", self._host, error)
            self._forget()

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Ask for what was missed, as far as the server has it."""
        if not self._source.replay_port:
            return
        socket = self._socket(context, zmq.DEALER, self._source.replay_port)
        try:
            await socket.send_multipart((b"", (self._next or 0).to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    return
                number = int.from_bytes(frames[2], "big")
                if number == END:
                    return
                self._accept(number, frames[3])
        except TimeoutError:
            log.info("server %s does not replay its KV events", self._host)
        finally:
            socket.close(linger=0)
