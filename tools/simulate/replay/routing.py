"""Choosing the replica of a request, as a router in front of the replicas does.

score             the decode side's own router (headrace.server.routing): KV events, loads up to a second old
prefix-affinity   knows every cache: the longest prefix, then the least work
least-loaded      knows every queue: the fewest requests, then the least work
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.core.messages.kv_events import KvEventMessage
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.server.routing.replica_load import LoadReport, Sent
from headrace.server.routing.replica_router import ReplicaRouter
from headrace.server.routing.score import Candidate

LEAST_SAVING = 0.1  # share of a prompt's work; less is a prefix that all prompts have, which is no reason to crowd
REPORTED_S = 1.0  # between two reports of a replica


class ReplicaView(Protocol):
    """What routers can know of a replica."""

    @property
    def open_requests(self) -> int:
        """Requests without a first token."""

    def candidate(self, prompt: bytes, salt: str) -> Candidate:
        """Its queue, and what it would compute of this prompt, as they are now."""

    def load(self) -> LoadReport:
        """What it reports of its load."""


class ReplayRouter(Protocol):
    """Chooses replicas, which are numbers from 0."""

    def choose(self, rid: str, prompt: bytes, now: float, salt: str = "", prefer: int | None = None) -> int:
        """The replica that a request goes to: this one, if one is preferred."""

    def answered(self, rid: str) -> None:
        """A request has its first token or has ended."""

    def observe(self, replica: int, event: KvEventMessage) -> None:
        """The prefix cache of a replica has changed."""


RouterFactory = Callable[[Sequence[ReplicaView], int], ReplayRouter]
"""Makes the router of these replicas, whose pages have so many tokens."""


class ScoreRouter:
    """The router of decode servers."""

    def __init__(self, replicas: Sequence[ReplicaView], page_size: int) -> None:
        self._replicas = replicas
        self._router = ReplicaRouter(len(replicas), random.Random(0))
        self._numbers = range(len(replicas))
        for number in self._numbers:
            self._router.paged(number, page_size)
        self._reported_at = -REPORTED_S
        self._sent: dict[str, Sent] = {}

    def choose(self, rid: str, prompt: bytes, now: float, salt: str = "", prefer: int | None = None) -> int:
        """The replica with the least score."""
        if now - self._reported_at >= REPORTED_S:
            self._reported_at = now
            for number, replica in enumerate(self._replicas):
                self._router.reported(number, replica.load(), now, now)
        numbers = self._numbers if prefer is None else (prefer,)
        sent = self._sent[rid] = self._router.choose(prompt, salt, numbers, now)
        self._router.posted(sent, now)
        return sent.replica

    def second(self, rid: str, prompt: bytes, now: float, salt: str, first: int) -> int:
        """Another replica for a prompt whose first one is late."""
        sent = self._sent[rid] = self._router.choose(prompt, salt, [one for one in self._numbers if one != first], now)
        self._router.posted(sent, now)
        return sent.replica

    def forecast(self, rid: str, now: float) -> RemoteForecast | None:
        """What a request that was sent is expected to take."""
        return self._router.forecast(self._sent[rid], now)

    def answered(self, rid: str) -> None:
        """It no longer counts as sent."""
        if (sent := self._sent.pop(rid, None)) is not None:
            self._router.done(sent)

    def observe(self, replica: int, event: KvEventMessage) -> None:
        """Pages come and go."""
        self._router.apply(replica, (event,))


class _Omniscient:
    """A router that sees every replica as it is: it needs to be told nothing."""

    def __init__(self, replicas: Sequence[ReplicaView], page_size: int) -> None:
        self._replicas = replicas

    def answered(self, rid: str) -> None:
        """Nothing to do."""

    def observe(self, replica: int, event: KvEventMessage) -> None:
        """Nothing to do."""


class LeastLoaded(_Omniscient):
    """Fewest open requests, then the least work."""

    def choose(self, rid: str, prompt: bytes, now: float, salt: str = "", prefer: int | None = None) -> int:
        """Of equal ones the first."""
        if prefer is not None:
            return prefer
        return _first([(replica.open_requests, replica.candidate(prompt, salt).queued_s) for replica in self._replicas])


class PrefixAffinity(_Omniscient):
    """Longest cached prefix that saves a tenth of the work of the shortest one, then the least work."""

    def choose(self, rid: str, prompt: bytes, now: float, salt: str = "", prefer: int | None = None) -> int:
        """Of equal ones the first."""
        if prefer is not None:
            return prefer
        candidates = [replica.candidate(prompt, salt) for replica in self._replicas]
        most = max(candidate.uncached_s for candidate in candidates)
        bound = (1 - LEAST_SAVING) * most
        return _first(
            [
                (candidate.uncached_s if candidate.uncached_s <= bound else most, candidate.queued_s)
                for candidate in candidates
            ]
        )


ROUTERS: Mapping[str, RouterFactory] = {
    "score": ScoreRouter,
    "prefix-affinity": PrefixAffinity,
    "least-loaded": LeastLoaded,
}


def _first(keys: Sequence[tuple[float, ...]]) -> int:
    """The number of the lowest key; of equal ones the first."""
    return min(range(len(keys)), key=lambda number: keys[number])
