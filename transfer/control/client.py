"""The control client: the decode side's control connections, one DEALER for each prefill server's control endpoint.

It owns the sockets; transfer/control/connection.py decides when to speak. A connection is made anew for every
attempt, so that nothing queued for a server that died reaches the one that took its place.
"""

import hashlib
import logging
from collections.abc import Sequence

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
from headrace.transfer.control.connection import ControlConnection, MayDial, Step
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

QUEUED_MESSAGES = 4096  # for one control endpoint; one that leaves more unread is down


class _Connection:
    """A control endpoint's endpoint with its link and its connection of the moment."""

    def __init__(self, endpoint: str, server_key: str, link: ControlConnection) -> None:
        self.endpoint = endpoint
        self.server_key = server_key
        self.link = link
        self.socket: Socket | None = None


class ControlClient:
    """A Port of PeerEvents and ControlClientEffects. may_dial: whether stages may be dialled at a host that is not the
    host of their server's control endpoint."""

    def __init__(self, config: TransferConfig, context: Context, may_dial: MayDial = lambda host, port: True) -> None:
        self._config = config
        self._context = context
        self._may_dial = may_dial
        self._keys = zap.own_keys(config)
        self._hello: Hello | None = None
        self._lines: dict[str, _Connection] = {}
        self._counters = Counters()
        self._received: Codec[ControlMessage] = Codec(ControlMessage)
        self._sent: Codec[PeerMessage] = Codec(PeerMessage)

    def ready(self, hello: Hello) -> None:
        """Introduce this server so from now on; until then nobody is dialled. next_deadline() is due at once. Sessions
        that began with another hello are over: what it said of the stages' pools is."""
        if hello == self._hello:
            return
        self._hello = hello
        for line in self._lines.values():
            line.link.outdate()

    def sockets(self) -> Sequence[Socket]:
        """Sockets to poll for reading."""
        return [line.socket for line in self._lines.values() if line.socket is not None]

    def receive(self, now: float) -> list[PeerEvent]:
        """Take in what has come, in a bounded pass."""
        return [event for line in list(self._lines.values()) for event in self._receive(line, now)]

    def apply(self, command: ControlClientEffect, now: float) -> list[PeerEvent]:
        """Carry out an effect of the scheduler."""
        match command:
            case ConnectPrefill():
                return self._dial(command, now)
            case DisconnectPrefill():
                return self._hang_up(command.name, now)
            case AskReserve():
                return self._reserve(command, now)
            case AskRenew():
                return self._renew(command)
            case AskCancel():
                return self._cancel(command, now)

    def tick(self, now: float) -> list[PeerEvent]:
        """Read before calling anyone silent: this loop may itself have been the one that slept."""
        events = self.receive(now)
        for line in self._lines.values():
            events += self._act(line, line.link.tick(now), now)
        return events

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        deadlines = (line.link.next_deadline() for line in self._lines.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        """Say goodbye to every control endpoint."""
        for name in list(self._lines):
            self._hang_up(name, 0.0)

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        up = sum(line.link.state == "up" for line in self._lines.values())
        return Stats(samples=(Sample("prefill_servers_up", up), *self._counters.snapshot()))

    def _dial(self, command: ConnectPrefill, now: float) -> list[PeerEvent]:
        known = self._lines.get(command.name)
        if known is not None and (known.endpoint, known.server_key) == (command.endpoint, command.server_key):
            return []
        events = self._hang_up(command.name, now) if known else []
        if (self._keys is None) != (not command.server_key):  # in the clear is never a substitute
            reason = "it needs a --curve-server-key and this server a --curve-key, or neither"
            return [*events, PrefillDown(name=command.name, session=None, reason=reason)]
        name = command.name
        link = ControlConnection(
            name,
            zmq_sockets.host_of(command.endpoint),
            lambda: self._hello_of(name),
            self._config,
            self._counters,
            server_key=command.server_key,
            may_dial=self._may_dial,
        )
        line = self._lines[name] = _Connection(command.endpoint, command.server_key, link)
        return [*events, *self._act(line, link.tick(now), now)]

    def _hello_of(self, name: str) -> Hello | None:
        """With an instance for each line: two names may lead to one control endpoint, where the second hello of an
        instance would end the session of the first."""
        if self._hello is None:
            return None
        instance = hashlib.sha256(f"{self._hello.instance} {name}".encode()).hexdigest()[:32]
        return replace(self._hello, instance=instance)

    def _hang_up(self, name: str, now: float) -> list[PeerEvent]:
        line = self._lines.pop(name, None)
        if line is None:
            return []
        events = self._act(line, line.link.hang_up(now), now)
        if line.socket is not None:
            line.socket.close(linger=200)  # ms, for the goodbye
        return events

    def _reserve(self, command: AskReserve, now: float) -> list[PeerEvent]:
        ticket, generation = command.ticket, command.generation
        line = self._line_of(command.session)
        if line is None:
            error = ErrorInfo(code=PEER_GONE, message="the session with the prefill server has ended", status=502)
            return [TicketFailed(session=command.session, ticket=ticket, generation=generation, error=error)]
        reserve = Reserve(
            ticket=ticket,
            generation=generation,
            prompt_tokens=command.prompt_tokens,
            cached_tokens=command.cached_tokens,
            pages=command.pages,
            row=command.row,
            wait=command.wait,
            prompt_hash=command.prompt_hash,
        )
        line.link.renewals.discard(ticket)
        return self._act(line, Step([reserve], []), now)

    def _renew(self, command: AskRenew) -> list[PeerEvent]:
        if (line := self._line_of(command.session)) is not None:
            line.link.renewals.add(command.ticket)
        return []

    def _cancel(self, command: AskCancel, now: float) -> list[PeerEvent]:
        ticket, generation = command.ticket, command.generation
        line = self._line_of(command.session)
        if line is None:
            return []  # the end of the session has been reported, or is about to be
        line.link.renewals.discard(ticket)
        cancel = Cancel(ticket=ticket, generation=generation, reason=text(command.reason))
        return self._act(line, Step([cancel], []), now)

    def _line_of(self, session: str) -> _Connection | None:
        return next((line for line in self._lines.values() if line.link.session == session), None)

    def _receive(self, line: _Connection, now: float) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        for _ in range(zmq_sockets.RECEIVE_BATCH):
            frames = zmq_sockets.take(line.socket) if line.socket is not None else None
            if frames is None:
                break
            try:
                if len(frames) != 1 or len(frames[0]) > CONTROL_FRAME_BYTES:
                    raise DecodeError("one frame was expected")
                message = self._received.decode(frames[0])
            except DecodeError:
                self._counters.add("malformed_frames_total", labels=("control_client",))
                continue
            events += self._act(line, line.link.receive(message, now), now)
        return events

    def _act(self, line: _Connection, step: Step, now: float) -> list[PeerEvent]:
        for event in step.events:
            if isinstance(event, PrefillUp):
                log.info("KV comes from %s by %s", event.name, event.backend)
        if step.redial:
            self._redial(line)
        for message in step.sends:
            if line.socket is not None and not zmq_sockets.put(line.socket, (self._sent.encode(message),)):
                return [*step.events, *self._act(line, line.link.unread(now), now)]
        if line.link.state == "down" and not step.sends:
            self._disconnect(line)
        return step.events

    def _redial(self, line: _Connection) -> None:
        """Make the connection anew. Without one the hello stays unanswered, and the link tries again."""
        self._disconnect(line)
        try:
            line.socket = zmq_sockets.dial(
                self._context,
                line.endpoint,
                max_frame=CONTROL_FRAME_BYTES,
                queue=QUEUED_MESSAGES,
                keys=self._keys,
                server_key=line.server_key,
            )
        except OSError as error:
            log.warning("%s cannot be dialled now: %s", line.endpoint, error.strerror)

    def _disconnect(self, line: _Connection) -> None:
        if line.socket is not None:
            line.socket.close()
            line.socket = None
