"""Hits of the prefix cache on a trace, by eviction order and size of the pool; the tree alone, without an engine.

A host tier of so many times the pool (--host-times) is filled and read at once, as if copies took no time.

Every request of a Mooncake trace (JSONL with input_length and hash_ids of 512-token blocks) is looked up, computed and
released before the next one comes. A page of the pool is a block.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.arguments import make_parser
from benchmarks.report import console, print_table, run
from headrace.core.config.scheduler import Eviction
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import Tier
from headrace.core.types.packed import pack
from headrace.scheduler.kv.eviction import SHORT_TOKENS
from headrace.scheduler.kv.kv_cache import KvCache

BLOCK = 512  # tokens of a block of the trace
POOLS = "1250,2700,5000,10000,20000,50000"


def requests(path: Path) -> list[tuple[bytes, int]]:
    """The packed blocks of each request, and how many of them are full. Raises ConfigError for a file that is no
    trace."""
    found: list[tuple[bytes, int]] = []
    try:
        with path.open() as lines:
            for line in lines:
                entry = json.loads(line)
                found.append((pack(entry["hash_ids"]), int(entry["input_length"]) // BLOCK))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}, line {len(found) + 1}: no request of a trace ({error!r})") from None
    return found


def hit_ratio(trace: Sequence[tuple[bytes, int]], eviction: Eviction, blocks: int, host_blocks: int = 0) -> float:
    """Share of all blocks that are found in the cache. Requests larger than the pool are left out of it."""
    cache = KvCache(blocks, 1, eviction=eviction, short_tokens=SHORT_TOKENS // BLOCK)
    cache.reset(blocks, host_blocks)
    hits = total = 0
    for tokens, full in trace:
        total += len(tokens) // 4
        lease = cache.acquire(tokens, "", load=_all)
        while lease is None and _copy(cache):
            lease = cache.acquire(tokens, "", load=_all)
        _copy(cache)
        if lease is not None:
            hits += lease.matched
            cache.publish(lease, tokens, full)
            cache.release(lease)
    return hits / total


def _all(tiers: Sequence[Tier]) -> int:
    return len(tiers)


def _copy(cache: KvCache) -> int:
    """Perform the copies that the cache has begun; returns how many."""
    begun = cache.copies_begun()
    for copy in begun:
        cache.copied(copy, set())
    return len(begun)


def rows(trace: Sequence[tuple[bytes, int]], pools: Sequence[int], host: int) -> Iterator[tuple[str, ...]]:
    """A row for each size of the pool."""
    for blocks in pools:
        ratios = {}
        for eviction in get_args(Eviction):
            with console.status(f"{eviction}, {blocks:,} blocks"):
                ratios[eviction] = hit_ratio(trace, eviction, blocks, host * blocks)
        against = (ratio / ratios["lru"] for name, ratio in ratios.items() if name != "lru")
        yield (f"{blocks:,}", *(f"{ratio:.1%}" for ratio in ratios.values()), *(f"{ratio:.2f}" for ratio in against))


def main(arguments: Sequence[str]) -> int:
    """Replay the trace once for each eviction order and size."""
    parser = make_parser("eviction", __doc__)
    parser.add_argument("trace", type=Path, help="JSONL file in Mooncake's format")
    parser.add_argument("--pools", default=POOLS, metavar="N,…", help="blocks of 512 tokens in the pool")
    parser.add_argument("--host-times", type=int, default=0, metavar="N", help="size of the host tier, in pools")
    given = parser.parse_args(arguments)
    try:
        pools = [int(blocks) for blocks in given.pools.split(",")]
    except ValueError:
        raise ConfigError(f"--pools {given.pools}: write numbers of blocks, such as {POOLS}") from None
    names = get_args(Eviction)
    print_table(
        "blocks found in the cache",
        ("pool (blocks)", *names, *(f"{name} / lru" for name in names if name != "lru")),
        list(rows(requests(given.trace), pools, given.host_times)),
    )
    return 0


if __name__ == "__main__":
    run(main)
