"""Which transitions of the state machines schedules take: recorded by wrapping the few methods that change a state.

A transition is (machine, state before, event, state after). The event is what the scheduler was told ("PlanDone"), a
deadline ("deadline LEASE"), or "next" where one thing follows from another: planning, and starting what has room now.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headrace.core.incoming import IncomingTransfer
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.scheduler.decode.prefill_sessions import PrefillSessions
from headrace.scheduler.peers.peer_tables import DecodePeerTable
from headrace.scheduler.peers.tickets import TicketTable
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.request_table import RequestTable
from headrace.scheduler.scheduler import Scheduler
from headrace.testing.world import SchedulerDriver
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.data.inbound import InboundTable
from headrace.transfer.data.outbound import Outbound

Transition = tuple[str, str, str, str]
ENTERED = "-"  # before it was there
LEFT = "gone"


class Recorder:
    """Counts transitions while it is installed()."""

    def __init__(self) -> None:
        self.seen: Counter[Transition] = Counter()
        self.arrivals: Counter[tuple[str, str]] = Counter()
        """Events about a request by the phase that it was in."""

        self._event = "next"

    @contextmanager
    def installed(self) -> Iterator["Recorder"]:
        """Record meanwhile."""
        with ExitStack() as stack:
            for owner, name, wrapper in (*self._events(), *self._requests(), *self._transfers(), *self._protocol()):
                stack.enter_context(patch.object(owner, name, wrapper(getattr(owner, name))))
            yield self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: what shrinking tries is no part of the run."""
        seen, arrivals = Counter(self.seen), Counter(self.arrivals)
        try:
            yield
        finally:
            self.seen, self.arrivals = seen, arrivals

    def _note(self, machine: str, before: str, after: str) -> None:
        if before != after:
            self.seen[machine, before, self._event, after] += 1

    def _events(self) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
        """What sets the event."""

        def handle(original: Any) -> Any:
            def wrapped(driver: SchedulerDriver, event: Any) -> None:
                self._event = type(event).__name__
                self._arrived(driver.scheduler, event)
                original(driver, event)
                self._event = "next"

            return wrapped

        def follows(original: Any) -> Any:
            def wrapped(scheduler: Scheduler, now: float) -> Any:
                self._event = "next"
                return original(scheduler, now)

            return wrapped

        def expire(original: Any) -> Any:
            def wrapped(scheduler: Scheduler, timer: Any, now: float) -> None:
                self._event = f"deadline {type(timer).__name__.removesuffix('Timer').upper()}"
                original(scheduler, timer, now)

            return wrapped

        yield SchedulerDriver, "handle", handle
        yield Scheduler, "_conclude", follows
        yield Scheduler, "_expire", expire

    def _arrived(self, scheduler: Scheduler, event: Any) -> None:
        requests = scheduler._state.requests
        serial, rid = getattr(event, "request", None), getattr(event, "rid", None)
        if isinstance(serial, int):
            request = requests.by_serial(serial)
        elif rid is not None:
            request = requests.live(rid)
        else:
            return
        self.arrivals["none" if request is None else request.phase.value, self._event] += 1

    def _requests(self) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
        def enter(original: Any) -> Any:
            def wrapped(request: Request, phase: Phase, now: float) -> Any:
                self._note(_machine(request), request.phase.value, phase.value)
                return original(request, phase, now)

            return wrapped

        def add(original: Any) -> Any:
            def wrapped(table: RequestTable, request: Request) -> None:
                self._note(_machine(request), ENTERED, request.phase.value)
                original(table, request)

            return wrapped

        def remove(original: Any) -> Any:
            def wrapped(table: RequestTable, request: Request) -> None:
                self._note(_machine(request), request.phase.value, LEFT)
                original(table, request)

            return wrapped

        yield Request, "enter", enter
        yield RequestTable, "add", add
        yield RequestTable, "remove", remove

    def _transfers(self) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
        def incoming(original: Any) -> Any:
            def wrapped(transfer: IncomingTransfer) -> None:
                state, writer = transfer.state.value, transfer.writer.value
                original(transfer)
                self._note("incoming transfer", state, transfer.state.value)
                self._note("remote writer", writer, transfer.writer.value)

            return wrapped

        for name in ("reserve", "receive", "end", "lose", "stop_writer"):
            yield IncomingTransfer, name, incoming

        def ticket(original: Any) -> Any:
            def wrapped(table: TicketTable, of: Any, *rest: Any) -> Any:
                name = of if isinstance(of, str) else of.reservation.ticket
                before = _ticket(table, name)
                result = original(table, of, *rest)
                self._note("ticket", before, _ticket(table, name))
                return result

            return wrapped

        def match(original: Any) -> Any:
            def wrapped(table: TicketTable, key: Any, request: Request) -> None:
                self._note("ticket", "claimed", "reserved")
                original(table, key, request)

            return wrapped

        yield TicketTable, "match", match
        for name in ("claim", "reserve_early", "pop_early", "end", "abandon", "pop_abandoned"):
            yield TicketTable, name, ticket
        yield from self._sessions()

    def _sessions(self) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
        def peer(original: Any) -> Any:
            def wrapped(table: DecodePeerTable, of: Any, *rest: Any) -> Any:
                session = of if isinstance(of, str) else of.session
                before = _peer(table, session)
                result = original(table, of, *rest)
                self._note("decode peer", before, _peer(table, session))
                return result

            return wrapped

        def prefill(original: Any) -> Any:
            def wrapped(sessions: PrefillSessions, event: Any, *rest: Any) -> None:
                before = _prefill(sessions, event)
                original(sessions, event, *rest)
                self._note("prefill server", before, _prefill(sessions, event))

            return wrapped

        yield DecodePeerTable, "join", peer
        yield DecodePeerTable, "leave", peer
        for name in ("add", "up", "down"):
            yield PrefillSessions, name, prefill

    def _protocol(self) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
        """The tables of transfer/, in schedules of the protocol: the event is the method's."""

        def table(machine: str, name: str, state: Callable[[Any, Any], str]) -> tuple[str, Callable[[Any], Any]]:
            def wrap(original: Any) -> Any:
                def wrapped(owner: Any, of: Any, *rest: Any) -> Any:
                    before = state(owner, of)
                    result = original(owner, of, *rest)
                    after = state(owner, of)
                    if before != after:
                        self.seen[machine, before, name.strip("_"), after] += 1
                    return result

                return wrapped

            return name, wrap

        for name in ("prepare", "close"):
            yield InboundTable, *table("inbound KV", name, _inbound)
        yield InboundTable, *table("inbound KV", "arrive", lambda owner, one: _inbound(owner, one.order))
        for name in ("fail", "cancel", "release"):
            yield Outbound, *table("outbound KV", name, _outbound)
        yield SessionTable, *table("session", "_drop", lambda owner, peer: _open(peer.route in owner._by_route))
        yield SessionTable, *table("session", "_hello", lambda owner, route: _open(route in owner._by_route))
        # The session's ticket is named by the second argument.
        yield SessionTable, "_reserve", self._tickets
        yield SessionTable, "_cancel", self._tickets
        yield SessionTable, "tell", self._told

    def _tickets(self, original: Any) -> Any:
        def wrapped(table: SessionTable, peer: Any, message: Any) -> Any:
            before = _use(peer, message)
            result = original(table, peer, message)
            if (after := _use(peer, message)) != before:
                self.seen["protocol ticket", before, type(message).__name__, after] += 1
            return result

        return wrapped

    def _told(self, original: Any) -> Any:
        def wrapped(table: SessionTable, effect: Any, now: float) -> Any:
            peer = table._by_session.get(effect.session)
            if peer is None or not hasattr(effect, "ticket"):
                return original(table, effect, now)
            before = _use(peer, effect)
            result = original(table, effect, now)
            if (after := _use(peer, effect)) != before:
                self.seen["protocol ticket", before, type(effect).__name__, after] += 1
            return result

        return wrapped


