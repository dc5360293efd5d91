"""The share of the KV pool that may be taken by requests whose peer has not come.

A tenant with less than an equal share of it gets pages beyond the limit, up to half of the rest of the pool: what the
others hold comes back within the limit of their leases, and is not given out again before.
"""

from collections.abc import Iterable, Iterator

from headrace.core.shares import Shares
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.requests.record import Request


class HeldPages:
    """Requests that are computed before a peer reserves their ticket, and the pages that their prompts take."""

    def __init__(self, cache: KvCache, percent: int) -> None:
        self._cache = cache
        self._percent = percent
        self._requests: dict[int, Request] = {}
        self._pages = Shares()  # by name of the API key

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def pages(self) -> int:
        """Pages of these requests, whether or not they have been leased yet."""
        return self._pages.total

    @property
    def limit(self) -> int:
        """Pages that these requests may take together."""
        return self._cache.total * self._percent // 100

    def fits(self, tokens: int, tenant: str) -> bool:
        """A prompt of this many tokens of the tenant may be added."""
        pages, limit = self._cache.pages_for(tokens), self.limit
        beyond = limit + (self._cache.total - limit) // 2
        return self.pages + pages <= beyond and self._pages.admits(tenant, pages, limit)

    def add(self, request: Request) -> None:
        """Count a request that is going to be computed before its peer reserves."""
        self._requests[request.arrival] = request
        self._pages.add(request.terms.tenant, self._cache.pages_for(request.prompt_tokens))

    def remove(self, request: Request) -> None:
        """A peer has reserved, or the request has ended. Does nothing for a request that is not counted."""
        if self._requests.pop(request.arrival, None) is not None:
            self._pages.add(request.terms.tenant, -self._cache.pages_for(request.prompt_tokens))

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests that should be counted and are not, or the other way round."""
        expected = {request.arrival: request for request in requests if request.awaiting_peer}
        pages = sum(self._cache.pages_for(request.prompt_tokens) for request in expected.values())
        if (expected, pages) != (self._requests, self.pages):
            counted = f"{len(self._requests)} held requests, {self.pages} pages counted"
            yield f"{counted}; {len(expected)}, {pages} found"
