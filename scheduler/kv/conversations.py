"""Conversations: for how long a conversation's next turn may be expected, from the pauses between its turns so far.

turn ──pause── turn ──pause── turn ─► its KV is retained for PAUSES times their mean, at most MAX_S

A first turn says nothing, and most conversations have no second one. Turns that overlap have no pause between them.
"""

import msgspec

from headrace.core.types.requests.kv_hints import MAX_PRIORITY

MAX_CONVERSATIONS = 32_768
PAUSES = 2.0
MAX_S = 600.0
PREDICTED = -MAX_PRIORITY - 1
"""Priority of what is retained by prediction: below that of all hints, which displace it."""


class _Conversation(msgspec.Struct, gc=False):
    """A conversation between two turns."""

    ended: float
    """When the last of its turns ended."""

    pauses_s: float = 0.0
    """Sum of the pauses so far."""

    pauses: int = 0


class Conversations:
    """The conversations whose turns ended last. limit: how many; others are forgotten, O(1) a turn."""

    def __init__(self, limit: int = MAX_CONVERSATIONS) -> None:
        self._limit = limit
        self._conversations: dict[tuple[str, str, str], _Conversation] = {}  # the one whose turn ended last is the last

    def __len__(self) -> int:
        return len(self._conversations)

    def turn(self, tenant: str, salt: str, name: str, began: float, ended: float) -> float:
        """A turn of a conversation has ended. Returns for how many seconds its KV is to be retained; 0 for none. began:
        when it arrived. Equal names of other tenants and cache salts are other conversations."""
        key = tenant, salt, name
        found = self._conversations.pop(key, None)
        if found is None:
            found = _Conversation(ended)
            if len(self._conversations) >= self._limit:
                del self._conversations[next(iter(self._conversations))]
        elif began > found.ended:
            found.pauses_s += began - found.ended
            found.pauses += 1
        found.ended = ended
        self._conversations[key] = found
        return min(PAUSES * found.pauses_s / found.pauses, MAX_S) if found.pauses else 0.0
