"""Whether to fetch a prefix from another server's cache or to compute it. Pure.

    saved = seconds of computing what the other server has and this one has not
    takes = seconds of fetching it, as learnt from fetches before (handoff_cost.py); 0 while none is known
            + seconds of loading what the other server has in tiers, as it predicts them
    ──────────────────────────────────────────────────────────────────────────────────────────────────────
    a sibling     saved - takes is largest, and at least MARGIN of what is saved

A fetch from a sibling may last as long as computing would have taken: at worst the first token comes that much later.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

LONGEST_S = 10.0
"""Longest fetch, and the longest one where nothing is known of what computing takes."""

SHORTEST_S = 0.25
"""A fetch is given so long at least, as connections and threads may be late by as much."""

WORTH_S = 0.02
"""Seconds of computing below which no sibling is asked: the question takes some milliseconds."""

MARGIN = 0.2

Cost = tuple[float, float]
"""Predicted seconds of computing a prompt, per squared token and per token."""


class HeldPrefix(NamedTuple):
    """What a server has: so many tokens, and how long it takes to load those of them that are in tiers."""

    server: str
    tokens: int
    load_s: float = 0.0


class PrefixChoice(NamedTuple):
    """What to fetch."""

    held: HeldPrefix
    deadline_s: float


def compute_s(cost: Cost, start: int, end: int) -> float:
    """Predicted seconds of computing positions [start, end) of a prompt."""
    squared, linear = cost
    return squared * (end * end - start * start) + linear * (end - start)


def worth_asking(cost: Cost | None, cached: int, usable: int) -> bool:
    """Whether siblings are to be asked for a prompt of which so many tokens are cached here, of those that cached pages
    may serve."""
    return usable > cached and (cost is None or compute_s(cost, cached, usable) >= WORTH_S)


def choose_sibling(
    cost: Cost | None, cached: int, found: Iterable[HeldPrefix], takes_s: Callable[[str, int], float]
) -> PrefixChoice | None:
    """What to fetch from which sibling; None to compute. cost: None while computing cannot be predicted. cached: tokens
    here. found: what siblings have, in whole pages of this server; of one with tiers, with them and without. takes_s:
    predicted seconds of fetching so many tokens from a sibling."""
    best: tuple[float, PrefixChoice] | None = None
    for held in found:
        if held.tokens <= cached:
            continue
        saved = LONGEST_S if cost is None else compute_s(cost, cached, held.tokens)
        gain = saved - takes_s(held.server, held.tokens - cached) - held.load_s
        if gain >= MARGIN * saved and (best is None or gain > best[0]):
            deadline_s = min(LONGEST_S, max(SHORTEST_S, saved))
            best = (gain, PrefixChoice(held, deadline_s))
    return None if best is None else best[1]
