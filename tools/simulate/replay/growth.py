"""How the prompts of next turns come in: a model, as traces have whole prompts and their arrivals only.

    turn 1 arrives ├──── answer, thought ────┤ turn 2 is opened ├─ tokens ─┼─ tokens ─┼─ … ─┤ committed: it arrives
                   ├────────────────────────────────── pause ──────────────────────────────┤

The first share of the pause between two turns, evenly drawn with the number of the request as the seed, is the answer
and what its client does before tools run. Then the turn is opened with what it has in common with the turn before, and
the answer to that where it has room for it. What tools and people say comes in equal parts and intervals; the last part
comes with the commit, at the arrival time of the trace. First turns come whole.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from headrace.tools.simulate.replay.conversations import conversations, generated
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest

PARTS = 8


class Growth(NamedTuple):
    """A prompt at a time before it is complete."""

    at_s: float
    """Seconds since the trace began."""

    tokens: int
    """Leading ones of the prompt that its client has."""


def growths(requests: Sequence[TraceRequest], prompts: Sequence[Sequence[PromptSegment]]) -> dict[int, list[Growth]]:
    """How each next turn grows, by the number of its request. prompts: what the requests begin with, their tokens or
    more."""
    found: dict[int, list[Growth]] = {}
    for after, before in conversations(requests):
        request = requests[after.index]
        if before is None:
            continue
        began, known = requests[before.index].arrival_s, _known(requests, prompts, before.index, after.index)
        opened_s = began + random.Random(after.index).random() * (request.arrival_s - began)
        if opened_s < request.arrival_s:
            found[after.index] = [
                Growth(
                    opened_s + part * (request.arrival_s - opened_s) / PARTS,
                    known + (request.tokens - known) * part // PARTS,
                )
                for part in range(PARTS)
            ]
    return found


def _known(
    requests: Sequence[TraceRequest], prompts: Sequence[Sequence[PromptSegment]], before: int, after: int
) -> int:
    """Tokens of a turn that its client has when it is opened."""
    answered = requests[before].tokens + generated(requests[before])
    if answered <= requests[after].tokens:
        return answered
    common = 0
    for one, other in zip(prompts[before], prompts[after], strict=False):
        common += min(one.tokens, other.tokens) if one.text == other.text else 0
        if one != other:
            break
    return min(common, requests[after].tokens)
