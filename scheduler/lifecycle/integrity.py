"""The self-check: what must be true of the books after every event."""

from collections.abc import Iterator

from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import State


def check(state: State) -> list[str]:
    """Every discrepancy found, in words; empty when the books balance."""
    return [
        *state.cache.check(),
        *_pages(state),
        *_counts(state),
        *(problem for request in state.records.values() for problem in _record(state, request)),
        *_idle(state),
    ]


def _pages(state: State) -> Iterator[str]:
    leases = sum(request.lease is not None for request in state.records.values())
    if leases != state.cache.leases:
        yield f"{state.cache.leases} leases, {leases} of them with a request"
    rows = sum(request.row is not None for request in state.records.values())
    if state.metadata_rows.free + rows != state.metadata_rows.total:
        yield f"{state.metadata_rows.free} metadata rows free + {rows} held != {state.metadata_rows.total}"


def _counts(state: State) -> Iterator[str]:
    requests = dict.fromkeys(state.queue_requests, 0)
    tokens = dict.fromkeys(state.queue_tokens, 0)
    in_flight: dict[int, int] = {}
    for plan in state.plans.values():
        for row in plan.rows:
            in_flight[row.request.arrival] = in_flight.get(row.request.arrival, 0) + 1
    for request in state.records.values():
        if not request.ended:
            requests[request.phase] += 1
            tokens[request.phase] += request.prompt_tokens
        if request.in_flight != in_flight.get(request.arrival, 0):
            yield f"{request.rid} is in {in_flight.get(request.arrival, 0)} plans and counts {request.in_flight}"
    if (requests, tokens) != (state.queue_requests, state.queue_tokens):
        yield f"queues count {state.queue_requests}, {state.queue_tokens}; there are {requests}, {tokens}"
    unplanned = sum(request.unplanned for request in state.records.values())
    if unplanned != state.unplanned:
        yield f"{state.unplanned} unplanned tokens counted, {unplanned} found"
    awaiting_peer = {request.arrival: request for request in state.records.values() if request.awaiting_peer}
    pages = sum(state.cache.pages_for(request.prompt_tokens) for request in awaiting_peer.values())
    if (awaiting_peer, pages) != (state.awaiting_peer, state.held_pages):
        yield f"{len(state.awaiting_peer)} held requests, {state.held_pages} pages counted; {len(awaiting_peer)}, {pages} found"
    preempting = sum(request.preempting for request in state.records.values())
    if preempting != state.preempting:
        yield f"{state.preempting} preemptions counted, {preempting} found"


def _record(state: State, request: Request) -> Iterator[str]:
    """One request: it is in the queue of its phase and in no other, and holds what the phase needs."""
    name, phase = f"{request.rid} ({request.phase.value})", request.phase
    if state.arrivals.get(request.arrival) is not request:
        yield f"{name} is not found by its arrival number"
    if (state.rids.get(request.rid) is request) == request.ended:
        yield f"{name} is {'still' if request.ended else 'not'} found by its id"
    if (request in state.waiting) != (phase is Phase.WAITING):
        yield f"{name} is {'' if request in state.waiting else 'not '}in the waiting queue"
    if request.arrival in state.awaiting_row and (request.lease is None or not request.early_prefill):
        yield f"{name} waits for a metadata row"
    if (
        phase is Phase.INFLIGHT
        and request.outgoing is None
        and not state.deadlines.active(Timer.LEASE if request.held else Timer.BOOTSTRAP, request.arrival)
    ):
        yield f"{name} waits for a peer without a deadline"
    if request.arrival in state.prefilling and phase is not Phase.RUNNING:
        yield f"{name} is among the prefills"
    if request.arrival in state.decoding and phase not in (Phase.RUNNING, Phase.GENERATING):
        yield f"{name} is among the decoding"
    if request.arrival in state.prefilling and request.arrival in state.decoding:
        yield f"{name} is in several queues"
    if phase in (Phase.RUNNING, Phase.INFLIGHT, Phase.FETCHING, Phase.GENERATING) and request.lease is None:
        yield f"{name} has no pages"
    if phase in (Phase.BOOTSTRAP, Phase.WAITING) and request.lease is not None:
        yield f"{name} has pages already"
    exposed = request.incoming is not None and request.incoming.remote_writes
    if request.ended and not request.awaiting_stages and not exposed and not request.in_flight:
        yield f"{name} has ended and nothing keeps it"
    if exposed and not request.ended and phase is not Phase.FETCHING:
        yield f"{name} computes on pages that others may write"
    if request.lease is not None and not 0 <= request.computed <= request.planned:
        yield f"{name} has computed {request.computed} tokens of {request.planned} planned"


def _idle(state: State) -> Iterator[str]:
    """Nothing may be left when there is no request."""
    if state.records:
        return
    leftovers = {
        "ids": len(state.rids),
        "arrival numbers": len(state.arrivals),
        "waiting requests": len(state.waiting),
        "requests without a row": len(state.awaiting_row),
        "prefills": len(state.prefilling),
        "decoding requests": len(state.decoding),
        "active tickets": state.tickets.active,
        "handoffs": state.tickets.handoffs,
        "fetches": len(state.fetches),
        "leased pages": state.cache.leased,
        "requests of peers": sum(len(peer.requests) for peer in state.peers.values()),
        "requests of prefill servers": sum(len(server.requests) for server in state.prefills.values()),
    }
    for what, count in leftovers.items():
        if count:
            yield f"no request is left, but {count} {what}"
