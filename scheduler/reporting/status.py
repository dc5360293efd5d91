"""The scheduler's answer to GET /status. Bounded: the time it takes does not grow with the number of requests."""

from collections.abc import Iterator
from itertools import islice

from headrace.core.status import (
    KvPages,
    OpenRequest,
    PeerLink,
    PeerNote,
    PhaseLoad,
    QueueBound,
    SchedulerStatus,
    StageSpans,
    TierPages,
)
from headrace.scheduler.kv.node import TIERS
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.state import State
from headrace.scheduler.telemetry.plan_log import WINDOW_S, PlanLog

SEARCHED = 1000  # of the oldest requests, for those to be shown
MAX_PEERS = 100


def status(state: State, requests: int, now: float) -> SchedulerStatus:
    """A snapshot. requests: open ones to list, at most. Has plans recorded from now on, for some seconds."""
    phases, tokens = state.phases, state.phase_tokens
    return SchedulerStatus(
        phases=tuple(PhaseLoad(phase.value, phases[phase], tokens[phase]) for phase in phases),
        requests=tuple(_open_request(state, request, now) for request in _listed(state, requests)),
        bounds=_bounds(state, phases[Phase.BOOTSTRAP] + phases[Phase.WAITING]),
        kv=_kv_pages(state),
        stages=_stages(state, now),
        window_s=WINDOW_S,
        plans_in_flight=state.plans_in_flight,
        peers=tuple(islice(_peers(state, now), MAX_PEERS)),
        notes=tuple(PeerNote(now - one.at, one.peer, one.up, one.text) for one in reversed(state.peers.changes)),
    )


def _listed(state: State, count: int) -> list[Request]:
    """Requests that something is done for, then those that wait; the oldest first."""
    live = [request for request in islice(state.requests.in_order, SEARCHED) if not request.ended]
    return sorted(live, key=lambda request: request.phase is Phase.WAITING)[:count]


def _open_request(state: State, request: Request, now: float) -> OpenRequest:
    transfer = request.outgoing or request.incoming
    return OpenRequest(
        rid=request.rid,
        phase=request.phase.value,
        age_s=now - request.arrived,
        phase_s=now - request.since,
        prompt_tokens=request.prompt_tokens,
        computed_tokens=min(request.computed, request.prompt_tokens),
        cached_tokens=request.cached_tokens,
        generated_tokens=request.generated,
        max_tokens=request.max_tokens,
        transfer_bytes=transfer.bytes if transfer is not None else 0,
        held=request.held and request.awaiting_peer,
        peer=state.peer_of(request),
    )


def _bounds(state: State, queued: int) -> tuple[QueueBound, ...]:
    """What refuses requests with 429, as scheduler/overload.py counts it."""
    config = state.config
    return (
        QueueBound("requests", queued, config.max_queued_requests),
        QueueBound("tokens", state.unplanned, config.max_queued_tokens),
        QueueBound("seconds", round(state.unplanned_s, 3), config.max_queued_s),
    )


def _kv_pages(state: State) -> KvPages:
    caches = [replica.cache for replica in state.replicas]
    return KvPages(
        total=sum(cache.total for cache in caches),
        free=sum(cache.free for cache in caches),
        cached=sum(cache.cached for cache in caches),
        leased=sum(cache.leased for cache in caches),
        held=sum(replica.held.pages for replica in state.replicas),
        quarantined=state.prefills.quarantined_pages,
        tiers=tuple(_tiers(state)),
    )


def _tiers(state: State) -> Iterator[TierPages]:
    found = [replica.cache.tiers for replica in state.replicas if replica.cache.tiers is not None]
    for tier in TIERS:
        slots = [tiers.slots(tier) for tiers in found]
        if total := sum(one.total for one in slots):
            yield TierPages(tier, sum(one.used for one in slots), total)


def _stages(state: State, now: float) -> tuple[StageSpans, ...]:
    """All ranks that have computed since recording began, which is now for the first look after a while."""
    metrics, layout = state.metrics, state.config.layout
    if metrics.plans is None or not metrics.plans.watched(now):
        metrics.plans = PlanLog(now)
    return tuple(StageSpans(rank, layout.name(rank), spans) for rank, spans in sorted(metrics.plans.look(now).items()))


def _peers(state: State, now: float) -> Iterator[PeerLink]:
    for server in state.prefills:
        hello = next(iter(server.hellos.values()), None)
        yield PeerLink(
            name=server.name,
            role="prefill",
            up=len(server.hellos) == len(state.replicas),
            backend=hello.terms.backend if hello is not None else "",
            requests=len(server.requests),
            joined_s=now - server.joined if hello is not None else None,
        )
    for peer in state.peers:
        yield PeerLink(
            name=peer.hello.name,
            role="decode",
            up=not peer.ending,
            backend=peer.hello.terms.backend,
            backend_reason=peer.hello.backend_reason,
            requests=len(peer.requests),
            joined_s=now - peer.joined,
        )
