"""Prefill servers of a loader: when to look them up, connect, tell the owner, and hang up. Pure.

LookUpControlPort ──port──► ConnectPrefill ──PrefillUp──► session ──idle, or RemovePrefill──► (gone)
   ▲  │ no answer              │    ▲                       │
   └──┘                        └────┴───── PrefillDown ◄────┘     by its HTTP port: looked up again meanwhile
"""

import math
from collections import deque

from headrace.core.messages.frontend import AddPrefill
from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import ControlClientEffect, DisconnectPrefill, PrefillDown, PrefillUp
from headrace.core.messages.replies import PrefillState
from headrace.peer.commands import (
    AnyResult,
    ControlPortReply,
    LookUpControlPort,
    ServerAddress,
)
from headrace.peer.records import NO_ANSWER_YET, PrefillRecord, server_name

LOOKUP_S = 0.5  # between two lookups of a control port
RELOOKUP_S = 5.0  # between lookups while the control port that was found does not answer: it may be an earlier one
IDLE_S = 60.0  # a session without users is closed after this
MAX_SERVERS = 64
TOO_MANY = f"{MAX_SERVERS} prefill servers"

Effect = ControlClientEffect | OpenSession | CloseSession | PrepareReceive | CancelReceive | LookUpControlPort


class PrefillServers:
    """Records of prefill servers by name. now: seconds of the monotonic clock, in every method."""

    def __init__(self, effects: deque[Effect], results: deque[AnyResult]) -> None:
        """effects, results: appended to."""
        self._effects = effects
        self._results = results
        self._servers: dict[str, PrefillRecord] = {}

    def get(self, address: ServerAddress) -> PrefillRecord | None:
        """The server at an address, if it is known."""
        return self._servers.get(server_name(address))

    def add(self, address: ServerAddress, key: str, now: float) -> PrefillRecord | None:
        """Start connecting to a server; None when there are too many already. key: its CURVE public key, or ""."""
        if len(self._servers) >= MAX_SERVERS:
            return None
        name = server_name(address)
        server = self._servers[name] = PrefillRecord(name, address, key, now)
        self._effects.append(server.first_step())
        return server

    def keep(self, command: AddPrefill, now: float) -> None:
        """Keep a session with a server open, and tell the owner of it."""
        address = ServerAddress.of_endpoint(command.endpoint)
        server = self.get(address)
        if server is not None and command.name in server.told:
            return
        self.let_go(command.name, now)  # of another address
        server = server or self.add(address, command.server_key, now)
        if server is None:
            self._results.append(PrefillState(name=command.name, up=False, reason=TOO_MANY))
            return
        server.told[command.name] = PrefillState(name=command.name, up=False, reason=NO_ANSWER_YET)
        self._tell(server)

    def let_go(self, name: str, now: float) -> None:
        """Do not keep a session open any more; it is closed unless loads need it."""
        for server in [server for server in self._servers.values() if name in server.told]:
            if server.told.pop(name).up:
                self._results.append(PrefillState(name=name, up=False, reason="disconnected"))
            server.idle_since = now
            if not server.wanted:
                self._close(server)

    def found(self, reply: ControlPortReply, now: float) -> None:
        """Connect to the control endpoint that an HTTP port has named, or repeat the lookup later."""
        server = self._servers.get(reply.name)
        if server is None or server.session is not None:
            return
        server.next_lookup = now + (RELOOKUP_S if reply.control_port else LOOKUP_S)
        if reply.control_port:
            self._effects.append(server.connect(reply.control_port))
        else:
            server.reason = reply.reason
            self._tell(server)

    def up(self, event: PrefillUp) -> PrefillRecord | None:
        """A session is open: open its data connections."""
        server = self._servers.get(event.name)
        if server is not None:
            server.session, server.backend, server.unfit = event.session, event.terms.backend, False
            server.next_lookup = math.inf
            self._effects.append(OpenSession(seq=0, terms=event.terms))
            self._tell(server)
        return server

    def down(self, event: PrefillDown, now: float) -> PrefillRecord | None:
        """A session has ended or could not be opened."""
        server = self._servers.get(event.name)
        if server is None:
            return None
        server.reason, server.unfit = event.reason, event.unfit
        if event.session is not None and event.session == server.session:
            server.session = None
            self._effects.append(CloseSession(seq=0, session=event.session))
            if server.address.http:  # after a restart its control port may differ
                self._effects.append(DisconnectPrefill(name=server.name))
                server.next_lookup = now
        self._tell(server)
        return server

    def tick(self, now: float) -> None:
        """Repeat lookups, close idle sessions."""
        for server in list(self._servers.values()):
            if server.wanted and server.next_lookup <= now:
                server.next_lookup = math.inf
                self._effects.append(server.first_step())
            if not server.wanted and server.idle_since + IDLE_S <= now:
                self._close(server)

    def next_deadline(self) -> float:
        """When tick() has something to do; infinite for never."""
        servers = self._servers.values()
        deadlines = (server.next_lookup if server.wanted else server.idle_since + IDLE_S for server in servers)
        return min(deadlines, default=math.inf)

    def _close(self, server: PrefillRecord) -> None:
        del self._servers[server.name]
        self._effects.append(DisconnectPrefill(name=server.name))
        if server.session is not None:
            self._effects.append(CloseSession(seq=0, session=server.session))

    def _tell(self, server: PrefillRecord) -> None:
        """Tell the owner what has changed, under each name that it has for the server."""
        for name, told in server.told.items():
            state = server.state(name)
            if state != told:
                server.told[name] = state
                self._results.append(state)
