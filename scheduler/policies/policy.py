"""Scheduling policies: the order in which prompts are computed. Whether one fits is decided by the planner."""

from collections.abc import Iterator
from typing import Protocol

from headrace.core.config import SchedulerConfig
from headrace.core.lazy_heap import LazyHeap
from headrace.core.types.errors import ConfigError
from headrace.scheduler.policies.policy_keyed import KeyedPolicy, slo_key, srpt_key
from headrace.scheduler.policies.tenants import TenantLevels
from headrace.scheduler.requests.record import Request


class Policy(Protocol):
    """The prompts that are to be computed: those that wait, and those that are half done, which have their pages.

    A request is in it at most once. Preemption is not to be picked: a half-done prompt keeps its pages.
    """

    strict: bool
    """Prompts are started in order alone: one that does not fit is waited for. Half-done ones come first."""

    def push(self, request: Request, work_s: float, now: float) -> None:
        """Add a request that waits. One that comes back after preemption has its old arrival number. work_s: predicted
        seconds of uncached prefill that it has left."""
        ...

    def start(self, request: Request) -> None:
        """A request that waited has got its pages. Raises KeyError when it does not wait."""
        ...

    def revise(self, request: Request, work_s: float, now: float) -> None:
        """The work that a request has left has changed. Raises KeyError for a request that is not here."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out: it is planned to its end, or has ended. Raises KeyError when it is not here."""
        ...

    def charge(self, request: Request, work_s: float) -> None:
        """Work of a request was planned."""
        ...

    def by_age(self, started: bool) -> Iterator[Request]:
        """The requests that wait, or (started) those that are half done, first arrival first, lazily."""
        ...

    def order(self, now: float) -> Iterator[Request]:
        """All requests, best first, lazily. One that is revised meanwhile comes up again at its new place."""
        ...

    def ranked(self, now: float) -> list[Request]:
        """All requests, best first, for reports: unlike order() it moves nothing, and takes O(n log n)."""
        ...

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...


class Fcfs:
    """First come, first served: half-done prompts in the order in which they were started, then by arrival. Those that
    wait and whose peer has not come are behind the others."""

    strict = True

    def __init__(self) -> None:
        self._waiting: LazyHeap[int, Request] = LazyHeap()
        self._requests: dict[int, Request] = {}
        self._started: dict[int, Request] = {}

    def push(self, request: Request, work_s: float, now: float) -> None:
        """Add a request at the place of its arrival number."""
        self._requests[request.arrival] = request
        self._place(request)

    def start(self, request: Request) -> None:
        """Put it behind those that were started before. Raises KeyError when it does not wait."""
        self._waiting.remove(request.arrival)
        self._started[request.arrival] = request

    def revise(self, request: Request, work_s: float, now: float) -> None:
        """Nothing depends on the work, but a request may give way to others no more."""
        if request.arrival in self._waiting:
            self._place(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError when it is not here."""
        del self._requests[request.arrival]
        if self._started.pop(request.arrival, None) is None:
            self._waiting.remove(request.arrival)

    def charge(self, request: Request, work_s: float) -> None:
        """Nothing depends on what was served."""

    def by_age(self, started: bool) -> Iterator[Request]:
        """By arrival number; of those that wait, prompts whose peer has not come last."""
        if started:
            return iter([self._started[arrival] for arrival in sorted(self._started)])
        return (request for _, request in self._waiting.ordered())

    def order(self, now: float) -> Iterator[Request]:
        """Those that were started, then those that wait."""
        yield from list(self._started.values())
        yield from self.by_age(started=False)

    def ranked(self, now: float) -> list[Request]:
        """Those that were started, then those that wait."""
        waiting = [request for arrival, request in self._requests.items() if arrival not in self._started]
        waiting.sort(key=lambda request: (request.gives_way, request.arrival))
        return [*self._started.values(), *waiting]

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._requests

    def _place(self, request: Request) -> None:
        self._waiting.put(request.arrival, (request.gives_way, request.arrival), request)


def make_policy(config: SchedulerConfig) -> Policy:
    """The configured policy. Raises ConfigError for a name there is no policy for."""
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "srpt":
            return KeyedPolicy(srpt_key, TenantLevels(config.tenant_lag_s))
        case "slo":
            return KeyedPolicy(slo_key, TenantLevels(config.tenant_lag_s))
    raise ConfigError(f"unknown policy {config.policy!r}; write one of: fcfs, slo, srpt")
