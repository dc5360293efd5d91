"""Leases on pages that vLLM decode engines may read: notices, heartbeats, expiry, quarantine. Pure.

    OPEN ──notices of all readers──────────────► released
      │ no sign of life for so long, its engine is gone, or the router did not take the answer
      ▼
    QUARANTINED ──notices of all readers───────► released
      └── the generation's agent is destroyed ─► released

vLLM's protocol has no way to take a lease back: a decode engine that was stopped reads when it goes on, and says so
afterwards. So pages whose lease ended unread are not used again until they can be read no more, which is when the
NIXL agent that they were offered by is gone (agent_generation.py).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.core.stats import Counters, Sample, Stats
from headrace.gateway.vllm_nixl.wire import Heartbeat, ReadDone

KEPT_SHARE = 2 / 3  # of the lease, which a heartbeat extends it to, as in vLLM
ENDED_KEPT = 4096  # names of ended leases that are remembered, to tell late notices from foreign ones

ENDS = ("read", "expired", "engine_gone", "withdrawn")
NOTICES = ("done", "heartbeat", "late", "unknown")


@dataclass(slots=True)
class KvLease:
    """Pages that were offered to a decode engine. Times are seconds of the monotonic clock."""

    request: str  # remote_request_id
    load: str  # names the pages towards their owner
    tokens: int
    jobs: int  # times that the engine reads them: prompts of the body × n
    generation: int  # of the agent that they were offered by
    expires: float
    latest: float  # it expires then at the latest, whatever its engine says
    done: int = 0  # notices
    readers: int = 1  # notices for each job
    agents: set[str] = field(default_factory=set)  # NIXL agents that sent a notice or heartbeat

    @property
    def read(self) -> bool:
        """Whether all readers have said that they are done."""
        return self.done >= self.jobs * self.readers


class LeaseTable:
    """All leases. Where methods return names, they are of loads whose pages can be used again.

    lease_s: a lease ends after so long without a sign of its engine. limit_s: and after so long in any case.
    """

    def __init__(self, lease_s: float, limit_s: float) -> None:
        self._lease_s = lease_s
        self._limit_s = limit_s
        self._open: dict[str, KvLease] = {}
        self._quarantined: dict[str, KvLease] = {}
        self._ended: dict[str, None] = {}  # the oldest first
        self._counters = Counters()
        for end in ENDS:
            self._counters.add("leases_ended_total", 0, (end,))
        for kind in NOTICES:
            self._counters.add("notices_total", 0, (kind,))
        for name in ("tokens_offered_total", "tokens_unread_total"):
            self._counters.add(name, 0)

    def __len__(self) -> int:
        """Open leases."""
        return len(self._open)

    def grant(self, request: str, load: str, *, tokens: int, jobs: int, generation: int, now: float) -> None:
        """Open a lease. request: a name that was never used before."""
        self._counters.add("tokens_offered_total", tokens)
        self._open[request] = KvLease(
            request, load, tokens, jobs, generation, expires=now + self._lease_s, latest=now + self._limit_s
        )

    def notice(self, notice: Heartbeat | ReadDone, agent: str, now: float) -> list[str]:
        """Handle a decode engine's notice. agent: the NIXL agent that sent it."""
        if isinstance(notice, Heartbeat):
            for request in notice.requests:
                self._alive(request, agent, now)
            self._counters.add("notices_total", labels=("heartbeat",))
            return []
        lease = self._open.get(notice.request) or self._quarantined.get(notice.request)
        if lease is None:
            known = notice.request in self._ended
            self._counters.add("notices_total", labels=("late" if known else "unknown",))
            return []
        self._counters.add("notices_total", labels=("done",))
        lease.agents.add(agent)
        lease.done += 1
        lease.readers = max(lease.readers, notice.readers)
        lease.expires = max(lease.expires, now + self._lease_s)  # further readers have as long
        if not lease.read:
            return []
        if self._open.pop(notice.request, None) is not None:
            self._counters.add("leases_ended_total", labels=("read",))
        self._quarantined.pop(notice.request, None)
        return [self._end(lease)]

    def withdraw(self, load: str) -> None:
        """End the lease of a load whose offer was not taken, as far as is known: an engine may have it all the same."""
        for lease in [lease for lease in self._open.values() if lease.load == load]:
            self._quarantine(lease, "withdrawn")

    def tick(self, now: float) -> None:
        """Put what has expired into quarantine."""
        for lease in [lease for lease in self._open.values() if min(lease.expires, lease.latest) <= now]:
            self._quarantine(lease, "expired")

    def engine_gone(self, agent: str, others: Collection[str]) -> None:
        """A decode engine has ended: its leases are over. If there is no other engine, so are all.

        agent: its NIXL agent. others: those of the engines that are there.
        """
        for lease in [lease for lease in self._open.values() if agent in lease.agents or not others]:
            if not lease.agents & set(others):
                self._quarantine(lease, "engine_gone")

    def is_drained(self, generation: int) -> bool:
        """Whether no lease of a generation is open."""
        return all(lease.generation != generation for lease in self._open.values())

    def has_quarantined(self, generation: int) -> bool:
        """Whether pages of a generation are in quarantine."""
        return any(lease.generation == generation for lease in self._quarantined.values())

    def generation_ended(self, generation: int) -> list[str]:
        """What a drained generation has offered can be read no more."""
        over = [lease for lease in self._quarantined.values() if lease.generation == generation]
        for lease in over:
            del self._quarantined[lease.request]
        return [self._end(lease) for lease in over]

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        return min((min(lease.expires, lease.latest) for lease in self._open.values()), default=None)

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics. May be called by any thread: the labels are there from the start."""
        gauges = (Sample("leases_open", len(self._open)), Sample("leases_quarantined", len(self._quarantined)))
        return Stats(samples=(*gauges, *self._counters.snapshot()))

    def _alive(self, request: str, agent: str, now: float) -> None:
        lease = self._open.get(request)
        if lease is not None:
            lease.agents.add(agent)
            lease.expires = max(lease.expires, now + KEPT_SHARE * self._lease_s)

    def _quarantine(self, lease: KvLease, reason: str) -> None:
        del self._open[lease.request]
        self._quarantined[lease.request] = lease
        self._counters.add("leases_ended_total", labels=(reason,))
        self._counters.add("tokens_unread_total", lease.tokens)

    def _end(self, lease: KvLease) -> str:
        self._ended[lease.request] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        return lease.load
