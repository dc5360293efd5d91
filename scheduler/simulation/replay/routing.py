"""Choosing the replica of a request, purely: what is known of each replica in, the number of one of them out."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

LEAST_SAVING = 0.1  # share of a prompt's work; less is a prefix that all prompts have, which is no reason to crowd
UNCACHED_WEIGHT = 8.0  # work that a cache elsewhere would have saved delays everything behind it


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica, as the router sees it when a request arrives."""

    open_requests: int
    """Requests without a first token."""

    queued_s: float
    """Predicted engine seconds of those requests, as when they arrived."""

    uncached_s: float
    """Predicted engine seconds of the arriving request there."""


Router = Callable[[Sequence[Candidate]], int]


def least_loaded(candidates: Sequence[Candidate]) -> int:
    """Fewest open requests, then the least work."""
    return _best(candidates, lambda candidate: (candidate.open_requests, candidate.queued_s))


def prefix_affinity(candidates: Sequence[Candidate]) -> int:
    """Longest cached prefix that saves a tenth of the work of the shortest one, then the least work."""
    most = max(candidate.uncached_s for candidate in candidates)
    bound = (1 - LEAST_SAVING) * most

    def key(candidate: Candidate) -> tuple[float, ...]:
        return (candidate.uncached_s if candidate.uncached_s <= bound else most, candidate.queued_s)

    return _best(candidates, key)


def score(candidates: Sequence[Candidate]) -> int:
    """Least sum of the queue's seconds and eight times the request's own."""
    return _best(candidates, lambda candidate: (candidate.queued_s + UNCACHED_WEIGHT * candidate.uncached_s,))


ROUTERS: Mapping[str, Router] = {"score": score, "prefix-affinity": prefix_affinity, "least-loaded": least_loaded}


def _best(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]]) -> int:
    """The candidate with the lowest key; of equal ones the first."""
    return min(range(len(candidates)), key=lambda index: key(candidates[index]))
