"""The control endpoint: the one control socket of a prefill server, where peers say hello, reserve and cancel.

It owns the ROUTER and turns bytes into messages; transfer/control/session_table.py decides what they mean.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import ControlServerEffect, PeerEvent, PeerJoined
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Sample, Stats
from headrace.transfer.control.session_table import Outcome, SessionTable
from headrace.transfer.protocol.matching import BackendOffer
from headrace.transfer.protocol.messages import CONTROL_FRAME_BYTES, ControlMessage, PeerMessage
from headrace.transfer.sockets import zap, zmq_sockets
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

UNREAD = 16  # messages of one connection; each may be megabytes
QUEUED_REPLIES = 8192  # for one connection; a peer that leaves more unread is gone


class ControlServer:
    """A Port of PeerEvents and ControlServerEffects. port: where it listens. Raises ConfigError when it cannot bind."""

    def __init__(
        self,
        config: TransferConfig,
        context: Context,
        *,
        new_session: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._book = SessionTable(config, new_session)
        self._received: Codec[PeerMessage] = Codec(PeerMessage)
        self._sent: Codec[ControlMessage] = Codec(ControlMessage)
        self._gate = zap.gate(context, config, "control_server")
        self._socket, self.port = zmq_sockets.bind(
            context,
            config.host,
            config.control_port,
            max_frame=CONTROL_FRAME_BYTES,
            queue=QUEUED_REPLIES,
            unread=UNREAD,
            guard=self._gate.guard if self._gate else None,
        )

    def ready(self, offer: BackendOffer) -> None:
        """Welcome peers from now on; until then a hello is refused with not_ready, and the peer tries again."""
        self._book.ready(offer)

    def sockets(self) -> Sequence[Socket]:
        return (self._socket, *(self._gate.sockets() if self._gate else ()))

    def receive(self, now: float) -> list[PeerEvent]:
        if self._gate is not None:
            self._gate.receive(now)
        events: list[PeerEvent] = []
        for _ in range(zmq_sockets.RECEIVE_BATCH):
            frames = zmq_sockets.take(self._socket)
            if frames is None:
                break
            events += self._act(self._read(frames, now))
        return events

    def apply(self, command: ControlServerEffect, now: float) -> list[PeerEvent]:
        return self._act(self._book.tell(command))

    def tick(self, now: float) -> list[PeerEvent]:
        """Read before calling anyone silent: this loop may itself have been the one that slept."""
        return [*self.receive(now), *self._act(self._book.tick(now))]

    def next_deadline(self) -> float | None:
        return self._book.next_deadline()

    def close(self) -> None:
        for route, message in self._book.close("the server ends").replies:
            zmq_sockets.put(self._socket, (route, self._sent.encode(message)))
        if self._gate is not None:
            self._gate.close()
        self._socket.close(linger=200)  # ms, for the goodbyes

    def statistics(self) -> Stats:
        gauges = (Sample("control_sessions", self._book.peers), Sample("open_tickets", self._book.open_tickets))
        refused = self._gate.counters.snapshot() if self._gate else ()
        return Stats(samples=(*gauges, *self._book.counters.snapshot(), *refused))

    def _read(self, frames: list[bytes], now: float) -> Outcome:
        route, *body = frames
        if len(body) != 1 or len(body[0]) > CONTROL_FRAME_BYTES:
            return self._book.malformed(route, f"one frame of up to {CONTROL_FRAME_BYTES} bytes was expected", now)
        try:
            message = self._received.decode(body[0])
        except DecodeError as error:
            return self._book.malformed(route, f"no message of this protocol: {error}", now)
        return self._book.receive(route, message, now)

    def _act(self, outcome: Outcome) -> list[PeerEvent]:
        """Send the replies. A session whose connection takes no more is ended."""
        events = list(outcome.events)
        for event in events:
            if isinstance(event, PeerJoined):
                log.info("KV goes to %s by %s: %s", event.name, event.backend, event.backend_reason)
        for route, message in outcome.replies:
            if not zmq_sockets.put(self._socket, (route, self._sent.encode(message))):
                events += self._book.lose(route, "its connection is closed, or it does not read").events
        return events
