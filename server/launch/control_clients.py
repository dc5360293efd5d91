"""The control clients of a decode server: one for each data-parallel replica, which is a peer of its own."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ControlClientEffect,
    PeerEvent,
    PrefillDown,
    PrefillUp,
)
from headrace.core.stats import Sample, Stats, join
from headrace.transfer.control.client import ControlClient
from headrace.transfer.protocol.messages import Hello


class ControlClients:
    """Routes effects to the client whose session they are of. An EventSource[PeerEvent, ControlClientEffect]."""

    def __init__(self, clients: Sequence[ControlClient]) -> None:
        """clients: of the replicas, in their order."""
        self._clients = clients
        self._sessions: dict[str, int] = {}  # open ones, with their replicas

    def ready(self, hellos: Sequence[Hello]) -> None:
        """Connect with these Hellos from now on, one of each replica."""
        for client, hello in zip(self._clients, hellos, strict=True):
            client.ready(hello)

    def sockets(self) -> Sequence[Any]:
        """Those of all clients."""
        return [socket for client in self._clients for socket in client.sockets()]

    def receive(self, now: float) -> list[PeerEvent]:
        """Take in what has come, in a bounded pass."""
        return [event for index, client in enumerate(self._clients) for event in self._of(index, client.receive(now))]

    def apply(self, command: ControlClientEffect, now: float) -> list[PeerEvent]:
        """Carry out an effect: of all clients, or of the one with the session."""
        if isinstance(command, AskReserve | AskRenew | AskCancel):
            index = self._sessions.get(command.session, 0)
            return self._of(index, self._clients[index].apply(command, now))
        every = enumerate(self._clients)
        return [event for index, client in every for event in self._of(index, client.apply(command, now))]

    def tick(self, now: float) -> list[PeerEvent]:
        """Do what is due by now."""
        return [event for index, client in enumerate(self._clients) for event in self._of(index, client.tick(now))]

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        deadlines = (client.next_deadline() for client in self._clients)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        """Close all of them."""
        for client in self._clients:
            client.close()

    def statistics(self) -> Stats:
        """Counters of all clients, and the prefill servers that every replica has a session with."""
        each = [client.statistics() for client in self._clients]
        up = min(sample.value for stats in each for sample in stats.samples if sample.name == "prefill_servers_up")
        rest = [Stats(tuple(one for one in stats.samples if one.name != "prefill_servers_up")) for stats in each]
        return join([Stats((Sample("prefill_servers_up", up),)), *rest])

    def _of(self, replica: int, events: Sequence[PeerEvent]) -> list[PeerEvent]:
        """The events of a client, with its replica."""
        return [self._with(replica, event) for event in events]

    def _with(self, replica: int, event: PeerEvent) -> PeerEvent:
        match event:
            case PrefillUp():
                self._sessions[event.session] = replica
                return replace(event, replica=replica)
            case PrefillDown():
                if event.session is not None:
                    self._sessions.pop(event.session, None)
                return replace(event, replica=replica)
            case _:
                return event
