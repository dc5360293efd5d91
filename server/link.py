"""The front end's end of the channel to the scheduler: one message per ZMQ frame, msgpack."""

from collections.abc import AsyncIterator
from typing import Protocol

import zmq
import zmq.asyncio

from core.codec import Codec
from core.intake import IntakeMessage, OutputMessage

HIGH_WATER = 100_000  # both ends are ours; reaching this means that the scheduler is dead


class SchedulerLink(Protocol):
    """Two ordered streams of messages. outputs() may be iterated once."""

    async def send(self, message: IntakeMessage) -> None: ...

    def outputs(self) -> AsyncIterator[OutputMessage]: ...

    def close(self) -> None: ...


class ZmqSchedulerLink:
    """PAIR socket that connects to the endpoint which the scheduler process binds, now or later."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.linger = 1000
        self._socket.connect(endpoint)
        self._in: Codec[OutputMessage] = Codec(OutputMessage)
        self._out: Codec[IntakeMessage] = Codec(IntakeMessage)

    async def send(self, message: IntakeMessage) -> None:
        """Hand the message over, in the order of the calls."""
        await self._socket.send(self._out.encode(message))

    async def outputs(self) -> AsyncIterator[OutputMessage]:
        """What the scheduler sends, until the task that iterates is cancelled."""
        while True:
            yield self._in.decode(await self._socket.recv())

    def close(self) -> None:
        """Close the socket; what was sent and not yet taken gets a second. Idempotent."""
        if not self._context.closed:
            self._socket.close()
            self._context.term()
