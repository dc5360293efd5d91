"""The integrity check: what must be true of the state after every event, and how often an idle server checks it."""

from collections.abc import Iterator

from headrace.scheduler.queues.deadlines import BootstrapTimer, LeaseTimer
from headrace.scheduler.requests.parts import Leftover
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

WITH_PAGES = (Phase.RUNNING, Phase.INFLIGHT, Phase.FETCHING, Phase.GENERATING)
WITHOUT_PAGES = (Phase.BOOTSTRAP, Phase.WAITING)
PAGES_PER_PROBE = 1024  # of the KV pool: walked in about 0.2 ms
UNCHANGED_PROBES = 64  # between two checks of a state that no event has changed


def check(state: State) -> list[str]:
    """Every discrepancy found, in words: those of each table, and those between tables."""
    requests = list(state.requests)
    found: list[str] = []
    for replica in state.replicas:
        alone = len(state.replicas) == 1
        own = requests if alone else [request for request in requests if request.replica == replica.index]
        problems = _replica(replica, own)
        found.extend(problems if alone else (f"replica {replica.index}: {text}" for text in problems))
    found.extend(state.requests.check())
    found.extend(state.tickets.check(requests))
    found.extend(state.peers.check(requests))
    found.extend(state.unacknowledged.check(requests))
    found.extend(state.queued_by_tenant.check(requests))
    found.extend(state.prefills.check(requests))
    found.extend(_rows(state, requests))
    for request in requests:
        found.extend(_request(state, request))
    return found


def _replica(replica: Replica, requests: list[Request]) -> list[str]:
    """The tables of one replica, and its leases: each has its request."""
    cache = replica.cache
    found = cache.check()
    found.extend(replica.queues.check(requests))
    found.extend(replica.plans.check(requests))
    found.extend(replica.held.check(requests))
    if (moving := {one.arrival for one in requests if one.submit.route.moves_cached}) != replica.moves.keys():
        found.append(f"requests {set(replica.moves)} are counted as moving cached KV; {moving} do")
    leases = 0
    for request in requests:
        leases += request.lease is not None
    if leases != cache.leases:
        found.append(f"{cache.leases} leases, {leases} of them with a request")
    if not requests and cache.leased and not cache.copying:
        found.append(f"no request is left, but {cache.leased} leased pages")
    return found


def _rows(state: State, requests: list[Request]) -> Iterator[str]:
    """Every metadata row has its request."""
    unknown = {request.arrival for request in state.awaiting_row.values()}
    if unknown and (unknown := unknown - {one.arrival for one in requests}):
        yield f"requests {unknown} wait for metadata rows and are not known"
    rows = [(request.row, request) for request in requests if request.row is not None]
    if state.metadata_rows.free + len(rows) != state.metadata_rows.total:
        yield f"{state.metadata_rows.free} metadata rows free + {len(rows)} held != {state.metadata_rows.total}"
    for row, request in rows:
        if state.metadata_rows.owner(row) != request.arrival:
            yield f"{request.rid} has metadata row {row}, which belongs to {state.metadata_rows.owner(row)}"


def _request(state: State, request: Request) -> list[str]:
    """One request: it holds what its phase needs, and something will move it on."""
    phase, found = request.phase, []
    if (
        phase is Phase.INFLIGHT
        and request.outgoing is None
        and not state.deadlines.active((LeaseTimer if request.held else BootstrapTimer)(request.arrival))
    ):
        found.append("waits for a peer without a deadline")
    if phase in WITH_PAGES and request.lease is None:
        found.append("has no pages")
    if phase in WITHOUT_PAGES and request.lease is not None:
        found.append("has pages already")
    remote_writes = request.incoming is not None and request.incoming.remote_writes
    kept = request.leftover is Leftover.KEPT
    if request.ended and not (request.on_stages.stopping or remote_writes or request.in_flight or kept):
        found.append("has ended, and nothing keeps its pages")
    if remote_writes and not request.ended and phase is not Phase.FETCHING:
        found.append("computes on pages that a prefill server may write")
    if request.lease is not None and not 0 <= request.computed <= request.planned:
        found.append(f"has computed {request.computed} tokens of {request.planned} planned")
    return [f"{request.rid} ({phase.value}) {text}" for text in found]


class IdleCheck:
    """Decides at which probes of an idle server the integrity check runs, which walks over all pages.

    It runs at the first probe after a change, but once in as many probes as keep the mean at PAGES_PER_PROBE pages a
    probe. What has not changed since a check that found no problem is checked again UNCHANGED_PROBES later.
    """

    def __init__(self) -> None:
        self._changed = True
        self._probes: int | None = None  # since the last check

    def changed(self) -> None:
        """An event or a deadline may have changed the state."""
        self._changed = True

    def due(self, pages: int) -> bool:
        """Whether this probe checks the state. pages: of all KV pools."""
        if self._probes is None:
            return True
        self._probes += 1
        spread = pages // PAGES_PER_PROBE
        return self._probes >= (spread if self._changed else max(spread, UNCHANGED_PROBES))

    def checked(self, clean: bool) -> None:
        """The whole state has been checked. clean: no problem was found."""
        self._changed = not clean
        self._probes = 0
