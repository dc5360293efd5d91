"""Classes of prompts by length, and objectives: the time to first token that counts as good."""

from collections.abc import Callable, Mapping

from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.row_costs import row_seconds

SHORT_TOKENS, MID_TOKENS = 4096, 32768  # longest short and mid prompt
CLASSES = ("short", "mid", "long")
CLASS_OBJECTIVES_S = dict(zip(CLASSES, (2.0, 8.0, 30.0), strict=True))

Objective = Callable[[int, Cost], float]
"""Seconds to the first token that a prompt of so many tokens may take, on an engine with this cost."""

OBJECTIVES: Mapping[str, Objective] = {
    "prop": lambda tokens, cost: 1.0 + 5.0 * row_seconds(cost, 0, tokens),
    "class": lambda tokens, _cost: CLASS_OBJECTIVES_S[length_class(tokens)],
    "flat": lambda _tokens, _cost: 30.0,
}


def length_class(tokens: int) -> str:
    """Short, mid or long."""
    return CLASSES[(tokens > SHORT_TOKENS) + (tokens > MID_TOKENS)]
