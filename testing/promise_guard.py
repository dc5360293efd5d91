"""Checks what a server has promised: cancels that end a request, leases, releases, and final replies to peers."""

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import Forward, Order, PrepareReceive, ReleaseRequest, ReplicaOrder, SendChunk
from headrace.core.messages.peers import PeerRenewed, TellCancelled, TellFailed, TellFinished
from headrace.core.messages.replies import Held, RequestFailed, SchedulerReply
from headrace.core.types.errors import LEASE_EXPIRED, NO_PEER
from headrace.core.types.requests.request import SendTo
from headrace.scheduler.state.events import Effect, Event

ROUNDING_S = 1e-9


class PromiseGuard:
    """Follows one server by its events and effects.

    cancel    a request that has come, and has not ended, has ended when its Abort has been handled; one that tells
              an error of the prefill server does not matter any more once all KV has come
    room      a prompt waits for its peer until the bootstrap timeout has passed since the peer last named its ticket
    lease     a held request does not expire before the end of its lease, which every heartbeat renews
    release   a number that the stages were told to forget is not used again
    reply     a use of a ticket is told one end; no chunk is ordered for it after that
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lease_s = config.hold_lease_s
        self._limit_s = config.hold_limit_s
        self._rooms: dict[str, tuple[str, float, float]] = {}  # by ticket: rid, end of the wait, and its limit
        self._live: set[str] = set()
        self._tickets: dict[str, str] = {}  # of held requests, by rid
        self._leases: dict[str, tuple[float, float]] = {}  # by ticket: its end, and beyond what it is not renewed
        self._released: set[int] = set()
        self._replies: dict[tuple[str, str, int], str] = {}

    def handled(self, event: Event, now: float) -> str | None:
        """An event was handled, and its effects are known; returns what that violates, None if nothing."""
        if isinstance(event, Abort) and event.rid in self._live and not (event.error and event.error.at_prefill):
            return f"{event.rid} goes on after it was cancelled"
        if isinstance(event, PeerRenewed):
            for ticket in event.tickets:
                if ticket in self._rooms:
                    rid, _, limit = self._rooms[ticket]
                    self._rooms[ticket] = (rid, min(now + self._config.bootstrap_timeout_s, limit), limit)
                if ticket in self._leases:
                    _, limit = self._leases[ticket]
                    self._leases[ticket] = (min(now + self._lease_s, limit), limit)
        return None

    def submitted(self, event: Submit, now: float) -> None:
        """A request comes now."""
        self._live.add(event.rid)
        if not isinstance(event.route, SendTo):
            return
        if event.route.hold:
            self._tickets[event.rid] = event.route.ticket
        elif event.route.ticket not in self._rooms:
            timeout_s, longest_s = self._config.bootstrap_timeout_s, self._config.longest_wait_s
            self._rooms[event.route.ticket] = (event.rid, now + timeout_s, now + longest_s)

    def output(self, output: SchedulerReply, now: float) -> str | None:
        """Take in a reply to the front end; returns what it violates, None if nothing."""
        if isinstance(output, Held):
            if output.lease_s > 0:
                self._leases[self._tickets[output.rid]] = (now + output.lease_s, now + self._limit_s)
            return None
        if isinstance(output, RequestFailed) and output.error.code == NO_PEER:
            end = max((end for rid, end, _ in self._rooms.values() if rid == output.rid), default=now)
            return f"{output.rid} has no peer at {now}; it waits until {end}" if now < end - ROUNDING_S else None
        if not isinstance(output, RequestFailed) or output.error.code != LEASE_EXPIRED:
            return None
        end, _ = self._leases.get(self._tickets.get(output.rid, ""), (now, now))
        return f"{output.rid} has expired at {now}; its lease ends at {end}" if now < end - ROUNDING_S else None

    def ended(self, rid: str) -> None:
        """A request has ended."""
        self._live.discard(rid)
        self._rooms = {ticket: room for ticket, room in self._rooms.items() if room[0] != rid}

    def effect(self, effect: Effect) -> str | None:
        """Take in an order or a reply to a peer; returns what it violates, None if nothing."""
        if isinstance(effect, ReplicaOrder):
            return self._order(effect.order)
        if isinstance(effect, Order):
            return self._order(effect)
        if not isinstance(effect, TellFinished | TellFailed | TellCancelled):
            return None
        key, kind = (effect.session, effect.ticket, effect.generation), type(effect).__name__
        before = self._replies.setdefault(key, kind)
        # A cancel is answered, whatever else has ended the use before.
        if before != kind and not isinstance(effect, TellCancelled):
            return f"{effect.ticket} is told {kind} after {before}"
        return None

    def _order(self, order: Order) -> str | None:
        if isinstance(order, Forward):
            if self._released and (known := self._released.intersection(row.request for row in order.rows)):
                return f"requests {known} are computed after their release"
        elif isinstance(order, SendChunk):
            if reply := self._replies.get((order.session, order.ticket, order.generation)):
                return f"a chunk of {order.ticket} is sent after {reply}"
        elif isinstance(order, ReleaseRequest):
            self._released.add(order.request)
        elif isinstance(order, PrepareReceive) and order.request in self._released:
            return f"request {order.request} is prepared after its release"
        return None
