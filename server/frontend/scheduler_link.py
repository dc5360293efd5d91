"""The front end's end of the channel to the scheduler: msgpack messages, each a frame of a socket pair."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from headrace.core.messages.frontend import AnyFrontendRequest, AnySchedulerReply
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import ConnectionClosed, FrameSocket

log = logging.getLogger(__name__)


class SchedulerLink(Protocol):
    """Two ordered streams of messages, in one event loop. failed: nothing comes or goes any more."""

    failed: bool

    def open(self, take: Callable[[AnySchedulerReply], None]) -> None:
        """Give take what the scheduler sends, from now on and what has come already."""
        ...

    def send(self, message: AnyFrontendRequest) -> None:
        """Hand the message over, in the order of the calls; never waits."""
        ...

    def close(self) -> None: ...


class SocketLink:
    """A SchedulerLink over one end of a socket pair, whose other end the scheduler process has."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._in: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
        self._out: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
        self._take: Callable[[AnySchedulerReply], None] = lambda _message: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = False

    def open(self, take: Callable[[AnySchedulerReply], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._frames, self._read)
        self._write_later()

    def send(self, message: AnyFrontendRequest) -> None:
        if self.failed:
            return
        try:
            self._frames.send(self._out.encode(message))
        except ConnectionClosed as error:
            self._fail(error)
        else:
            self._write_later()

    def close(self) -> None:
        """Close the socket; the scheduler still gets what the kernel has taken. Idempotent."""
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
        """Have the rest of what was sent go out when there is room."""
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
        """Why a scheduler has ended is its supervisor's news."""
        log.debug("the channel to the scheduler is given up: %s", error)
        self.failed = True
        self._stop()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._frames)
            self._loop.remove_writer(self._frames)
            self._loop = None
