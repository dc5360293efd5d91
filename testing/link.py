"""The simulated connection of a decode server to a prefill server: control messages and chunks. Either may have any
role: the one that connects fetches KV from the other.
"""

from headrace.core.config import SchedulerConfig
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ControlServerEffect,
    EndPeer,
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    PrefillDown,
    PrefillUp,
    TellCancelled,
    TellFailed,
    TellFinished,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.types.kv.backends import SHM
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.scheduler.scheduler import Effect, Event
from headrace.testing.engine import SimulatedChunk, SimulatedPipeline
from headrace.testing.server import SimulatedServer
from headrace.testing.world import Channel, World

WINDOW = 1 << 20
HEARTBEAT_S = 0.3


class SimulatedLinks:
    """The connections of a decode server to the prefill server: each of its replicas is a peer with one of its own."""

    def __init__(
        self,
        world: World,
        prefill: SimulatedServer,
        decode: SimulatedServer,
        stall: float,
        backend: str,
        name: str = "",
    ) -> None:
        """stall: probability that a chunk never arrives. backend: "zmq" or "shm". name: of the prefill server at the
        decode server; "": as it calls itself. decode.on_peer has to lead here, and decode.on_restart for "shm"."""
        name = name or prefill.name
        self._links = [
            SimulatedLink(world, prefill, decode, index, stall, backend, name) for index in range(decode.config.dp)
        ]
        told, ship, first = prefill.on_told, prefill.ship, prefill.connected == 0
        prefill.connected += 1

        def on_told(effect: ControlServerEffect) -> None:
            (self._from_control_server if first or self.knows(effect.session) else told)(effect)

        def on_ship(chunk: SimulatedChunk) -> None:
            if first or self.knows(chunk.order.session):
                self._link(chunk.order.session).ship(chunk)
            else:
                ship(chunk)

        prefill.on_told, prefill.ship = on_told, on_ship

    def lose(self) -> None:
        """Break all connections; each side notices after a delay, and they come back later."""
        for link in self._links:
            link.lose()

    def renew(self, ticket: str) -> None:
        """Send a heartbeat that renews the ticket."""
        self._links[-1].renew(ticket)

    def release(self, ticket: str) -> None:
        """Have the decode server release a ticket that it has not reserved."""
        self._links[-1].release(ticket)

    def knows(self, session: str) -> bool:
        """Whether the session is or was of one of these connections."""
        return any(link.knows(session) for link in self._links)

    def connect(self) -> None:
        """Begin the session of every replica."""
        for link in self._links:
            link.connect()

    def from_control_client(self, effect: AskReserve | AskCancel | AskRenew) -> None:
        """Take an effect of the decode server's scheduler."""
        self._link(effect.session).from_control_client(effect)

    def _from_control_server(self, effect: Effect) -> None:
        if isinstance(effect, TellFailed | TellCancelled | TellFinished | EndPeer):
            self._link(effect.session).from_control_server(effect)

    def _link(self, session: str) -> "SimulatedLink":
        return next((link for link in self._links if link.knows(session)), self._links[0])


