"""A snapshot of the scheduler's metrics; scheduler/state/metrics.py says what each of them means."""

from collections.abc import Iterator

from headrace.core.stats import Sample, Stats
from headrace.scheduler.kv.node import TIERS
from headrace.scheduler.state.state import State


def snapshot(state: State, integrity_errors: int) -> Stats:
    """Counters and histograms, and gauges as of now. integrity_errors: found by the last check."""
    metrics, gauges = state.metrics, _gauges(state, integrity_errors)
    return Stats(samples=(*metrics.counters.snapshot(), *gauges), histograms=metrics.histograms.snapshot())


def _gauges(state: State, integrity_errors: int) -> Iterator[Sample]:
    for phase, requests in state.queues.requests.items():
        yield Sample("queue_requests", requests, (phase.value,))
    for phase, tokens in state.queues.tokens.items():
        yield Sample("queue_tokens", tokens, (phase.value,))
    yield Sample("unplanned_tokens", state.queues.unplanned)
    yield Sample("unplanned_seconds", state.costs.load_s(state.queues.load))
    squared_token, token = state.costs.per_token
    yield Sample("prefill_cost_seconds", token, ("token",))
    yield Sample("prefill_cost_seconds", squared_token, ("squared_token",))
    yield Sample("cost_model_stale", float(state.costs.stale))
    yield Sample("kv_pages", state.cache.free, ("free",))
    yield Sample("kv_pages", state.cache.cached, ("cached",))
    yield Sample("kv_pages", state.cache.leased, ("leased",))
    if state.cache.tiers is not None:
        for tier in TIERS:
            slots = state.cache.tiers.slots(tier)
            yield Sample("kv_tier_pages", slots.used, (tier, "used"))
            yield Sample("kv_tier_pages", slots.total - slots.used, (tier, "free"))
    yield Sample("held_requests", len(state.held))
    yield Sample("held_pages", state.held.pages)
    ended = [request.incoming for request in state.prefills.fetching() if request.ended]
    yield Sample("quarantined_pages", sum(one.pages for one in ended if one is not None and one.remote_writes))
    yield Sample("plans_in_flight", len(state.plans))
    yield Sample("reservations_waiting", len(state.tickets.early_reservations))
    yield Sample("peers", len(state.peers))
    yield Sample("prefill_servers", sum(server.session is not None for server in state.prefills))
    yield Sample("integrity_errors", integrity_errors)
    yield Sample("metadata_rows_in_use", state.metadata_rows.total - state.metadata_rows.free)
