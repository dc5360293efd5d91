"""The integrity check: what must be true of the state after every event."""

from collections.abc import Iterator

from headrace.scheduler.requests.record import Phase, Request
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

WITH_PAGES = (Phase.RUNNING, Phase.INFLIGHT, Phase.FETCHING, Phase.GENERATING)
WITHOUT_PAGES = (Phase.BOOTSTRAP, Phase.WAITING)


def check(state: State) -> list[str]:
    """Every discrepancy found, in words: those of each table, and those between tables."""
    return [
        *(problem for replica in state.replicas for problem in _replica(state, replica)),
        *state.requests.check(),
        *state.tickets.check(state.requests),
        *state.peers.check(state.requests),
        *state.prefills.check(state.requests),
        *_rows(state),
        *(problem for request in state.requests for problem in _request(state, request)),
    ]


def _replica(state: State, replica: Replica) -> Iterator[str]:
    """The tables of one replica, and its leases: each has its request."""
    requests = [request for request in state.requests if request.replica == replica.index]
    found = [
        *replica.cache.check(),
        *replica.queues.check(requests),
        *replica.plans.check(requests),
        *replica.held.check(requests),
    ]
    leases = sum(request.lease is not None for request in requests)
    if leases != replica.cache.leases:
        found.append(f"{replica.cache.leases} leases, {leases} of them with a request")
    if not requests and replica.cache.leased and not replica.cache.copying:
        found.append(f"no request is left, but {replica.cache.leased} leased pages")
    yield from (f"replica {replica.index}: {text}" if len(state.replicas) > 1 else text for text in found)


def _rows(state: State) -> Iterator[str]:
    """Every metadata row has its request."""
    if unknown := {request.arrival for request in state.awaiting_row.values()} - {
        one.arrival for one in state.requests
    }:
        yield f"requests {unknown} wait for metadata rows and are not known"
    rows = [(request.row, request) for request in state.requests if request.row is not None]
    if state.metadata_rows.free + len(rows) != state.metadata_rows.total:
        yield f"{state.metadata_rows.free} metadata rows free + {len(rows)} held != {state.metadata_rows.total}"
    for row, request in rows:
        if state.metadata_rows.owner(row) != request.arrival:
            yield f"{request.rid} has metadata row {row}, which belongs to {state.metadata_rows.owner(row)}"


def _request(state: State, request: Request) -> Iterator[str]:
    """One request: it holds what its phase needs, and something will move it on."""
    name, phase = f"{request.rid} ({request.phase.value})", request.phase
    if (
        phase is Phase.INFLIGHT
        and request.outgoing is None
        and not state.deadlines.active(Timer.LEASE if request.held else Timer.BOOTSTRAP, request.arrival)
    ):
        yield f"{name} waits for a peer without a deadline"
    if phase in WITH_PAGES and request.lease is None:
        yield f"{name} has no pages"
    if phase in WITHOUT_PAGES and request.lease is not None:
        yield f"{name} has pages already"
    remote_writes = request.incoming is not None and request.incoming.remote_writes
    if request.ended and not request.awaiting_stages and not remote_writes and not request.in_flight:
        yield f"{name} has ended, and nothing keeps its pages"
    if remote_writes and not request.ended and phase is not Phase.FETCHING:
        yield f"{name} computes on pages that a prefill server may write"
    if request.lease is not None and not 0 <= request.computed <= request.planned:
        yield f"{name} has computed {request.computed} tokens of {request.planned} planned"
