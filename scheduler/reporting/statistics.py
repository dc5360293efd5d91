"""A snapshot of the scheduler's metrics; scheduler/telemetry/metrics.py says what each of them means."""

from collections.abc import Iterator

from headrace.core.stats import Sample, Stats
from headrace.scheduler.kv.node import TIERS
from headrace.scheduler.state.state import State


def snapshot(state: State, integrity_errors: int) -> Stats:
    """Counters and histograms, and gauges as of now. integrity_errors: found by the last check."""
    metrics, gauges = state.metrics, _gauges(state, integrity_errors)
    return Stats(samples=(*metrics.counters.snapshot(), *gauges), histograms=metrics.histograms.snapshot())


def _gauges(state: State, integrity_errors: int) -> Iterator[Sample]:
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
    yield Sample("cost_model_stale", float(any(replica.costs.stale for replica in replicas)))
    yield Sample("kv_pages", sum(replica.cache.free for replica in replicas), ("free",))
    yield Sample("kv_pages", sum(replica.cache.cached for replica in replicas), ("cached",))
    yield Sample("kv_pages", sum(replica.cache.leased for replica in replicas), ("leased",))
    if first.cache.tiers is not None:
        for tier in TIERS:
            slots = [replica.cache.tiers.slots(tier) for replica in replicas if replica.cache.tiers is not None]
            used = sum(one.used for one in slots)
            yield Sample("kv_tier_pages", used, (tier, "used"))
            yield Sample("kv_tier_pages", sum(one.total for one in slots) - used, (tier, "free"))
    yield Sample("held_requests", sum(len(replica.held) for replica in replicas))
    yield Sample("held_pages", sum(replica.held.pages for replica in replicas))
    yield Sample("quarantined_pages", state.prefills.quarantined_pages)
    yield Sample("plans_in_flight", state.plans_in_flight)
    yield Sample("reservations_waiting", len(state.tickets.early_reservations))
    yield Sample("peers", len(state.peers))
    yield Sample("prefill_servers", sum(len(server.hellos) == len(replicas) for server in state.prefills))
    yield Sample("integrity_errors", integrity_errors)
    yield Sample("metadata_rows_in_use", state.metadata_rows.total - state.metadata_rows.free)
