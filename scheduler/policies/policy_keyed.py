"""Policies that order prompts by a key: shortest remaining prefill first, and earliest objective first.

    key = (priority, whether its tenant is too far ahead, whether it gives way, what the policy says, arrival)

A key changes with the request's own progress and that of its peer, or with the time in a way that only makes it
larger: such a key is renewed when it comes up. That a tenant is ahead is no part of the keys in the heaps, as it would
change those of all its requests at once. Instead, requests of such a tenant that come up go to a heap of its own, and
stay there. Those without the name of a key have a heap together, and one for each cache salt that is ahead of other
salts:

    order = merge(common heap, own heaps of keys and salts), comparing (priority, ahead?, …) of their first entries
"""

import heapq
from collections.abc import Callable, Iterator

from headrace.core.lazy_heap import Key, LazyHeap
from headrace.scheduler.policies.tenants import TenantLevels
from headrace.scheduler.requests.record import Request

Heap = LazyHeap[int, Request]
COMMON = ""  # name of the common heap


KeyOf = Callable[[Request, int, float], Key]
"""What a policy orders requests of one priority by: request, microseconds of prefill that it has left, now."""


def srpt_key(_request: Request, work: int, _now: float) -> Key:
    """Shortest remaining processing time first, of the uncached prefill that is left."""
    return (work,)


def slo_key(request: Request, work: int, now: float) -> Key:
    """Earliest objective first; requests that cannot meet theirs any more come last, as do those without one, the
    shortest first."""
    objective = request.objective
    if objective is None or now + work / 1e6 > objective:
        return (1, work)
    return (0, round(objective * 1e6))


class KeyedPolicy:
    """A policy that orders all requests by a key, those of tenants that are too far ahead last."""

    strict = False

    def __init__(self, key_of: KeyOf, tenants: TenantLevels) -> None:
        self._key_of = key_of
        self._tenants = tenants
        self._requests: dict[int, Request] = {}
        self._work: dict[int, int] = {}
        self._heaps: dict[str, Heap] = {COMMON: LazyHeap()}
        self._place: dict[int, str] = {}  # arrival number -> name of the heap
        self._waiting: Heap = LazyHeap()  # by age
        self._started: Heap = LazyHeap()  # by age

    def push(self, request: Request, work_s: float, now: float) -> None:
        """Add a request that waits."""
        self._requests[request.arrival] = request
        self._waiting.put(request.arrival, (request.arrival,), request)
        self._tenants.join(request)
        own = [group for group in self._tenants.groups(request) if group in self._heaps]
        self._place[request.arrival] = own[-1] if own else COMMON
        self.revise(request, work_s, now)

    def start(self, request: Request) -> None:
        """It counts among the half-done from now on. Raises KeyError when it does not wait."""
        self._waiting.remove(request.arrival)
        self._started.put(request.arrival, (request.arrival,), request)

    def revise(self, request: Request, work_s: float, now: float) -> None:
        """Move a request. Raises KeyError when it is not here."""
        heap = self._heaps[self._place[request.arrival]]
        self._work[request.arrival] = round(work_s * 1e6)
        heap.put(request.arrival, self._key(request, now), request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError when it is not here."""
        arrival = request.arrival
        del self._requests[arrival], self._work[arrival]
        age = self._waiting if arrival in self._waiting else self._started
        age.remove(arrival)
        self._leave_heap(arrival)
        self._tenants.leave(request)

    def charge(self, request: Request, work_s: float) -> None:
        """Count it as served to the tenant."""
        self._tenants.charge(request, work_s)

    def by_age(self, started: bool) -> Iterator[Request]:
        """By arrival number."""
        return (request for _, request in (self._started if started else self._waiting).ordered())

    def order(self, now: float) -> Iterator[Request]:
        """All requests by their keys."""
        sources: dict[str, Iterator[tuple[Key, Request]] | None] = {
            name: heap.ordered() for name, heap in self._heaps.items()
        }
        firsts: list[tuple[Key, str, Request]] = []
        for name in list(sources):
            self._advance(sources, name, firsts, now)
        while firsts:
            _, name, request = heapq.heappop(firsts)
            yield request
            self._advance(sources, name, firsts, now)

    def ranked(self, now: float) -> list[Request]:
        """All requests by their keys as of now, those of tenants that are ahead behind others of their priority."""

        def place(request: Request) -> Key:
            priority, *key = self._key(request, now)
            return (priority, self._tenants.ahead(request)[0], *key)

        return sorted(self._requests.values(), key=place)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._requests

    def _key(self, request: Request, now: float) -> Key:
        key = self._key_of(request, self._work[request.arrival], now)
        return (request.terms.priority, request.gives_way, *key, request.arrival)

    def _advance(
        self,
        sources: dict[str, Iterator[tuple[Key, Request]] | None],
        name: str,
        firsts: list[tuple[Key, str, Request]],
        now: float,
    ) -> None:
        """Add the next request of a heap to firsts. Those with an old key, and those of the common heap whose tenant is
        ahead, go where they belong first. sources: None for heaps that have ended."""
        for old, request in sources[name] or ():
            key = self._key(request, now)
            if key != old:
                self._heaps[name].put(request.arrival, key, request)
                continue
            ahead, own = self._tenants.ahead(request)
            if own and name not in (own, self._tenants.groups(request)[-1]):
                self._to_own_heap(request, key, own)
                if own not in sources:
                    sources[own] = self._heaps[own].ordered()
                    self._advance(sources, own, firsts, now)
                elif sources[own] is None:
                    heapq.heappush(firsts, ((key[0], ahead, *key[1:]), own, request))
                continue
            heapq.heappush(firsts, ((key[0], ahead, *key[1:]), name, request))
            return
        sources[name] = None

    def _to_own_heap(self, request: Request, key: Key, own: str) -> None:
        """The heap that it leaves stays, even if it is empty: it may be the one that is being read."""
        self._heaps[self._place[request.arrival]].remove(request.arrival)
        self._place[request.arrival] = own
        self._heaps.setdefault(own, LazyHeap()).put(request.arrival, key, request)

    def _leave_heap(self, arrival: int) -> None:
        name = self._place.pop(arrival)
        heap = self._heaps[name]
        heap.remove(arrival)
        if not heap and name != COMMON:
            del self._heaps[name]