def _machine(request: Request) -> str:
    if isinstance(request.route, SendTo):
        return "held request" if request.route.hold else "sent request"
    return "fetched request" if isinstance(request.route, FetchFrom) else "own request"


def _ticket(table: TicketTable, name: str) -> str:
    request = table._active.get(name)
    if request is not None:
        return "claimed" if request.outgoing is None else "reserved"
    for state, tickets in (("early", table._early), ("abandoned", table._abandoned), ("ended", table._ended)):
        if name in tickets:
            return state
    return "free"


def _peer(table: DecodePeerTable, session: str) -> str:
    peer = table.get(session)
    return ENTERED if peer is None else "ending" if peer.ending else "open"


def _prefill(sessions: PrefillSessions, event: Any) -> str:
    server = sessions._state.prefills.get(event.name)
    if server is None:
        return ENTERED
    return "down" if server.session(getattr(event, "replica", 0)) is None else "up"


def _inbound(table: InboundTable, of: Any) -> str:
    return _open((of if isinstance(of, int) else of.request) in table._requests)


def _outbound(table: Outbound, request: int) -> str:
    owner = table._requests.get(request)
    if owner is None:
        return ENTERED
    return "open" if owner.open else "cancelling" if owner in table._cancelling else "closed"


def _use(peer: Any, message: Any) -> str:
    """The state of one use of a ticket, by its generation."""
    current = peer.tickets.get(message.ticket)
    if current is not None and current.generation == message.generation:
        return "cancelling" if current.cancelling else "open"
    return "ended" if peer.ended.get(message.ticket, -1) >= message.generation else ENTERED


def _open(there: bool) -> str:
    return "open" if there else ENTERED
