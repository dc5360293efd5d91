"""Control client of a decode server: one DEALER for each prefill server's control endpoint.

It owns the sockets; connection.py decides what to send and when. Every attempt has a new connection, so that nothing
queued for a server that died is sent to its successor.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ConnectPrefill,
    ControlClientEffect,
    DisconnectPrefill,
    PeerEvent,
    PrefillDown,
    PrefillUp,
    TicketFailed,
)
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Counters, Sample, Stats
from headrace.core.types.errors import PEER_GONE, ErrorInfo
from headrace.transfer.control.connection import ControlConnection, MayConnect, Step
from headrace.transfer.protocol.messages import (
    CONTROL_FRAME_BYTES,
    Cancel,
    ControlMessage,
    Hello,
    PeerMessage,
    Reserve,
    text,
)
from headrace.transfer.sockets import zap, zmq_sockets
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 4096  # per control endpoint; one that leaves more unread is down


@dataclass(slots=True)
class _PrefillServer:
    """A prefill server: the address and key of its control endpoint, and the connection to it."""

    endpoint: str
    server_key: str
    control: ControlConnection
    socket: Socket | None = None
    """None while there is no connection."""
    monitor: Socket | None = None
    """Tells when that is closed."""


class ControlClient:
    """The control connections of a decode server. An EventSource[PeerEvent, ControlClientEffect].

    Args:
        may_connect: whether stages may be at this host and port, where it is not the host of their control endpoint.

    Raises ConfigError when the CURVE key file cannot be used.
    """

    def __init__(
        self, config: TransferConfig, context: Context, may_connect: MayConnect = lambda host, port: True
    ) -> None:
        self._config = config
        self._context = context
        self._may_connect = may_connect
        self._keys = zap.own_keys(config)
        self._hello: Hello | None = None
        self._prefills: dict[str, _PrefillServer] = {}
        self._counters = Counters()
        self._received: Codec[ControlMessage] = Codec(ControlMessage)
        self._sent: Codec[PeerMessage] = Codec(PeerMessage)

    def ready(self, hello: Hello) -> None:
        """Connect with this Hello from now on; there are no connections before. next_deadline() is due at once.

        Sessions that began with another Hello are ended, since the stages' pools are not those that it described.
        """
        if hello == self._hello:
            return
        self._hello = hello
        for prefill in self._prefills.values():
            prefill.control.outdate()

    def sockets(self) -> Sequence[Socket]:
        """Sockets to poll for reading."""
        found = (one for prefill in self._prefills.values() for one in (prefill.socket, prefill.monitor))
        return [socket for socket in found if socket is not None]

    def receive(self, now: float) -> list[PeerEvent]:
        """Take in what has come, in a bounded pass."""
        return [event for prefill in list(self._prefills.values()) for event in self._receive(prefill, now)]

    def apply(self, command: ControlClientEffect, now: float) -> list[PeerEvent]:
        """Carry out an effect of the scheduler."""
        match command:
            case ConnectPrefill():
                return self._connect_prefill(command, now)
            case DisconnectPrefill():
                return self._disconnect_prefill(command.name, now)
            case AskReserve():
                return self._reserve(command, now)
            case AskRenew():
                return self._renew(command)
            case AskCancel():
                return self._cancel(command, now)

    def tick(self, now: float) -> list[PeerEvent]:
        """Do what is due by now. Messages are read before timeouts count: this loop itself may have been delayed."""
        events = self.receive(now)
        for prefill in self._prefills.values():
            events += self._act(prefill, prefill.control.tick(now), now)
        return events

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        deadlines = (prefill.control.next_deadline() for prefill in self._prefills.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        """Say goodbye to every control endpoint, and close all sockets."""
        for name in list(self._prefills):
            self._disconnect_prefill(name, 0.0)

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        up = sum(prefill.control.state == "up" for prefill in self._prefills.values())
        return Stats(samples=(Sample("prefill_servers_up", up), *self._counters.snapshot()))

    def _connect_prefill(self, command: ConnectPrefill, now: float) -> list[PeerEvent]:
        known = self._prefills.get(command.name)
        if known is not None and (known.endpoint, known.server_key) == (command.endpoint, command.server_key):
            return []
        events = self._disconnect_prefill(command.name, now) if known else []
        if (self._keys is None) != (not command.server_key):  # a connection in the clear is never a substitute
            reason = "it needs a --curve-server-key and this server a --curve-key, or neither"
            return [*events, PrefillDown(name=command.name, session=None, reason=reason)]
        name = command.name
        control = ControlConnection(
            name,
            zmq_sockets.host_of(command.endpoint),
            lambda: self._hello_of(name),
            self._config,
            self._counters,
            server_key=command.server_key,
            may_connect=self._may_connect,
        )
        prefill = self._prefills[name] = _PrefillServer(command.endpoint, command.server_key, control)
        return [*events, *self._act(prefill, control.tick(now), now)]

    def _hello_of(self, name: str) -> Hello | None:
        """The Hello for one prefill server, with an instance of its own: two names may lead to one control endpoint,
        where a second Hello of the same instance would end the session of the first."""
        if self._hello is None:
            return None
        instance = hashlib.sha256(f"{self._hello.instance} {name}".encode()).hexdigest()[:32]
        return replace(self._hello, instance=instance)

    def _disconnect_prefill(self, name: str, now: float) -> list[PeerEvent]:
        prefill = self._prefills.pop(name, None)
        if prefill is None:
            return []
        events = self._act(prefill, prefill.control.close(now), now)
        self._close_socket(prefill, 200)  # for the goodbye
        return events

    def _reserve(self, command: AskReserve, now: float) -> list[PeerEvent]:
        session, wanted = command.session, command.reservation
        prefill = self._prefill_of(session)
        if prefill is None:
            error = ErrorInfo(code=PEER_GONE, message="the session with the prefill server has ended", status=502)
            return [TicketFailed(session=session, ticket=wanted.ticket, generation=wanted.generation, error=error)]
        prefill.control.renewals.pop(wanted.ticket, None)
        return self._act(prefill, Step([Reserve.of(wanted)], []), now)

    def _renew(self, command: AskRenew) -> list[PeerEvent]:
        if (prefill := self._prefill_of(command.session)) is not None:
            prefill.control.renewals[command.ticket] = None
        return []

    def _cancel(self, command: AskCancel, now: float) -> list[PeerEvent]:
        ticket, generation = command.ticket, command.generation
        prefill = self._prefill_of(command.session)
        if prefill is None:
            return []  # the end of the session has been reported, or is about to be
        prefill.control.renewals.pop(ticket, None)
        cancel = Cancel(ticket=ticket, generation=generation, reason=text(command.reason))
        return self._act(prefill, Step([cancel], []), now)

    def _prefill_of(self, session: str) -> _PrefillServer | None:
        return next((prefill for prefill in self._prefills.values() if prefill.control.session == session), None)

    def _receive(self, prefill: _PrefillServer, now: float) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        for _ in range(zmq_sockets.RECEIVE_BATCH):
            frames = zmq_sockets.take(prefill.socket) if prefill.socket is not None else None
            if frames is None:
                break
            try:
                if len(frames) != 1 or len(frames[0]) > CONTROL_FRAME_BYTES:
                    raise DecodeError("one frame was expected")
                message = self._received.decode(frames[0])
            except DecodeError:
                self._counters.add("malformed_frames_total", labels=("control_client",))
                continue
            events += self._act(prefill, prefill.control.receive(message, now), now)
        else:
            return events
        if prefill.monitor is not None and zmq_sockets.take(prefill.monitor) is not None:
            events += self._act(prefill, prefill.control.closed(now), now)  # all that it has said is read
        return events

    def _act(self, prefill: _PrefillServer, step: Step, now: float) -> list[PeerEvent]:
        for event in step.events:
            if isinstance(event, PrefillUp):
                log.info("KV comes from %s by %s", event.name, event.terms.backend)
        if step.reconnect:
            self._reconnect(prefill)
        for message in step.sends:
            if prefill.socket is not None and not zmq_sockets.put(prefill.socket, (self._sent.encode(message),)):
                return [*step.events, *self._act(prefill, prefill.control.unread(now), now)]
        if prefill.control.state == "down" and not step.sends:
            self._close_socket(prefill)
        return step.events

    def _reconnect(self, prefill: _PrefillServer) -> None:
        """Replace the socket. Without one the Hello stays unanswered, and there is another attempt."""
        self._close_socket(prefill)
        try:
            prefill.socket = zmq_sockets.connect(
                self._context,
                prefill.endpoint,
                max_frame=CONTROL_FRAME_BYTES,
                queue=QUEUED_MESSAGES,
                keys=self._keys,
                server_key=prefill.server_key,
            )
            prefill.monitor = zmq_sockets.watch(self._context, prefill.socket)
        except OSError as error:
            log.warning("cannot connect to %s now: %s", prefill.endpoint, error.strerror)

    def _close_socket(self, prefill: _PrefillServer, linger_ms: int | None = None) -> None:
        if prefill.socket is not None:
            prefill.socket.disable_monitor()
            prefill.socket.close(linger=linger_ms)
            prefill.socket = None
        if prefill.monitor is not None:
            prefill.monitor.close()
            prefill.monitor = None
