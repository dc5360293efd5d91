"""The control endpoint: the one control socket of a prefill server, where peers say hello, reserve and cancel.

It owns the ROUTER and turns bytes into messages; transfer/control/session_table.py decides what they mean. The
connection of a session that has ended is closed a little later, with what its peer has left unread.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import ControlServerEffect, PeerEvent, PeerGone, PeerJoined
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Sample, Stats
from headrace.transfer.control.session_table import Outcome, SessionTable
from headrace.transfer.protocol.matching import BackendOffer
from headrace.transfer.protocol.messages import CONTROL_FRAME_BYTES, ControlMessage, PeerMessage, Refuse
from headrace.transfer.sockets.connections import ENDED, UNREAD
from headrace.transfer.sockets.listener import Arrival, Listener
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

UNREAD_MESSAGES = 16  # of one connection; each may be megabytes
GOODBYE_S = 1.0  # for the last words of a session, before its connection is closed
GOODBYE_MS = 200  # the same, when the server ends


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
        self._leaving: dict[bytes, float] = {}  # connections whose session has ended, and when to close each, in order
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
        self._book.ready(offer)

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
        return self._act(self._book.tell(command), now)

    def tick(self, now: float) -> list[PeerEvent]:
        """Read before calling anyone silent: this loop may itself have been the one that slept."""
        events = [*self.receive(now), *self._act(self._book.tick(now), now)]
        for route in [route for route, at in self._leaving.items() if at <= now]:
            del self._leaving[route]
            self._listener.drop(route, ENDED, now)
        return events

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        leaving = next(iter(self._leaving.values()), None)
        deadlines = (self._book.next_deadline(), self._listener.next_deadline(), leaving)
        return min((at for at in deadlines if at is not None), default=None)

    def close(self) -> None:
        """Close all sockets."""
        for route, message in self._book.close("the server ends").replies:
            self._listener.put(route, self._sent.encode(message))
        self._listener.close(GOODBYE_MS)

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        gauges = (Sample("control_sessions", self._book.peers), Sample("open_tickets", self._book.open_tickets))
        return Stats(samples=(*gauges, *self._book.counters.snapshot(), *self._listener.statistics()))

    def _read(self, arrival: Arrival, now: float) -> Outcome:
        route, body = arrival.route, arrival.body
        if len(body) != 1 or len(body[0]) > CONTROL_FRAME_BYTES:
            return self._book.malformed(route, f"one frame of up to {CONTROL_FRAME_BYTES} bytes was expected", now)
        try:
            message = self._received.decode(body[0])
        except DecodeError as error:
            return self._book.malformed(route, f"no message of this protocol: {error}", now)
        return self._book.receive(route, message, now)

    def _act(self, outcome: Outcome, now: float, arrival: Arrival | None = None) -> list[PeerEvent]:
        """Send the replies, to what has arrived or unasked. A session whose connection takes no more is ended."""
        events = list(outcome.events)
        for event in events:
            if isinstance(event, PeerJoined):
                log.info("KV goes to %s by %s: %s", event.name, event.backend, event.backend_reason)
        for route, message in outcome.replies:
            frame = self._sent.encode(message)
            if isinstance(message, Refuse) and arrival is not None and not self._book.has_session(route):
                self._listener.refuse(arrival, frame, now)
            elif not self._listener.put(route, frame):
                events += self._book.lose(route, "its connection is closed, or it does not read").events
                self._listener.drop(route, UNREAD, now)
        if arrival is not None and self._book.has_session(arrival.route):
            self._listener.keep(arrival)
            self._leaving.pop(arrival.route, None)
        if any(isinstance(event, PeerGone) for event in events):
            for route in self._listener.kept:
                if not self._book.has_session(route):
                    self._leaving.setdefault(route, now + GOODBYE_S)
        return events


def unread_replies(config: TransferConfig) -> int:
    """Messages that may be queued for one connection; a peer that leaves more unread is gone. All its tickets may end
    at once, each with two answers."""
    return 2 * config.max_tickets_per_peer + 64
