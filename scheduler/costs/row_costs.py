"""Seconds of forward passes with known coefficients: f(l) = a·l² + b·l for the first l tokens of a prompt, c a pass.

A row of n tokens after a prefix of s tokens takes f(s + n) - f(s), since attention reads all of the prefix.
"""

from collections.abc import Iterable

from headrace.core.messages.orders import PlanRow
from headrace.scheduler.costs.chunking import Cost


def row_seconds(cost: Cost, start: int, count: int) -> float:
    """Seconds of count tokens after a prefix of start tokens, without the pass's own c."""
    a, b, _ = cost
    return (a * (2 * start + count) + b) * count


def pass_seconds(cost: Cost, rows: Iterable[PlanRow]) -> float:
    """Seconds of one forward pass on one stage."""
    return sum((row_seconds(cost, row.start, row.count) for row in rows), cost[2])
