"""The front end's end of the channel to the scheduler: one message per ZMQ frame, msgpack."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import zmq

from core.codec import Codec
from core.intake import IntakeMessage, OutputMessage

log = logging.getLogger(__name__)

HIGH_WATER = 100_000  # both ends are ours; reaching this means that the scheduler is dead
BATCH = 256  # messages taken in one pass, so that other work of the event loop gets its turn


class SchedulerLink(Protocol):
    """Two ordered streams of messages, in one event loop. failed: nothing comes or goes any more."""

    failed: bool

    def open(self, take: Callable[[OutputMessage], None]) -> None:
        """Give take what the scheduler sends, from now on and what has come already."""
        ...

    def send(self, message: IntakeMessage) -> None:
        """Hand the message over, in the order of the calls; never waits."""
        ...

    def close(self) -> None: ...


class ZmqSchedulerLink:
    """PAIR socket that connects to the endpoint which the scheduler process binds, now or later.

    The event loop watches the socket's descriptor, which tells of a change once: it is read until it is empty, and
    looked at again after a send, which may have swallowed the news.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.linger = 1000
        self._socket.connect(endpoint)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._in: Codec[OutputMessage] = Codec(OutputMessage)
        self._out: Codec[IntakeMessage] = Codec(IntakeMessage)
        self._take: Callable[[OutputMessage], None] = lambda _message: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Handle | None = None  # a pass that is about to run
        self.failed = False

    def open(self, take: Callable[[OutputMessage], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self._read_soon()

    def send(self, message: IntakeMessage) -> None:
        if self.failed:
            return
        try:
            self._socket.send(self._out.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._fail("the scheduler does not take messages")
        else:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._read_soon()

    def close(self) -> None:
        """Close the socket; what was sent and not yet taken gets a second. Idempotent."""
        self._stop_reading()
        if not self._context.closed:
            self._socket.close()
            self._context.term()

    def _read_soon(self) -> None:
        if self._loop is not None and self._reading is None:
            self._reading = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take what has come, in a bounded pass."""
        self._reading = None
        try:
            for _ in range(BATCH):
                self._take(self._in.decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except Exception:
            log.exception("a message of the scheduler could not be handled")
            self._fail("the channel to the scheduler is given up")
            return
        self._read_soon()

    def _fail(self, message: str) -> None:
        log.error("%s", message)
        self.failed = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            if self._reading is not None:
                self._reading.cancel()
            self._loop = None
