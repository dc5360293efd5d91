"""The prefix cache as a tree of full KV pages, found by the tokens that they hold.

One node is one page. Its key names the page's tokens, its place in the tree the pages before it, so a path from the
root is a prompt prefix. Every cache salt has a root of its own, so tenants share no pages.
A lease locks every node of its path; what is locked cannot be evicted, and a locked node's ancestors are locked too.

A node without a page in the pool either has copies in other tiers (scheduler/kv/tiers.py), or it is a ghost: an evicted
page whose turn is remembered, so that a conversation that comes back does not count as a new one. The nodes with a page
in the pool are closed towards the root, and so are the nodes with any copy.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.eviction import SHARED_BY, LeastRecentlyUsed, Ranking

NONE = -1  # no page of the pool, no slot of a tier


class Node:
    """One cached page, or the root of a cache salt."""

    __slots__ = (
        "children", "digest", "key", "locks", "number", "page", "parent", "queued", "rank", "resident", "turn", "used",
    )  # fmt: skip

    def __init__(self, key: bytes, page: int, parent: "Node | None", number: int) -> None:
        self.key = key
        self.page = page
        """Its page of the pool, or NONE."""

        self.parent = parent
        self.number = number
        self.digest: bytes | None = None
        """Its name in the cache events; None without them, and in roots."""

        self.children: dict[bytes, Node] = {}
        self.resident = 0
        """Children that have a page in the pool."""

        self.locks = 0
        """Leases whose path runs through it."""

        self.used = 0
        """Tick of its last use."""

        self.turn = 0
        """Turn of the conversation that used it last."""

        self.rank = 0
        """Its place in the eviction order, as of its last use; equal ones go by `used`."""

        self.queued = False
        """It is in the heap of eviction candidates."""


class PrefixTree:
    """Longest-prefix match, insertion, and eviction of unlocked leaves by rank, O(log n) a page evicted.

    Candidates for eviction stand in a heap by (rank, tick) of the time at which they were last seen unlocked; a node
    has at most one entry there, which is checked, and put back or dropped, when it comes up.
    """

    def __init__(self, events: CacheEventLog | None = None, ranking: Ranking | None = None, ghosts: int = 0) -> None:
        """events: is told of every page that comes and goes. ranking: eviction order; None for LRU. ghosts: evicted
        pages that are remembered."""
        self._events = events
        self._ranking = LeastRecentlyUsed() if ranking is None else ranking
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._ghosts: deque[tuple[Node, int]] = deque()
        self._ghost_limit = ghosts
        self._tick = 0
        self._numbers = 0
        self._nodes = 0
        self._unlocked = 0

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        return self._nodes

    @property
    def unlocked(self) -> int:
        """Pages that no lease uses; every one of them can be evicted."""
        return self._unlocked

    def find(self, keys: Iterable[bytes], salt: str) -> list[Node]:
        """The longest path whose keys are a prefix of keys, ghosts among them."""
        node = self._roots.get(salt.encode())
        path: list[Node] = []
        if node is None:
            return path
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def match(self, keys: Iterable[bytes], salt: str) -> list[Node]:
        """The longest path of pages in the pool whose keys are a prefix of keys; empty when the first is not there."""
        return pages_of(self.find(keys, salt))

    def child(self, parent: Node | None, salt: str, key: bytes) -> Node | None:
        """The node for key below parent (None: below the salt's root), if it has a page in the pool."""
        above = self._roots.get(salt.encode()) if parent is None else parent
        node = None if above is None else above.children.get(key)
        return node if node is not None and node.page != NONE else None

    def insert(self, parent: Node | None, salt: str, key: bytes, page: int) -> Node:
        """Add a page below parent, unlocked. Raises ValueError when an equal page is already there."""
        if parent is None:
            parent = self._roots.setdefault(salt.encode(), Node(salt.encode(), NONE, None, 0))
        node = parent.children.get(key)
        if node is None:
            self._numbers += 1
            node = parent.children[key] = Node(key, page, parent, self._numbers)
        elif node.page == NONE:
            node.page = page
        else:
            raise ValueError("an equal page is already in the tree")
        if self._events is not None:
            node.digest = self._events.stored(parent.digest, salt.encode(), key)
        parent.resident += 1
        self._nodes += 1
        self._unlocked += 1
        node.rank = 0
        self._touch(node, 0, True)  # the lowest rank: the lease that uses it raises it
        return node

    def lock(self, path: Sequence[Node]) -> None:
        """Keep these nodes from eviction until unlock(). The path starts below the root or below locked nodes."""
        for node in path:
            if node.locks == 0:
                self._unlocked -= 1
            node.locks += 1

    def unlock(self, path: Sequence[Node], turn: int = 0, short: bool = False) -> None:
        """Take one lock off each node, leaves first. Raises ValueError for a node without locks.

        turn, short: of the request that used them, for the eviction order.
        """
        for node in reversed(path):
            if node.locks == 0:
                raise ValueError("a node is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0:
                self._unlocked += 1
                self._touch(node, turn, short)

    def unlock_unused(self, path: Sequence[Node]) -> None:
        """Take one lock off each node, leaves first, as if it had never been there: the eviction order stays."""
        for node in reversed(path):
            node.locks -= 1
            if node.locks == 0:
                self._unlocked += 1
                if not node.resident:
                    self._queue(node)

    def evict(self, count: int) -> list[int]:
        """Drop up to count unlocked leaves, lowest rank first, and return their pages."""
        pages: list[int] = []
        while len(pages) < count and self._heap:
            _, used, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.resident or node.page == NONE:
                continue  # it queues again when it is an unlocked leaf
            if node.used != used:
                self._queue(node)
                continue
            self._ranking.evicted(node.rank)
            pages.append(self._vacate(node))
        return pages

    def drop(self, path: Sequence[Node]) -> list[int]:
        """Remove the pages of a path, last one first, up to a node that is locked or has children.

        Returns them.
        """
        pages: list[int] = []
        for node in reversed(path):
            if node.locks or node.resident:
                break
            pages.append(self._vacate(node))
        return pages

    def walk(self) -> Iterator[Node]:
        """Every node with a page in the pool, parents first (for checks)."""
        return (node for node in self.walk_all() if node.page != NONE)

    def walk_all(self) -> Iterator[Node]:
        """Every node, ghosts among them, parents first (for checks)."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: Node, turn: int, short: bool) -> None:
        self._tick += 1
        node.used = self._tick
        node.turn = turn
        node.rank = max(node.rank, self._ranking.rank(turn, short))  # the heap finds nodes late, and never early
        if not node.resident:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.rank, node.used, node))

    def _vacate(self, node: Node) -> int:
        """Take a node's page out of the pool; return it."""
        parent, page = node.parent, node.page
        assert parent is not None, "roots have no page"
        node.page = NONE
        if self._events is not None and node.digest is not None:
            self._events.removed(node.digest)
        self._nodes -= 1
        self._unlocked -= 1
        parent.resident -= 1
        if not parent.resident and parent.parent is not None and not parent.locks:
            self._queue(parent)
        self._bury(node)
        return page

    def _bury(self, node: Node) -> None:
        """Make a node that has no copy a ghost. The oldest ghost goes in its place: ghosts of children are older than
        those of their parents."""
        self._ghosts.append((node, node.used))
        while len(self._ghosts) > self._ghost_limit:
            ghost, used = self._ghosts.popleft()
            if ghost.page == NONE and ghost.used == used:
                self._forget(ghost)

    def _forget(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are no ghosts"
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]


def pages_of(path: Sequence[Node]) -> list[Node]:
    """The part of a path that has pages in the pool."""
    end = next((index for index, node in enumerate(path) if node.page == NONE), len(path))
    return list(path[:end])


def next_turn(path: Sequence[Node]) -> int:
    """The turn of a request whose prompt begins with a path, ghosts among them: one more than that of the page where
    it leaves what is known, 0 where that is a prefix of many."""
    if not path or len(path[-1].children) >= SHARED_BY:
        return 0
    return path[-1].turn + 1
