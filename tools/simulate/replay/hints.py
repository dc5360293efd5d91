"""KV hints in a replay: what clients would say of the turns of their conversations, and one that lies.

none       no hints
oracle     a prompt that comes again, as the beginning of another one, is retained until then
real       as an agent framework that knows its conversations: every prompt is retained for twice the pauses so far, of
           its own conversation if it has had any, else of all; priority is the number of turns
lying      the tenant LIAR retains all for ever, and the others nothing
predicted  clients name their conversations as session_id and give no hints: the scheduler predicts when they go on

Conversations are found by their prompts (conversations.py). Traces without tenants get two: every fourth conversation
is the liar's.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.core.types.requests.kv_hints import MAX_RETAIN_S, Retain
from headrace.tools.simulate.replay.conversations import conversations
from headrace.tools.simulate.replay.workload import TraceRequest

Hints = Literal["none", "oracle", "real", "lying", "predicted"]
HINTS: tuple[Hints, ...] = ("none", "oracle", "real", "lying", "predicted")
LIAR, OTHERS = "liar", "others"
LIES_EVERY = 4  # conversations
PAUSES = 2.0  # for which a framework retains a turn
UNKNOWN_PAUSE_S = 60.0  # before it has seen one


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A request as a turn of its conversation."""

    tenant: str
    turn: int
    """From 1."""
    retain: Retain | None
    session: str = ""
    """Name of the conversation, where the client says it."""


def turns(requests: Sequence[TraceRequest], hints: Hints, time_scale: float) -> list[Turn]:
    """The turns of a trace, with what their clients ask to retain. time_scale: of the arrival times."""
    seen_turns = conversations(requests)
    returns: dict[int, float] = {}
    for seen, before in seen_turns:
        if before is not None:
            returns.setdefault(before.index, requests[seen.index].arrival_s)
    named = any(request.tenant for request in requests)
    found, pauses, count = [], 0.0, 0
    for request, (seen, before) in zip(requests, seen_turns, strict=True):
        if before is not None:
            pauses += request.arrival_s - requests[before.index].arrival_s
            count += 1
        tenant = request.tenant if named else OTHERS if seen.conversation % LIES_EVERY else LIAR
        retain = None
        if hints == "oracle" and seen.index in returns:
            retain = _retain((returns[seen.index] - request.arrival_s) * time_scale)
        elif hints == "real":
            mean = seen.pauses_s / (seen.turn - 1) if seen.turn > 1 else pauses / count if count else UNKNOWN_PAUSE_S
            retain = _retain(PAUSES * mean * time_scale, seen.turn)
        elif hints == "lying" and tenant == LIAR:
            retain = _retain(MAX_RETAIN_S)
        session = str(seen.conversation) if hints == "predicted" else ""
        found.append(Turn(tenant, seen.turn, retain, session))
    return found


def _retain(seconds: float, priority: int = 0) -> Retain:
    return Retain(seconds=min(max(seconds, 0.001), MAX_RETAIN_S), priority=priority)
