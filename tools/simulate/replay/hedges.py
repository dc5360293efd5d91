"""Hedges of a replay: a second replica gets a prompt whose first token is late, as --hedge of decode servers says.

The first token of either counts, and the other one is cancelled. What a first replica has computed is not taken along.
"""

from collections.abc import Callable, Sequence

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.routing.hedging import Hedging
from headrace.testing.world import World
from headrace.tools.simulate.replay.replica import ReplayReplica
from headrace.tools.simulate.replay.routing import ScoreRouter

SECOND = "+"  # behind the rid of the second one
SPELL_S, EVERY_S = 10.0, 60.0  # how long a slow server is slow, and how often


def slowed(world: World, factor: float) -> Callable[[], float]:
    """How many times as long passes of a server take now that is slow for SPELL_S of every EVERY_S."""
    return lambda: factor if world.now % EVERY_S < SPELL_S else 1.0


class ReplayHedges:
    """Starts and ends second ones."""

    def __init__(self, world: World, router: ScoreRouter, replicas: Sequence[ReplayReplica], factor: float) -> None:
        self._world = world
        self._router = router
        self._replicas = replicas
        self._hedging = Hedging(factor)
        self._running: dict[str, dict[str, int]] = {}  # by rid: replicas of what runs for it without a first token
        self.started = 0

    def sent(self, rid: str, replica: int, prompt: bytes, terms: RequestTerms) -> None:
        """A request was sent to a replica."""
        now = self._world.now
        self._running[rid] = {rid: replica}
        after_s = self._hedging.after_s(self._router.forecast(rid, now))
        if after_s is not None:
            self._world.at(now + after_s, lambda: self._late(rid, prompt, terms))

    def running(self, rid: str, first: int) -> dict[str, int]:
        """What runs for a request, each with its replica. first: where it was sent."""
        return dict(self._running.get(rid) or {rid: first})

    def first_token(self, name: str) -> str | None:
        """A replica has a first token: the request that it is of, whose other one is cancelled. None for one that was
        cancelled."""
        rid = name.rstrip(SECOND)
        running = self._running.get(rid, {})
        if name not in running:
            return None
        for other, replica in self._running.pop(rid).items():
            if other != name:
                self._router.answered(other)
                self._replicas[replica].cancel(other)
        return rid

    def ended(self, name: str, error: ErrorInfo | None) -> str | None:
        """What runs for a request has ended: the request, if that has. None if the other one goes on, or has won."""
        rid = name.rstrip(SECOND)
        running = self._running.get(rid)
        if error is None:
            return rid
        if running is None or name not in running:
            return None
        del running[name]
        return None if running else rid

    def _late(self, rid: str, prompt: bytes, terms: RequestTerms) -> None:
        running = self._running.get(rid)
        if running is None or len(running) != 1 or not self._hedging.take():
            return
        (first,) = running.values()
        name = f"{rid}{SECOND}"
        running[name] = self._router.second(name, prompt, self._world.now, terms.prefix_salt, first)
        self.started += 1
        self._replicas[running[name]].submit(name, prompt, terms)
