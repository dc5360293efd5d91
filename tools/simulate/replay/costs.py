"""Costs of several stages, and the work that a trace asks of an engine, which is what its load is measured by."""

from collections.abc import Sequence

import msgspec

from headrace.core.types.kv.geometry import ceil_div
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import row_seconds
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.tools.simulate.replay.workload import TraceRequest, prompt


def split_evenly(cost: Cost, stages: int) -> tuple[Cost, ...]:
    """The costs of each of several stages with as many layers."""
    a, b, c = cost
    return ((a / stages, b / stages, c / stages),) * stages


def slowest(costs: Sequence[Cost], tokens: int) -> Cost:
    """The stage that takes longest for prompts of this length: the pipeline runs at its pace."""
    return max(costs, key=lambda cost: row_seconds(cost, 0, tokens) + cost[2])


class OfferedWork(msgspec.Struct, frozen=True):
    """What a trace asks of one engine."""

    seconds: float
    """Engine seconds of all that the prefix cache does not have."""

    cached_tokens: int
    """Tokens found in the cache."""


def offered_work(
    requests: Sequence[TraceRequest],
    costs: Sequence[Cost],
    *,
    pages: int,
    page_size: int,
    chunk_tokens: int,
    prefix_cache: bool = True,
) -> OfferedWork:
    """Predict the work of a trace: one request after the other, with LRU caching in a pool of so many pages.

    Forward passes are taken to be full: each token has its share of c. Requests larger than the pool ask nothing.
    """
    cost = slowest(costs, chunk_tokens)
    cache = KvCache(pages, page_size, prefix_cache)
    seconds, found = 0.0, 0
    for request in requests:
        if ceil_div(request.tokens, page_size) > pages:
            continue
        tokens = prompt(request)
        lease = cache.acquire(tokens, "")
        assert lease is not None, "the pool is unused and large enough"
        cache.publish(lease, tokens, request.tokens)
        cache.release(lease)
        cached = lease.matched * page_size
        found += cached
        count = request.tokens - cached
        seconds += row_seconds(cost, cached, count) + cost[2] * count / chunk_tokens
    return OfferedWork(seconds, found)
