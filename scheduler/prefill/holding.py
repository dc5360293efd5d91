"""Held requests: their KV is computed and waits under a lease for a peer to reserve it.

computed ─► Held, lease ──PeerReserved──► sent like any other ticket
                │  ├── PeerRenewed ─► the lease begins anew, up to the limit
                │  └── no renewal, the limit, PeerReleased, Abort ─► FAILED; a later PeerReserved is told why
                └──── a peer had reserved already: no lease

A held request has no metadata row until a peer reserves it: rows bound what is being handed over at a time, and idle
leases that kept theirs would make every other ticket wait. So a held request may have pages and wait for a row.
Therefore a request that has a row never waits for pages.
"""

from headrace.core.messages.peers import PeerReleased, PeerRenewed
from headrace.core.messages.replies import Held
from headrace.core.types.errors import CANCELLED, LEASE_EXPIRED, ErrorInfo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.queues.deadlines import BootstrapTimer, LeaseTimer, RequestTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.state import State


class HeldRequests:
    """Begins, renews and ends the leases of requests that no peer has reserved."""

    def __init__(self, state: State, completion: Completion) -> None:
        self._state = state
        self._completion = completion

    def computed(self, request: Request, now: float) -> None:
        """Answer the client, and begin the lease unless a peer has reserved."""
        state = self._state
        state.deadlines.clear(RequestTimer(request.arrival))
        lease_s = 0.0
        if request.awaiting_peer:
            request.hold_until = now + state.config.hold_limit_s
            lease_s = self._renew(request, now)
        usage, timing, promise = request.usage(), request.timing(), request.promise()
        state.out.add(Held(rid=request.rid, lease_s=lease_s, usage=usage, timing=timing, promise=promise))

    def renewed(self, event: PeerRenewed, now: float) -> None:
        """Renew leases, and the time that prompts wait for their peer, which is alive and queues them. Other tickets
        are only counted: a peer may be early, or late."""
        state = self._state
        if event.session not in state.peers:
            state.drop("unknown_session")
            return
        for ticket in event.tickets:
            request = state.tickets.holder(ticket)
            if request is None:
                state.drop("unknown_lease")
            elif _under_lease(request) and request.phase is Phase.INFLIGHT:
                self._renew(request, now)
            elif state.deadlines.active(BootstrapTimer(request.arrival)):
                end = min(now + state.config.bootstrap_timeout_s, request.arrived + state.config.longest_wait_s)
                state.deadlines.set(BootstrapTimer(request.arrival), end)
            else:
                state.drop("unknown_lease")

    def expired(self, request: Request, now: float) -> None:
        """Fail a request whose lease was not renewed in time, or not reserved within the limit."""
        config = self._state.config
        self._state.metrics.counters.add("leases_expired_total")
        if now >= request.hold_until:
            text = f"no peer reserved ticket {request.ticket} within the limit of {config.hold_limit_s:g} s"
        else:
            text = f"no peer reserved or renewed ticket {request.ticket} within {config.hold_lease_s:g} s"
        self._completion.fail(request, ErrorInfo(code=LEASE_EXPIRED, message=text, status=504), now)

    def released(self, event: PeerReleased, now: float) -> None:
        """A peer that knows the ticket, and has not reserved it, says that no peer will. Fail its request, computed or
        not; if the prompt has not come yet, fail it when it does."""
        state = self._state
        request = state.tickets.holder(event.ticket)
        text = f"a peer released the ticket: {event.reason}"
        if request is None and state.tickets.early(event.ticket) is None:
            state.tickets.abandon(event.ticket, text, now + state.config.bootstrap_timeout_s)
        elif request is not None and request.outgoing is None:
            self._completion.fail(request, ErrorInfo(code=CANCELLED, message=text, status=499), now)

    def _renew(self, request: Request, now: float) -> float:
        """Begin the lease anew; returns the seconds that it lasts."""
        end = min(now + self._state.config.hold_lease_s, request.hold_until)
        self._state.deadlines.set(LeaseTimer(request.arrival), end)
        return end - now


def _under_lease(request: Request) -> bool:
    """A lease keeps the request, or will. Other requests that are computed early have the bootstrap deadline."""
    return request.held and request.awaiting_peer
