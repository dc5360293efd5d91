"""KV hints: what clients say of the use that the KV of a prompt will have, and what of it was granted.

The envelope is that of vLLM, SGLang and Dynamo (kv_hints of a request). They leave open which actions there are; those
of Headrace are in docs/scheduling.md.
"""

from typing import Annotated, Any

import msgspec

MAX_RETAIN_S = 86_400.0
"""The longest time for which pages are retained."""


PREFETCH_S = 60.0
"""For how long what was loaded is retained, where a prefetch does not say."""
MAX_PRIORITY = 1_000_000
OPEN_PRIORITY = MAX_PRIORITY + 1
"""Of what open prompts retain: above that of all hints, for a share of what the tenant may retain."""
MAX_ACTIONS = 16
Name = Annotated[str, msgspec.Meta(max_length=128)]


class KvHintAction(msgspec.Struct, frozen=True):
    """One action of an envelope."""

    action_id: Name
    """The client's name of it; the answer has it."""
    action_type: Name
    """retain, prefetch, demote or release; others are answered as not granted."""
    action_version: Name
    """1 or 1.x."""
    payload: dict[str, Any] = {}
    """seconds (or ttl) and priority, of retain and prefetch."""


class KvHintsEnvelope(msgspec.Struct, frozen=True):
    """kv_hints of a request."""

    protocol_version: Name
    message_id: Name
    actions: Annotated[list[KvHintAction], msgspec.Meta(max_length=MAX_ACTIONS)] = []


class Retain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keep the KV of a prompt in the pool after the request has ended well."""

    seconds: float
    """Beyond the end of the request."""

    priority: int = 0
    """Of what its tenant retains, a higher one displaces lower ones at the tenant's bound."""

    @classmethod
    def of_open_prompt(cls, seconds: float) -> "Retain":
        """What an open prompt retains of its KV until it is committed."""
        return cls(seconds=seconds, priority=OPEN_PRIORITY)


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Bring the KV of a prompt from siblings and from the tiers into the pool, and retain it."""

    seconds: float
    priority: int = 0


class Keep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Retain what the pool has of a prompt's KV, from now on."""

    seconds: float
    priority: int = 0


class Demote(msgspec.Struct, frozen=True, tag=True):
    """Copy the KV of a prompt to a tier, and take it out of the pool."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """The KV of a prompt is not needed any more: it leaves the pool before any other."""


HintAction = Keep | Prefetch | Demote | Release


class GivenHint(msgspec.Struct, frozen=True):
    """An action as it was understood."""

    action_id: str
    action_type: str
    action: HintAction | None = None
    """None for one that cannot be granted."""
    problem: str = ""
    """Why it cannot be granted."""


class HintAnswer(msgspec.Struct, frozen=True):
    """What was granted of an action."""

    action_id: str
    action_type: str
    granted: bool
    tokens: int
    """For whose KV it was granted; 0 for a release that comes with a request, and is certain."""
    seconds: float
    """For how long it is retained; 0 for a prefetch that comes with a request."""
    reason: str
    """Why not; "" if it was granted."""


class HintResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was granted of one action."""

    tokens: int = 0
    """For whose KV it was granted, from the first token of the prompt on; those at its end for Demote and Release."""

    reason: str = ""
    """Why it was not granted, or not for all of the prompt's KV."""


def understood(action: KvHintAction) -> GivenHint:
    """An action of an envelope. Values that make no sense are no error: it is not granted, and the answer says why."""
    given, payload = (action.action_id, action.action_type), action.payload
    if action.action_version.removeprefix("v").partition(".")[0] != "1":
        return GivenHint(*given, problem="this server knows version 1 of actions")
    match action.action_type:
        case "demote":
            return GivenHint(*given, Demote())
        case "release":
            return GivenHint(*given, Release())
        case "retain" | "prefetch":
            seconds, priority = payload.get("seconds", payload.get("ttl")), payload.get("priority", 0)
            if seconds is None and action.action_type == "prefetch":
                seconds = PREFETCH_S
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_RETAIN_S:
                return GivenHint(*given, problem=f"payload.seconds has to be above 0 and at most {MAX_RETAIN_S:g}")
            if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
                return GivenHint(
                    *given, problem=f"payload.priority has to be a number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
                )
            kind = Keep if action.action_type == "retain" else Prefetch
            return GivenHint(*given, kind(seconds=float(seconds), priority=priority))
        case _:
            return GivenHint(*given, problem="the actions are retain, prefetch, demote and release")
