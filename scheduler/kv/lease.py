"""The KV pool of an engine: leases on its pages, and the prefix cache.

A lease is the right of one request to KV pages. It has one owner and one end.

pool   = free | tree (cached) | private
leased = private pages of leases + pages of the tree that some lease has locked

    lease.pages:   p0   p1   p2   p3   p4        the request's page table, position // page_size
    lease.path:    n0   n1   n2                  locked nodes of the tree for its first pages
                   n0.page == p0: the tree owns p0;  n1.page != p1: an equal page was there first, p1 is private
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.config.scheduler import Eviction
from headrace.core.types.geometry import ceil_div
from headrace.core.types.packed import ITEM_BYTES
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.eviction import SHORT_TOKENS, make_ranking
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.kv.prefix_tree import Node, PrefixTree, next_turn, pages_of

GHOSTS_PER_PAGE = 4  # evicted pages that are remembered, for each page of the pool; a few hundred bytes each
TREE = -1  # owner of the pages in the tree; leases own theirs by positive numbers


@dataclass(slots=True, eq=False)
class Lease:
    """The right of one request to KV pages; ended by KvCache.release()."""

    owner: int
    """Owner of its private pages in the allocator."""

    salt: str
    pages: "array[int]"
    """The page table: the page of position p is pages[p // page_size]."""

    path: list[Node]
    """Locked nodes of the prefix tree for its first pages."""

    matched: int
    """Pages that were found in the tree when the lease began."""

    turn: int = 0
    """The request's turn of its conversation, from 0."""

    short: bool = False
    """It is the first turn, and of few tokens."""

    ended: bool = False
    nonfinite: bool = False
    """Results computed from its pages were NaN or infinite: release() takes them out of the tree."""


class KvCache:
    """The KV pool of one engine: the page allocator, the prefix tree, and the leases on both."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        prefix_cache: bool = True,
        events: CacheEventLog | None = None,
        eviction: Eviction = "lru",
        short_tokens: int = SHORT_TOKENS,
    ) -> None:
        """events: is told of every page that the tree gains or loses. eviction: which cached pages leave first, see
        eviction.py. short_tokens: a first prompt of at most so many tokens is short."""
        self._events = events
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._allocator = PageAllocator(pages)
        self._eviction = eviction
        self._short_tokens = short_tokens
        self._tree = self._new_tree(pages)
        self._leases: dict[int, Lease] = {}
        self._owners = 0
        self.version = 0
        """Rises whenever a lease that was refused might now be granted."""

    @property
    def page_size(self) -> int:
        """Token positions in one page."""
        return self._page_size

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self._allocator.total

    @property
    def free(self) -> int:
        """Pages that are neither leased nor in the tree."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Pages in the tree that no lease uses."""
        return self._tree.unlocked

    @property
    def leased(self) -> int:
        """Pages that some lease uses."""
        return self.total - self.free - self.cached

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def reset(self, pages: int) -> None:
        """Start over with an empty pool of so many pages: the one before is gone with its engine. Raises ValueError
        while a lease has not ended."""
        if self._leases:
            raise ValueError(f"{len(self._leases)} leases have not ended")
        self._allocator = PageAllocator(pages)
        self._tree = self._new_tree(pages)
        self.version += 1
        if self._events is not None:
            self._events.cleared()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return ceil_div(tokens, self._page_size)

    def acquire(self, tokens: bytes | bytearray, salt: str, extra: int = 0, match: bool = True) -> Lease | None:
        """Lease pages for packed tokens and extra positions behind them; None when they do not fit now.

        Pages found in the tree are used, but never for the last token: it has to be computed to get logits.
        """
        length = len(tokens) // ITEM_BYTES
        known: list[Node] = []
        if match and self._prefix_cache:
            known = self._tree.find(self._keys(tokens, 0, (length - 1) // self._page_size), salt)
        path, turn = pages_of(known), next_turn(known)
        self._tree.lock(path)
        self._owners += 1
        pages = self._take(self.pages_for(length + extra) - len(path), self._owners)
        if pages is None:
            self._tree.unlock_unused(path)
            return None
        table = array("i", [node.page for node in path])
        table.extend(pages)
        short = turn == 0 and length <= self._short_tokens
        lease = Lease(self._owners, salt, table, path, len(path), turn, short)
        self._leases[lease.owner] = lease
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Add pages until the lease holds this many positions; False (and nothing added) when none can be had."""
        pages = self._take(self.pages_for(tokens) - len(lease.pages), lease.owner)
        if pages is None:
            return False
        lease.pages.extend(pages)
        return True

    def publish(self, lease: Lease, tokens: bytes | bytearray, computed: int) -> None:
        """Insert the lease's full pages among the first computed positions into the prefix tree.

        Where the tree already has an equal page, the lease keeps its own, and later pages go below that one.
        """
        if not self._prefix_cache:
            return
        for index, key in enumerate(self._keys(tokens, len(lease.path), computed // self._page_size), len(lease.path)):
            parent = lease.path[-1] if lease.path else None
            node = self._tree.child(parent, lease.salt, key)
            if node is None:
                page = lease.pages[index]
                self._allocator.transfer(page, lease.owner, TREE)
                node = self._tree.insert(parent, lease.salt, key, page)
                self.version += 1
            self._tree.lock([node])
            lease.path.append(node)

    def release(self, lease: Lease) -> None:
        """End a lease: unlock its path, free its private pages. Raises ValueError when it has already ended.

        The path of a nonfinite lease leaves the tree, except pages that other requests use or that have children: the
        results of those requests show whether the pages are good.
        """
        if lease.ended:
            raise ValueError("the lease has already ended")
        lease.ended = True
        del self._leases[lease.owner]
        self._allocator.release(list(self._private(lease)), lease.owner)
        self._tree.unlock(lease.path, lease.turn, lease.short)
        if lease.nonfinite:
            self._allocator.release(self._tree.drop(lease.path), TREE)
        self.version += 1

    def check(self) -> list[str]:
        """Discrepancies; none when free + cached + leased pages are the pool and the locks match the leases."""
        problems: list[str] = []
        locks: dict[int, int] = {}
        private = 0
        for lease in self._leases.values():
            private += sum(1 for _ in self._private(lease))
            for node in lease.path:
                locks[node.number] = locks.get(node.number, 0) + 1
            foreign = [page for page in self._private(lease) if self._allocator.owner(page) != lease.owner]
            if foreign:
                problems.append(f"lease {lease.owner} holds pages of others: {foreign}")
        nodes = unlocked = 0
        for node in self._tree.walk():
            nodes += 1
            unlocked += node.locks == 0
            if node.locks != locks.get(node.number, 0):
                problems.append(f"page {node.page} has {node.locks} locks, leases count {locks.get(node.number, 0)}")
            if self._allocator.owner(node.page) != TREE:
                problems.append(f"page {node.page} is in the tree but owned by {self._allocator.owner(node.page)}")
        if nodes != self._tree.pages or unlocked != self._tree.unlocked:
            problems.append(f"the tree counts {self._tree.pages} pages, {self._tree.unlocked} unlocked; it has {nodes}")
        if self.free + nodes + private != self.total:
            problems.append(f"{self.free} free + {nodes} in the tree + {private} private pages != {self.total}")
        return problems

    def _new_tree(self, pages: int) -> PrefixTree:
        ghosts = 0 if self._eviction == "lru" else GHOSTS_PER_PAGE * pages
        return PrefixTree(self._events, make_ranking(self._eviction), ghosts)

    def _take(self, count: int, owner: int) -> list[int] | None:
        """Allocate count pages, evicting where needed; None when there are not that many."""
        if count <= 0:
            return []
        if self.free + self.cached < count:
            return None
        if self.free < count:
            self._allocator.release(self._tree.evict(count - self.free), TREE)
        return self._allocator.allocate(count, owner)

    def _private(self, lease: Lease) -> Iterator[int]:
        for index, page in enumerate(lease.pages):
            if index >= len(lease.path) or lease.path[index].page != page:
                yield page

    def _keys(self, tokens: bytes | bytearray, first: int, end: int) -> Iterator[bytes]:
        """Keys of the full pages [first, end)."""
        step = self._page_size * ITEM_BYTES
        return (bytes(tokens[index * step : (index + 1) * step]) for index in range(first, end))
