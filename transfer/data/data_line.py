"""A decode stage's data connection to one prefill stage, with a socket that is replaced when the stage is silent."""

from collections.abc import Callable

from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.data.attachment import Attachment
from headrace.transfer.protocol.messages import Attach, Ping
from headrace.transfer.sockets import zmq_sockets
from headrace.transfer.sockets.zmq_sockets import Socket


class DataLine:
    """One data connection and the timing of its Attach and Ping messages.

    Args:
        session: secret of the session.
        stage: rank of the prefill stage.
        source: geometry of the prefill stage, cut to the layers and heads that come here.
        backend: how KV comes, see core/types/kv/backends.py.
        connect: makes a socket that connects to the stage.
        replica: data-parallel replica of the prefill stage.
    """

    def __init__(
        self,
        session: str,
        stage: int,
        source: Geometry,
        backend: str,
        connect: Callable[[], Socket],
        attachment: Attachment,
        replica: int = 0,
    ) -> None:
        self.replica = replica
        self.session = session
        self.stage = stage
        self.source = source
        self.backend = backend
        self.attachment = attachment
        self._connect = connect
        self.socket = connect()

    def tick(self, now: float) -> Attach | Ping | None:
        """The message that is due, if any. A stage that was silent for too long gets it on a new connection."""
        message = self.attachment.tick(now)
        if message is not None and self.attachment.stale:
            self._reconnect()
        return message

    def put(self, frame: bytes, now: float) -> bool:
        """Send a frame. False when the queue is full, since the stage does not read: the connection is then replaced
        and what was queued there is lost. The stage sends unanswered chunks again."""
        if zmq_sockets.put(self.socket, (frame,)):
            return True
        self._reconnect()
        self.attachment.lost(now)
        return False

    def _reconnect(self) -> None:
        self.socket.close()
        self.socket = self._connect()
