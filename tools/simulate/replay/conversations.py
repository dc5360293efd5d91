"""Conversations of a trace: which request each one continues, and what its answer was.

A turn continues the last request whose whole blocks it begins with. Its prompt then has the answer of that request: the
tokens behind that prompt, as many as were generated.
"""

from collections.abc import Sequence

import msgspec

from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest


class SeenTurn(msgspec.Struct, gc=False):
    """A request that later ones may continue."""

    index: int
    conversation: int
    turn: int
    """From 1."""
    pauses_s: float
    """Sum of the pauses of its conversation before it."""


def conversations(requests: Sequence[TraceRequest]) -> list[tuple[SeenTurn, SeenTurn | None]]:
    """Each request, and the one that it continues; None for a first turn."""
    blocks: dict[tuple[int, int], int] = {}  # the block before, and the text -> number of the prefix
    last: dict[int, SeenTurn] = {}  # by the prefix that a request ends with
    found: list[tuple[SeenTurn, SeenTurn | None]] = []
    for index, request in enumerate(requests):
        prefix, ends, before = 0, [], None
        for segment in request.segments:
            prefix = blocks.setdefault((prefix, segment.text), len(blocks) + 1)
            ends.append(prefix)
            before = last.get(prefix, before)
        if before is None:
            seen = SeenTurn(index, index, 1, 0.0)
        else:
            pause = request.arrival_s - requests[before.index].arrival_s
            seen = SeenTurn(index, before.conversation, before.turn + 1, before.pauses_s + pause)
        found.append((seen, before))
        last[ends[-1]] = seen
        if len(ends) > 2:  # the last block is not whole, and has another number when it is
            last[ends[-2]] = seen
    return found


class AnsweredTurn(msgspec.Struct, frozen=True, gc=False):
    """A request as a turn of its conversation, with its answer."""

    turn: int
    """From 1."""

    segments: tuple[PromptSegment, ...]
    """Of the prompt and the tokens that are generated. Where another turn follows, its prompt begins with these."""


def answered(requests: Sequence[TraceRequest]) -> list[AnsweredTurn]:
    """The turns of a trace. A request without a next turn that has room for its answer gets an answer of its own."""
    seen = conversations(requests)
    following: dict[int, int] = {}
    for after, before in seen:
        if before is not None and _goes_on(requests[before.index], requests[after.index]):
            following.setdefault(before.index, after.index)
    own = 1 + max((segment.text for request in requests for segment in request.segments), default=0)
    found: dict[int, AnsweredTurn] = {}
    for index in reversed(range(len(requests))):
        request, turn = requests[index], seen[index][0].turn
        if index in following:
            segments = _beginning(found[following[index]].segments, request.tokens + generated(request))
        else:
            segments = (*request.segments, PromptSegment(own + index, generated(request)))
        found[index] = AnsweredTurn(turn, segments)
    return [found[index] for index in range(len(requests))]


def generated(request: TraceRequest) -> int:
    """Tokens that a decode server generates for a request: the first one comes with its KV."""
    return max(1, request.output_tokens)


def _beginning(segments: Sequence[PromptSegment], tokens: int) -> tuple[PromptSegment, ...]:
    """The first tokens of these segments."""
    found = []
    for text, count in segments:
        if tokens <= 0:
            break
        found.append(PromptSegment(text, min(count, tokens)))
        tokens -= count
    return tuple(found)


def _goes_on(request: TraceRequest, after: TraceRequest) -> bool:
    """Whether a later prompt has room for the answer to this one, and the same tokens before it. A last block that is
    not whole has another number in the later prompt, which is longer."""
    last = len(request.segments) - 1
    mine, theirs = request.segments[last], after.segments[last]
    same = mine.text == theirs.text or theirs.tokens > mine.tokens
    return same and after.tokens >= request.tokens + generated(request)
