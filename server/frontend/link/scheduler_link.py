"""The front end's end of the channel to the scheduler: msgpack messages, each a frame of a socket pair."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from headrace.core.messages.frontend import AnyFrontendRequest
from headrace.core.messages.replies import AnySchedulerReply
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import ConnectionClosed, FrameSocket

log = logging.getLogger(__name__)


class SchedulerLink(Protocol):
    """Two ordered streams of messages, used in one event loop."""

    failed: bool
    """The connection has ended."""

    def open(self, take: Callable[[AnySchedulerReply], None], lost: Callable[[], None]) -> None:
        """Call take with every message of the scheduler, including those that have come already, and lost when the
        connection ends."""
        ...

    def send(self, message: AnyFrontendRequest) -> None:
        """Send a message, in the order of the calls. Never blocks."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class SocketLink:
    """A SchedulerLink over a socket pair with the scheduler process."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._in: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
        self._out: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
        self._take: Callable[[AnySchedulerReply], None] = lambda _message: None
        self._lost: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = False

    def open(self, take: Callable[[AnySchedulerReply], None], lost: Callable[[], None]) -> None:
        """Begin to receive in the running event loop."""
        self._take = take
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._frames, self._read)
        self._write_later()

    def send(self, message: AnyFrontendRequest) -> None:
        """Send a message, or keep it until the socket has room. Ignored once the connection has failed."""
        if self.failed:
            return
        try:
            self._frames.send(self._out.encode(message))
        except ConnectionClosed as error:
            self._fail(error)
        else:
            self._write_later()

    def close(self) -> None:
        """Close the socket; the scheduler still receives what is in the kernel's buffer. Idempotent."""
        self._stop()
        self._frames.close()

    def _read(self) -> None:
        try:
            for frame in self._frames.receive():
                self._take(self._in.decode(frame))
        except ConnectionClosed as error:
            self._fail(error)
        except Exception:
            log.exception("a message of the scheduler could not be handled")
            self._fail(None)

    def _write_later(self) -> None:
        """Send the rest of the messages when the socket has room."""
        if self._loop is not None and self._frames.unsent:
            self._loop.add_writer(self._frames, self._write)

    def _write(self) -> None:
        try:
            self._frames.flush()
        except ConnectionClosed as error:
            self._fail(error)
        else:
            if self._loop is not None and not self._frames.unsent:
                self._loop.remove_writer(self._frames)

    def _fail(self, error: ConnectionClosed | None) -> None:
        """Logged at level debug, since the supervisor reports why the scheduler has ended."""
        log.debug("the connection to the scheduler has failed: %s", error)
        self.failed = True
        lost = self._loop is not None
        self._stop()
        if lost:
            self._lost()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._frames)
            self._loop.remove_writer(self._frames)
            self._loop = None
