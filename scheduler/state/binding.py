"""Binding of requests to data-parallel replicas: each goes to the one whose load with it is least.

    load with it = what is bound there and not planned + the prompt less what that replica's prefix cache has of it

So a prompt follows its prefix until the replica that has it is busier by more than the prefix saves. Longest prefix
first, without the load, would send prompts that share a system prompt to one replica alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.types.packed import packed_length
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.state.replica import Replica


class Binding(NamedTuple):
    """Where a request goes."""

    replica: int
    cached: int | None
    """Positions that the replica's prefix cache has of the prompt; None: they were not looked up."""


def bind(
    replicas: Sequence[Replica],
    tokens: bytes | bytearray,
    salt: str,
    *,
    pinned: int | None = None,
    cacheable: int | None = None,
    to_fetch: bool = False,
) -> Binding:
    """The replica with the least load; of equal ones that with fewer running requests, then the lower number.

    Loads are seconds once every replica's cost model predicts them, tokens before. Those of requests whose KV is
    fetched are the positions that the pool keeps: they are not computed.

    tokens: packed. pinned: the replica that the client asks for. cacheable: positions that cached pages may
    serve; None: all.
    """
    if len(replicas) == 1 or pinned is not None:
        return Binding(pinned or 0, None)
    length = packed_length(tokens)
    seconds = all(replica.costs.trusted for replica in replicas)
    cached = [replica.cache.cached_positions(tokens, salt, cacheable) for replica in replicas]

    def cost(replica: Replica) -> tuple[float, int, int]:
        found = cached[replica.index]
        kept = replica.kept_with(length - found)
        load = kept if to_fetch else replica.load_with(Load.between(found, length), seconds)
        return load, replica.running, replica.index

    best = min(replicas, key=cost).index
    return Binding(best, cached[best])
