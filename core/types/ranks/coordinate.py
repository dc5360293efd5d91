"""Batch coordination: what the data-parallel replicas of one forward pass agree on. Pure; nothing else decides it.

    replica 0   rows ─► vote ─┐                  ┌─► Forward: its rows, and the Agreement
    replica 1   rows ─► vote ─┼─► coordinate() ──┼─► Forward
    replica 2   ()   ─► vote ─┘                  └─► Forward without rows: its experts work for the others

One planner votes for all of its replicas. Servers with a planner each send their votes through one all-reduce and call
the same function on the result.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from headrace.core.types.errors import ConfigError

CutResult = Literal["cut", "idle", "threshold", "short"]
"""idle: a replica has no tokens; threshold: one has fewer than its threshold; short: one has so few that its second
half would be empty."""


class Rules(msgspec.Struct, frozen=True):
    """What votes and agreements follow from; the same on all ranks. Raises ConfigError for a threshold below 2."""

    multiple: int = 1
    """Tensor-parallel degree: what the count of a replica is rounded up to."""

    pad: Literal["none", "max"] = "none"
    """max: the exchange pads all replicas to the largest count in every pass; none: only in a pass that is cut, or has
    a mode above 0."""

    cut: bool = False
    """Dual-batch overlap is on: passes may be cut in halves."""

    cut_prefill: int = 512
    """Tokens of a replica from which it wishes to cut a pass."""

    cut_decode: int = 32
    """The same where each of its rows has one token."""

    def __post_init__(self) -> None:
        for name, threshold in (("prefill", self.cut_prefill), ("decode", self.cut_decode)):
            if threshold < 2:
                raise ConfigError(f"--overlap-{name}-tokens is {threshold}; it must be at least 2, one for each half")


class Vote(NamedTuple):
    """One replica's part of one pass."""

    tokens: int
    """Tokens of its rows; 0: it is idle."""

    padded: int
    """The same, rounded up by the replica's own rules."""

    wishes: bool
    """It wishes the pass to be cut."""

    mode: int = 0
    """How it can run: 0 eager, higher ones with prepared graphs. The least counts."""


class Agreement(msgspec.Struct, frozen=True):
    """What all replicas do alike in one pass."""

    tokens: tuple[int, ...]
    """Tokens of every replica; idle ones have 0."""

    padded: int = 0
    """Tokens that the exchange pads every replica to; 0: nothing is padded."""

    cut: int = 0
    """Tokens of the first half of each replica; 0: the pass is not cut."""

    mode: int = 0

    @property
    def idle(self) -> bool:
        """No replica has a token: no pass is made."""
        return not any(self.tokens)


class RowPart(msgspec.Struct, frozen=True):
    """A run of one row's tokens in a half."""

    row: int
    """Index of the row."""

    first: int
    """First of its tokens."""

    count: int
    """Number of them."""


def vote(counts: Sequence[int], rules: Rules, *, allow_cut: bool = True) -> Vote:
    """The vote of a replica whose rows have so many tokens each.

    allow_cut: False during warm-up and measurement.
    """
    tokens = sum(counts)
    if not tokens:
        return Vote(0, 0, False)
    threshold = rules.cut_decode if all(count == 1 for count in counts) else rules.cut_prefill
    padded = tokens + -tokens % rules.multiple
    return Vote(tokens, padded, rules.cut and allow_cut and tokens >= threshold)


def coordinate(votes: Sequence[Vote], rules: Rules) -> Agreement | None:
    """The agreement of all replicas, votes in their order; None for a single replica, which has nothing to agree on.

    A pass is cut when all replicas wish it and each has tokens in its second half, so that an idle or a short one
    prevents the cut. Raises ValueError when there is no vote, or padded is less than tokens in one.
    """
    if len(votes) == 1:
        return None
    if not votes:
        raise ValueError("there is no vote")
    for replica, each in enumerate(votes):
        if each.padded < each.tokens:
            raise ValueError(f"replica {replica} has {each.tokens} tokens and pads them to {each.padded}")
    longest = max(each.padded for each in votes)
    half = longest // 2
    agreed = rules.cut and all(each.wishes for each in votes) and half < min(each.tokens for each in votes)
    cut = half if agreed else 0
    mode = min((each.mode for each in votes if each.tokens), default=0)
    padded = longest if rules.pad == "max" or cut or mode > 0 else 0
    return Agreement(tuple(each.tokens for each in votes), padded, cut, mode)


def cut_result(votes: Sequence[Vote], agreement: Agreement) -> CutResult:
    """Whether a pass is cut, or what prevented it, for a counter. votes: those of the agreement."""
    if agreement.cut:
        return "cut"
    if not all(agreement.tokens):
        return "idle"
    return "short" if all(each.wishes for each in votes) else "threshold"


def halves(counts: Sequence[int], cut: int) -> tuple[list[RowPart], list[RowPart]]:
    """Tokens [0, cut) of a replica's rows, and the rest. A row across the cut is in both.

    counts: tokens of each row. Raises ValueError when a half would be empty.
    """
    if not 0 < cut < sum(counts):
        raise ValueError(f"{sum(counts)} tokens cannot be cut at {cut}")
    first: list[RowPart] = []
    second: list[RowPart] = []
    left = cut
    for row, count in enumerate(counts):
        here = min(left, count)
        left -= here
        if here:
            first.append(RowPart(row, 0, here))
        if count > here:
            second.append(RowPart(row, here, count - here))
    return first, second
