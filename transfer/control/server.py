"""The control endpoint: the one control socket of a prefill server, where peers say hello, reserve and cancel.

It owns the ROUTER and decodes messages; session_table.py decides about them. The connection of a session that has ended
is closed GOODBYE_S later, with what its peer has left unread.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import ControlServerEffect, PeerEvent, PeerGone, PeerJoined
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.runtime.rate_limit import LogThrottle, printable
from headrace.core.stats import Sample, Stats
from headrace.core.types.errors import NOT_READY
from headrace.transfer.control.session import UNKNOWN, MessageSender
from headrace.transfer.control.session_table import SessionOutcome, SessionTable
from headrace.transfer.protocol.matching import BackendOffer
from headrace.transfer.protocol.messages import CONTROL_FRAME_BYTES, ControlMessage, Hello, PeerMessage, Refuse
from headrace.transfer.sockets.connections import ENDED, UNREAD
from headrace.transfer.sockets.listener import Arrival, Listener
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

UNREAD_MESSAGES = 16  # per connection; each may be megabytes
GOODBYE_S = 1.0  # from the end of a session until its connection is closed, for messages still queued
GOODBYE_MS = 200  # the same, when the server ends


class ControlServer:
    """The control endpoint of a prefill server. An EventSource[PeerEvent, ControlServerEffect].

    Args:
        new_session: makes session secrets that cannot be guessed.

    Attributes:
        port: TCP port that it listens on.

    Raises ConfigError when it cannot bind, or a CURVE key cannot be used.
    """

    def __init__(
        self,
        config: TransferConfig,
        context: Context,
        *,
        new_session: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._sessions = SessionTable(config, new_session)
        self._received: Codec[PeerMessage] = Codec(PeerMessage)
        self._sent: Codec[ControlMessage] = Codec(ControlMessage)
        self._log_throttle = LogThrottle()
        self._leaving: dict[bytes, float] = {}  # routes whose session has ended, and when to close each, in order
        self._listener = Listener(
            config,
            context,
            "control",
            port=config.control_port,
            max_frame=CONTROL_FRAME_BYTES,
            queue=unread_replies(config),
            unread=UNREAD_MESSAGES,
        )
        self.port = self._listener.port

    def ready(self, offer: BackendOffer) -> None:
        """Welcome peers from now on; until then a hello is refused with not_ready, and the peer tries again."""
        self._sessions.ready(offer)

    def sockets(self) -> Sequence[Socket]:
        """Sockets to poll for reading."""
        return self._listener.sockets()

    def receive(self, now: float) -> list[PeerEvent]:
        """Take in what has come, in a bounded pass."""
        events: list[PeerEvent] = []
        for arrival in self._listener.receive(now):
            events += self._act(self._read(arrival, now), now, arrival)
        return events

    def apply(self, command: ControlServerEffect, now: float) -> list[PeerEvent]:
        """Carry out an effect of the scheduler."""
        return self._act(self._sessions.tell(command, now), now)

    def tick(self, now: float) -> list[PeerEvent]:
        """Do what is due by now. Messages are read before timeouts count: this loop itself may have been delayed."""
        events = [*self.receive(now), *self._act(self._sessions.tick(now), now)]
        for route in [route for route, at in self._leaving.items() if at <= now]:
            del self._leaving[route]
            self._listener.drop(route, ENDED, now)
        return events

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        leaving = next(iter(self._leaving.values()), None)
        deadlines = (self._sessions.next_deadline(), self._listener.next_deadline(), leaving)
        return min((at for at in deadlines if at is not None), default=None)

    def close(self) -> None:
        """Say goodbye to every peer, and close all sockets."""
        for route, message in self._sessions.close("the server ends").replies:
            self._listener.put(route, self._sent.encode(message))
        self._listener.close(GOODBYE_MS)

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        gauges = (Sample("control_sessions", self._sessions.peers), Sample("open_tickets", self._sessions.open_tickets))
        return Stats(samples=(*gauges, *self._sessions.counters.snapshot(), *self._listener.statistics()))

    def _read(self, arrival: Arrival, now: float) -> SessionOutcome:
        route, body = arrival.route, arrival.body
        if len(body) != 1 or len(body[0]) > CONTROL_FRAME_BYTES:
            return self._sessions.malformed(route, f"one frame of up to {CONTROL_FRAME_BYTES} bytes was expected", now)
        try:
            message = self._received.decode(body[0])
        except DecodeError as error:
            return self._sessions.malformed(route, f"no message of this protocol: {error}", now)
        if not isinstance(message, Hello):
            return self._sessions.receive(route, message, now, UNKNOWN)
        sender = MessageSender(*self._listener.sender(arrival))
        outcome = self._sessions.receive(route, message, now, sender)
        for _, reply in outcome.replies:
            if not isinstance(reply, Refuse) or reply.code == NOT_READY:
                continue
            if self._log_throttle.due(f"{reply.code} {sender.owner}", now):
                log.warning("refused %s at %s: %s: %s", message.name, sender.host, reply.code, reply.message)
        return outcome

    def _act(self, outcome: SessionOutcome, now: float, arrival: Arrival | None = None) -> list[PeerEvent]:
        """Send the replies and close ended connections. A session whose connection takes no more is ended.

        arrival: the message that the outcome answers; None if there is none.
        """
        events = list(outcome.events)
        for route, message in outcome.replies:
            frame = self._sent.encode(message)
            if isinstance(message, Refuse) and arrival is not None and not self._sessions.has_session(route):
                self._listener.refuse(arrival, frame, now)
            elif not self._listener.put(route, frame):
                events += self._sessions.lose(route, "its connection is closed, or it does not read").events
                self._listener.drop(route, UNREAD, now)
        for event in events:
            self._tell(event, now)
        if arrival is not None and self._sessions.has_session(arrival.route):
            self._listener.keep(arrival)
            self._leaving.pop(arrival.route, None)
        if any(isinstance(event, PeerGone) for event in events):
            for route in self._listener.kept:
                if not self._sessions.has_session(route):
                    self._leaving.setdefault(route, now + GOODBYE_S)
        return events

    def _tell(self, event: PeerEvent, now: float) -> None:
        """Log peers that come and go."""
        if isinstance(event, PeerJoined):
            log.info("KV goes to %s by %s: %s", event.name, event.terms.backend, event.backend_reason)
        elif isinstance(event, PeerGone) and event.displaced:
            if self._log_throttle.due("displaced", now):
                log.warning("ended a session for a new peer: %s", printable(event.reason))
        elif isinstance(event, PeerGone):
            log.warning("decode server %s is down: %s", printable(event.name), printable(event.reason))


def unread_replies(config: TransferConfig) -> int:
    """Messages that may be queued for one connection; a peer that leaves more unread loses its session.

    There is room for two answers to each of its tickets, since all of them may end at once.
    """
    return 2 * config.max_tickets_per_peer + 64
