"""Sessions: for how long a conversation's next turn may be expected, from the pauses between its turns so far.

turn ──pause── turn ──pause── turn ─► its KV is retained for PAUSES times their mean, at most MAX_S

A first turn says nothing, and most conversations have no second one. Turns that overlap have no pause between them.
"""

import msgspec

from headrace.core.types.requests.kv_hints import MAX_PRIORITY

MAX_SESSIONS = 32_768
PAUSES = 2.0
MAX_S = 600.0
PREDICTED = -MAX_PRIORITY - 1
"""Priority of what is retained by prediction: below that of all hints, which displace it."""


class _Session(msgspec.Struct, gc=False):
    """A conversation between two turns."""

    ended: float
    """When the last of its turns ended."""

    pauses_s: float = 0.0
    """Sum of the pauses so far."""

    pauses: int = 0


class Sessions:
    """The conversations whose turns ended last. limit: how many; others are forgotten, O(1) a turn."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._sessions: dict[tuple[str, str, str], _Session] = {}  # the one whose turn ended last is the last

    def __len__(self) -> int:
        return len(self._sessions)

    def turn(self, tenant: str, salt: str, name: str, began: float, ended: float) -> float:
        """A turn of a session has ended. Returns for how many seconds its KV is to be retained; 0 for none. began: when
        it arrived. Sessions of equal names are apart by tenant and cache salt."""
        key = tenant, salt, name
        session = self._sessions.pop(key, None)
        if session is None:
            session = _Session(ended)
            if len(self._sessions) >= self._limit:
                del self._sessions[next(iter(self._sessions))]
        elif began > session.ended:
            session.pauses_s += began - session.ended
            session.pauses += 1
        session.ended = ended
        self._sessions[key] = session
        return min(PAUSES * session.pauses_s / session.pauses, MAX_S) if session.pauses else 0.0
