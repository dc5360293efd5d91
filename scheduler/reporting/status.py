"""What the scheduler reports when asked: its answer to GET /status, and a snapshot of its metrics.

The answer is bounded: the time it takes does not grow with the number of requests. What each metric means:
scheduler/telemetry/metrics.py.
"""

from collections.abc import Iterator
from itertools import islice

from headrace.core.messages.frontend import QueryPrefix
from headrace.core.messages.replies import PrefixReply
from headrace.core.stats import Sample, Stats
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
from headrace.core.types.forecast import ForecastReport, LengthBound
from headrace.core.types.kv.kv_tiers import TIERS
from headrace.scheduler.costs.cost_model import Load
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


def prefix(state: State, event: QueryPrefix) -> PrefixReply:
    """What the prefix cache has of a prompt, tiers included, at the replica that has most of it."""
    pools = [replica.cache.forecast(event.prompt, event.salt, event.tenant) for replica in state.replicas]
    most, pool = max(enumerate(pools), key=lambda each: each[1].held)
    cost = state.replicas[0].costs.per_token if state.costs_trusted else None
    return PrefixReply(
        token=event.token,
        pool=pool,
        load_s=state.replicas[most].copies.load_s(pool.in_tiers, state.config.page_size),
        has_peer=state.peers.is_host(event.host),
        cost=cost,
    )


def forecast(state: State, now: float) -> ForecastReport:
    """What is promised and forecast."""
    promises, last = state.promises, state.promises.forecast
    return ForecastReport(
        promise=promises.share,
        queue_s=round(state.unplanned_s, 6),
        queue=last.queue if last is not None else None,
        one_more=last.one_more if last is not None else None,
        horizon_s=last.horizon_s if last is not None else None,
        bounds=_length_bounds(state, now),
        age_s=round(now - promises.forecast_at, 3) if last is not None else None,
    )


def _length_bounds(state: State, now: float) -> tuple[LengthBound, ...]:
    """Bounds that prompts without a priority or an objective would be promised now, at the replica where their first
    token is predicted first."""
    if not state.costs_trusted:
        return ()

    def first_token(tokens: int) -> tuple[float, float]:
        load = Load.between(0, tokens)
        predicted = ((one.predictor.predict(0, None, load, 0, now).ttft_s, one) for one in state.replicas)
        ttft_s, replica = min(predicted, key=lambda each: each[0])
        return replica.costs.load_s(load), ttft_s

    return state.promises.bounds(first_token)


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


def snapshot(state: State, integrity_errors: int, now: float) -> Stats:
    """Counters and histograms, and gauges as of now. integrity_errors: found by the last check."""
    metrics, gauges = state.metrics, _gauges(state, integrity_errors, now)
    return Stats(samples=(*metrics.counters.snapshot(), *gauges), histograms=metrics.histograms.snapshot())


def _gauges(state: State, integrity_errors: int, now: float) -> Iterator[Sample]:
    replicas, first = state.replicas, state.replicas[0]
    for phase, requests in state.phases.items():
        yield Sample("queue_requests", requests, (phase.value,))
    for phase, tokens in state.phase_tokens.items():
        yield Sample("queue_tokens", tokens, (phase.value,))
    yield Sample("unplanned_tokens", state.unplanned)
    yield Sample("unplanned_seconds", state.unplanned_s)
    squared_token, token = first.costs.per_token
    yield Sample("prefill_cost_seconds", token, ("token",))
    yield Sample("prefill_cost_seconds", squared_token, ("squared_token",))
    for tokens, wait_s, delayed in state.waits(now):
        yield Sample("predicted_wait_seconds", wait_s, (str(tokens),))
        yield Sample("delayed_requests", delayed, (str(tokens),))
    yield Sample("cost_model_trusted", float(state.costs_trusted))
    yield Sample("cost_model_stale", float(any(replica.costs.stale for replica in replicas)))
    yield Sample("kv_pages", sum(replica.cache.free for replica in replicas), ("free",))
    yield Sample("kv_pages", sum(replica.cache.cached for replica in replicas), ("cached",))
    yield Sample("kv_pages", sum(replica.cache.leased for replica in replicas), ("leased",))
    for use in ("free", "checkpoint", "leased"):
        yield Sample("state_slots", sum(replica.cache.slots[use] for replica in replicas), (use,))
    if first.cache.tiers is not None:
        for tier in TIERS:
            slots = [replica.cache.tiers.slots(tier) for replica in replicas if replica.cache.tiers is not None]
            used = sum(one.used for one in slots)
            yield Sample("kv_tier_pages", used, (tier, "used"))
            yield Sample("kv_tier_pages", sum(one.total for one in slots) - used, (tier, "free"))
    yield Sample("retained_pages", sum(replica.cache.retained for replica in replicas))
    yield Sample("held_requests", sum(len(replica.held) for replica in replicas))
    yield Sample("held_pages", sum(replica.held.pages for replica in replicas))
    yield Sample("quarantined_pages", state.prefills.quarantined_pages)
    yield Sample("plans_in_flight", state.plans_in_flight)
    yield Sample("reservations_waiting", len(state.tickets.early_reservations))
    yield Sample("peers", len(state.peers))
    yield Sample("prefill_servers", sum(len(server.hellos) == len(replicas) for server in state.prefills))
    yield Sample("integrity_errors", integrity_errors)
    if state.promises:
        yield from _forecast_gauges(state, now)
    yield Sample("metadata_rows_in_use", state.metadata_rows.total - state.metadata_rows.free)


def _forecast_gauges(state: State, now: float) -> Iterator[Sample]:
    """Of the last forecast; none before the first one."""
    promises, last = state.promises, state.promises.forecast
    if last is None:
        return
    yield Sample("forecast_age_seconds", now - promises.forecast_at)
    for servers, outlook in (("same", last.queue), ("one_more", last.one_more)):
        if outlook is not None:
            yield Sample("forecast_queue_seconds", outlook.p50_s, (servers, "0.5"))
            yield Sample("forecast_queue_seconds", outlook.p99_s, (servers, "0.99"))
    for bound in _length_bounds(state, now):
        yield Sample("ttft_bound_seconds", bound.ttft_s, (str(bound.tokens),))
