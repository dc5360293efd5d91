"""The score of a replica for one prompt, in seconds, and the replicas that are scored.

score = seconds of work queued there + 8 · seconds of the prompt that its cache does not have + seconds of loading

Uncached work delays everything behind it, and so counts as about 1 / (1 - utilisation) of its own time. With a factor
of 1 hits fall as load grows, and load grows as hits fall.
"""

import random
from collections.abc import Iterable, Sequence

import msgspec

UNCACHED_WEIGHT = 8.0
HOLDERS = 4  # replicas scored because they hold the longest prefixes of the prompt
OTHERS = 4  # replicas scored at random, so that the cost of a choice does not grow with their number


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica, as the router sees it when a prompt arrives."""

    queued_s: float
    """Predicted seconds of the work that waits there."""

    uncached_s: float
    """Predicted seconds of computing what its cache does not have of the prompt."""

    load_s: float = 0.0
    """Predicted seconds of loading what is in its host or disk tier."""


def score(candidate: Candidate) -> float:
    """Seconds, the fewer the better."""
    return candidate.queued_s + UNCACHED_WEIGHT * candidate.uncached_s + candidate.load_s


def best(candidates: Sequence[Candidate]) -> int:
    """The number of the candidate with the lowest score; of equal ones the first. There is at least one."""
    return min(range(len(candidates)), key=lambda number: score(candidates[number]))


def shortlist(holders: Iterable[Sequence[int]], replicas: Sequence[int], rng: random.Random) -> list[int]:
    """The replicas to score, in random order: up to HOLDERS of the holders and OTHERS of the rest.

    holders: groups of replicas with equally long prefixes, the longest ones first; a group that does not fit is
    sampled. replicas: all that can be chosen.
    """
    chosen: list[int] = []
    for group in holders:
        room = HOLDERS - len(chosen)
        chosen += group if len(group) <= room else rng.sample(list(group), room)
        if len(chosen) == HOLDERS:
            break
    if len(replicas) <= HOLDERS + OTHERS:
        rest = [number for number in replicas if number not in chosen]
    else:  # of OTHERS + HOLDERS different ones at least OTHERS are no holders
        sampled = rng.sample(replicas, OTHERS + len(chosen))
        rest = [number for number in sampled if number not in chosen]
    found = chosen + (rest if len(rest) <= OTHERS else rng.sample(rest, OTHERS))
    rng.shuffle(found)
    return found