class SimulatedLink:
    """One replica's connection to the prefill server's control endpoint, and its data connections.

    With backend "shm" the prefill stages write into the pool that the decode server had when the session began, until
    their access is revoked.
    """

    def __init__(
        self,
        world: World,
        prefill: SimulatedServer,
        decode: SimulatedServer,
        replica: int,
        stall: float,
        backend: str,
        name: str,
    ) -> None:
        """replica: of the decode server. name: of the prefill server, there. Otherwise as SimulatedLinks."""
        self._world = world
        self._name = name
        self._replica = decode.replicas[replica]
        self._prefill = prefill
        self._decode = decode
        self._stall = stall
        self._sessions = 0
        self.session: str | None = None
        """The open session."""

        self._to_prefill = Channel(world, 0.002)
        self._to_decode = Channel(world, 0.002)
        self._data: dict[tuple[int, int], Channel] = {}
        self._backend = backend
        self._pools: dict[str, SimulatedPipeline] = {}
        self._renewals: dict[str, None] = {}
        self._beats: str | None = None  # the session whose next heartbeat is scheduled

    def knows(self, session: str) -> bool:
        """Whether the session is or was of this connection."""
        return session in self._pools

    def connect(self) -> None:
        """Begin a session; both sides learn of it."""
        self._sessions += 1
        other = f"{self._replica.index}-" if self._replica.index else ""
        other = other if self._decode.name == "decode" else f"by-{self._decode.name}-{other}"
        other = other if self._prefill.name == "prefill" else f"{self._prefill.name}-{other}"
        session = self.session = f"session-{other}{self._sessions}"
        self._pools[session] = self._replica.pipeline
        prefill, decode = self._prefill.config, self._decode.config
        self._send(
            self._to_prefill,
            self._prefill,
            PeerJoined(
                name=self._decode.name,
                terms=PeerTerms(
                    session=session,
                    geometries=(_geometry(decode),) * decode.stages,
                    window_bytes=WINDOW,
                    backend=self._backend,
                ),
            ),
        )
        up = PrefillUp(
            name=self._name,
            terms=PrefillTerms(
                session=session,
                endpoints=("simulated",) * len(prefill.layout.ranks),
                geometries=(_geometry(prefill),) * len(prefill.layout.ranks),
                window_bytes=WINDOW,
                backend=self._backend,
            ),
            replica=self._replica.index,
        )
        self._send(self._to_decode, self._decode, up)

    def lose(self) -> None:
        """Break the connection; each side notices after a delay, and it comes back later."""
        session, self.session = self.session, None
        self._renewals.clear()
        if session is None:
            return
        gone, down = (
            PeerGone(session=session, reason="lost"),
            PrefillDown(name=self._name, session=session, reason="", replica=self._replica.index),
        )
        self._to_prefill.put(lambda: self._prefill.handle(gone))
        self._to_decode.put(lambda: self._decode.handle(down))
        self._world.after(0.05, self.connect)

    def renew(self, ticket: str) -> None:
        """Send a heartbeat that renews the ticket."""
        if self.session is not None:
            self._send(self._to_prefill, self._prefill, PeerRenewed(session=self.session, tickets=(ticket,)))

    def release(self, ticket: str) -> None:
        """Have the decode server release a ticket that it has not reserved."""
        if self.session is not None:
            event = PeerReleased(session=self.session, ticket=ticket, reason="not needed")
            self._send(self._to_prefill, self._prefill, event)

    def from_control_client(self, effect: AskReserve | AskCancel | AskRenew) -> None:
        """Take an effect of the decode server's scheduler."""
        if effect.session == self.session and not isinstance(effect, AskRenew):
            ended = effect.reservation.ticket if isinstance(effect, AskReserve) else effect.ticket
            self._renewals.pop(ended, None)
        match effect:
            case AskRenew():
                self._renew(effect)
            case AskReserve(session=session, reservation=reservation):
                reserved = PeerReserved(session=session, reservation=reservation)
                self._send(self._to_prefill, self._prefill, reserved)
            case AskCancel(ticket=ticket, generation=0):  # it was not reserved
                self.release(ticket)
            case AskCancel(session=session, ticket=ticket, generation=generation):
                event = PeerCancelled(session=session, ticket=ticket, generation=generation, reason=effect.reason)
                self._send(self._to_prefill, self._prefill, event)

    def from_control_server(self, effect: Effect) -> None:
        """Take an effect of the prefill server's scheduler."""
        match effect:
            case TellFailed(session=session, ticket=ticket, generation=generation, error=error):
                event: Event = TicketFailed(session=session, ticket=ticket, generation=generation, error=error)
            case TellCancelled(session=session, ticket=ticket, generation=generation):
                event = TicketCancelled(session=session, ticket=ticket, generation=generation)
            case EndPeer():
                self.lose()
                return
            case TellFinished(session=session, ticket=ticket, generation=generation, first=first) if first is not None:
                event = TicketFinished(session=session, ticket=ticket, generation=generation, first=first)
            case _:
                return
        self._send(self._to_decode, self._decode, event)

    def ship(self, chunk: SimulatedChunk) -> None:
        """Deliver a chunk to every stage of the replica, unless it stalls or its session is lost."""
        if self._backend == SHM:
            self._write(chunk)
        if self._world.random.random() < self._stall:
            return
        chunk.receivers = self._decode.config.stages
        for index in range(chunk.receivers):
            channel = self._data.setdefault((chunk.rank, index), Channel(self._world, 0.003))
            channel.put(lambda index=index: self._deliver(chunk, index))  # type: ignore[misc]

    def _renew(self, ask: AskRenew) -> None:
        """Renew a ticket with the heartbeats of this session from now on."""
        if ask.session != self.session:
            return
        self._renewals[ask.ticket] = None
        if self._beats != ask.session:
            self._beats = ask.session
            self._world.at(self._world.now + HEARTBEAT_S, lambda: self._beat(ask.session))

    def _beat(self, session: str) -> None:
        if session != self._beats:
            return
        if session != self.session or not self._renewals:
            self._beats = None
            return
        self._send(self._to_prefill, self._prefill, PeerRenewed(session=session, tickets=tuple(self._renewals)))
        self._world.at(self._world.now + HEARTBEAT_S, lambda: self._beat(session))

    def _write(self, chunk: SimulatedChunk) -> None:
        """Write a chunk into the decode server's pages directly: until access is revoked, session or not."""
        send, pipeline = chunk.order, self._pools[chunk.order.session]
        chunk.written = True
        for stage in pipeline.stages:
            if send.session in stage.revoked:
                continue
            stage.write(chunk)
            problem = self._replica.guard.written(send) if pipeline is self._replica.pipeline else None
            if problem is not None:
                self._decode.violation(problem)

    def _deliver(self, chunk: SimulatedChunk, index: int) -> None:
        if chunk.order.session == self.session:
            self._replica.pipeline.stages[index].receive(chunk)

    def _send(self, channel: Channel, server: SimulatedServer, event: Event) -> None:
        session = self.session
        channel.put(lambda: server.handle(event) if session == self.session else None)


def _geometry(config: SchedulerConfig) -> Geometry:
    return Geometry("float32", 1, 1, 1, config.page_size)
