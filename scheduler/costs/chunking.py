"""Dynamic chunk sizes: the length of the next chunk of a prompt, so that every chunk takes a stage the same time.

A stage computes l tokens from the start in f(l) = a·l² + b·l + c seconds, and the chunk of x tokens after a prefix of L
in f(L + x) − f(L), since attention reads all of the prefix. Chunks of one length take longer and longer, and a
pipeline runs at the pace of its slowest stage. So chunks shrink as the prefix grows:

    f(L + x) − f(L) = f(chunk) − f(0)          the constant c is in neither difference
"""

from collections.abc import Sequence
from math import sqrt

Cost = tuple[float, float, float]  # a, b, c of one stage: seconds per token², per token, and per forward pass

LEAST_SHARE = 4  # no chunk is shorter than the first one divided by this: short chunks leave matrix units idle
ALIGNMENT = 64  # tokens; tiles of matrix products are that long


def equal_time(cost: Cost, prefix: int, chunk: int) -> float:
    """Tokens after the prefix that take as long as the first chunk; at most chunk."""
    a, b, _ = cost
    time = (a * chunk + b) * chunk
    slope = 2 * a * prefix + b
    if time <= 0 or slope <= 0:
        return float(chunk)  # no cost that could be measured
    return min(float(chunk), 2 * time / (slope + sqrt(slope * slope + 4 * a * time)))


def chunk_length(costs: Sequence[Cost], prefix: int, chunk: int, page_size: int) -> int:
    """Length of a chunk after a prefix of this many tokens, for the stage that needs the shortest.

    Between a quarter of chunk and chunk, in whole pages and tiles; chunk itself where it is no longer than one.
    """
    wanted = min((equal_time(cost, prefix, chunk) for cost in costs), default=float(chunk))
    if wanted >= chunk:
        return chunk
    unit = max(page_size, ALIGNMENT)
    least = min(unit, chunk)
    return max(int(max(wanted, chunk / LEAST_SHARE)) // unit * unit, least)
