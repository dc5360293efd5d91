"""Computations in steps: generators that pause where a collective operation is under way.

Dual-batch overlap runs the two halves of a forward pass in turns, so that what one has sent travels while the other
computes:

    half 0   attend l ┊ dispatch ▸┊          ┊ experts l ┊ combine ▸┊           ┊ attend l+1 …
    half 1            ┊ attend l  ┊ dispatch ▸┊          ┊ experts l┊ combine ▸ ┊ …
"""

from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields where it has begun a collective operation whose result it needs next."""

_ENDED = object()


def finish(steps: Steps[T]) -> T:
    """The result of a computation that nothing takes turns with. Raises what the computation raises."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


def take_turns(halves: Iterable[Steps[None]]) -> None:
    """Run computations to their ends, each up to its next pause in turn, the first one first.

    Ranks that pause equally often begin the same collective operations in the same order. Raises what a computation
    raises.
    """
    going = list(halves)
    while going:
        going = [half for half in going if next(half, _ENDED) is None]
