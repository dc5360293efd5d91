"""Which session gives way to a new peer when there are as many as may be. Pure.

    idle        without open tickets for a while: the one for longest, of an owner with more than an equal share first
    not idle    only of an owner with more than an equal share, for one with less: the one with the fewest tickets

An owner is a CURVE key, or without keys the host that the connection comes from, however many sessions it has. A new
peer never takes the place of an owner with no more sessions than its own has.
"""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from headrace.core.types.errors import shown
from headrace.transfer.control.session import PeerSession

NAME_CHARS = 64


class GivesWay(NamedTuple):
    """The session that is ended for a new peer."""

    session: PeerSession
    cause: str
    """"idle" or "share"."""

    reason: str
    """For its peer, and the log."""


def gives_way(sessions: Collection[PeerSession], owner: str, limit: int, now: float, idle_s: float) -> GivesWay | None:
    """The session that gives way to a new one of this owner; None if the new one is refused.

    limit: of sessions. idle_s: seconds without open tickets after which a session is idle.
    """
    counts = Counter(session.owner for session in sessions)
    own, share = counts[owner], limit / len(counts.keys() | {owner})
    idle = [
        session
        for session in sessions
        if not session.tickets
        and (session.owner == owner or counts[session.owner] > own)
        and (now - session.last_active >= idle_s or counts[session.owner] > share > own)
    ]
    if idle:
        victim = min(idle, key=lambda session: (counts[session.owner] <= share, session.last_active))
        return GivesWay(victim, "idle", f"{_name(victim)} had no tickets, and a new peer came while {limit} were here")
    largest = max(counts, key=lambda each: counts[each], default=owner)
    if own + 1 > share or counts[largest] <= max(share, own + 1):
        return None
    victim = min(
        (session for session in sessions if session.owner == largest),
        key=lambda session: (len(session.tickets), -session.last_active),
    )
    other = "key" if victim.sender.key else "host"
    text = f"{_name(victim)} was one of {counts[largest]} of its {other}; one of another came while {limit} were here"
    return GivesWay(victim, "share", text)


def _name(session: PeerSession) -> str:
    return shown(session.hello.name, NAME_CHARS)
