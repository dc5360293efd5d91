"""Held requests: their KV waits, computed, for a peer that has not come, under a lease.

computed ─► Held, lease ──Reserve──► sent like any other ticket
                │  ├── renewal ─► the lease begins anew, up to the limit
                │  └── silence, the limit, Cancel, Abort, drain ─► FAILED; a later Reserve hears why
                └──── peer had come already: no lease

A held request has no metadata row until a peer reserves it. Rows bound what is being handed over at a time; idle leases
that kept theirs would make every other ticket wait. So it may have pages and wait for a row; nobody who has a row waits
for pages, therefore.
"""

from headrace.core.messages.frontend import Held
from headrace.core.messages.peers import PeerReleased, PeerRenewed
from headrace.core.types.errors import CANCELLED, LEASE_EXPIRED, ErrorInfo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import State


class HeldRequests:
    """Begins, renews and ends the leases of requests that no peer has come for."""

    def __init__(self, state: State, completion: Completion) -> None:
        self._state = state
        self._completion = completion

    def computed(self, request: Request, now: float) -> None:
        """The client has its answer; what is awaited from now on is a peer, unless one has come."""
        state = self._state
        state.deadlines.clear(Timer.REQUEST, request.arrival)
        lease_s = 0.0
        if request.awaiting_peer:
            request.hold_until = now + state.config.hold_limit_s
            lease_s = self._renew(request, now)
        state.out.add(
            Held(
                rid=request.rid,
                lease_s=lease_s,
                usage=request.usage(),
                timing=request.timing(),
                prompt_logprobs=request.all_prompt_logprobs(),
            )
        )

    def renewed(self, event: PeerRenewed, now: float) -> None:
        """Leases begin anew. Nothing is said of tickets that have none: a peer may be early, or late."""
        state = self._state
        if event.session not in state.peers:
            state.drop("unknown_session")
            return
        for ticket in event.tickets:
            request = state.tickets.holder(ticket)
            if request is not None and _held(request) and request.phase is Phase.INFLIGHT:
                self._renew(request, now)
            else:
                state.drop("unknown_lease")

    def expired(self, request: Request, now: float) -> None:
        """Nobody has come for it, or renewed."""
        config = self._state.config
        self._state.counters.add("leases_expired_total")
        if now >= request.hold_until:
            text = f"no peer reserved ticket {request.ticket} within the limit of {config.hold_limit_s:g} s"
        else:
            text = f"no peer reserved or renewed ticket {request.ticket} within {config.hold_lease_s:g} s"
        self._completion.fail(request, ErrorInfo(code=LEASE_EXPIRED, message=text, status=504), now)

    def released(self, event: PeerReleased, now: float) -> None:
        """A peer that has not reserved the ticket knows its name, and lets it go: whoever waits for a peer need not
        wait any longer, be the prompt computed, on its way here, or neither."""
        state = self._state
        request = state.tickets.holder(event.ticket)
        text = f"a peer released the ticket: {event.reason}"
        if request is None and event.ticket not in state.tickets.early:
            state.tickets.abandon(event.ticket, text, now + state.config.bootstrap_timeout_s)
        elif request is not None and request.outgoing is None:
            self._completion.fail(request, ErrorInfo(code=CANCELLED, message=text, status=499), now)

    def drop_all(self, error: ErrorInfo, now: float) -> None:
        """Fail every request that is to be held, or held, for a peer that has not come."""
        for request in filter(_held, list(self._state.awaiting_peer.values())):
            self._completion.fail(request, error, now)

    def _renew(self, request: Request, now: float) -> float:
        """Seconds that the lease has from now on."""
        end = min(now + self._state.config.hold_lease_s, request.hold_until)
        self._state.deadlines.set(Timer.LEASE, request.arrival, end)
        return end - now


def _held(request: Request) -> bool:
    """Kept by a lease, or going to be; whoever else is computed ahead of its peer has a deadline for that."""
    return request.held and request.awaiting_peer
