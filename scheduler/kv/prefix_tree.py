"""The prefix cache as a tree of full KV pages, found by the tokens that they hold.

One node is one page. Its key is the packed token ids of that page, its place in the tree the pages before it, so a
path from the root is a prompt prefix. Every cache salt has a root of its own, so tenants share no pages.
A lease locks every node of its path; what is locked cannot be evicted, and a locked node's ancestors are locked too.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from headrace.scheduler.kv.cache_events import CacheEventLog


class Node:
    """One cached page, or the root of a cache salt."""

    __slots__ = ("children", "digest", "key", "locks", "number", "page", "parent", "queued", "used")

    def __init__(self, key: bytes, page: int, parent: "Node | None", number: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.number = number
        self.digest: bytes | None = None
        """Its name in the cache events; None without them, and in roots."""

        self.children: dict[bytes, Node] = {}
        self.locks = 0
        """Leases whose path runs through it."""

        self.used = 0
        """Tick of its last use."""

        self.queued = False
        """It is in the heap of eviction candidates."""


class PrefixTree:
    """Longest-prefix match, insertion and LRU eviction of unlocked leaves, O(log n) a page evicted.

    Candidates for eviction stand in a heap by the tick at which they were last seen unlocked; a node has at most
    one entry there, which is checked, and put back or dropped, when it comes up.
    """

    def __init__(self, events: CacheEventLog | None = None) -> None:
        """events: is told of every page that comes and goes."""
        self._events = events
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._numbers = 0
        self._nodes = 0
        self._unlocked = 0
        self.version = 0
        """Rises with every page that comes or goes: what match() finds may be another path."""

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        return self._nodes

    @property
    def unlocked(self) -> int:
        """Pages that no lease uses; every one of them can be evicted."""
        return self._unlocked

    def match(self, keys: Iterable[bytes], salt: str) -> list[Node]:
        """The longest path whose keys are a prefix of keys; empty when the first is not there."""
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

    def child(self, parent: Node | None, salt: str, key: bytes) -> Node | None:
        """The node for key below parent (None: below the salt's root)."""
        above = self._roots.get(salt.encode()) if parent is None else parent
        return None if above is None else above.children.get(key)

    def insert(self, parent: Node | None, salt: str, key: bytes, page: int) -> Node:
        """Add a page below parent, unlocked. Raises ValueError when an equal page is already there."""
        if parent is None:
            parent = self._roots.setdefault(salt.encode(), Node(salt.encode(), -1, None, 0))
        if key in parent.children:
            raise ValueError("an equal page is already in the tree")
        self._numbers += 1
        node = Node(key, page, parent, self._numbers)
        if self._events is not None:
            node.digest = self._events.stored(parent.digest, salt.encode(), key)
        parent.children[key] = node
        self.version += 1
        self._nodes += 1
        self._unlocked += 1
        self._touch(node)
        return node

    def lock(self, path: Sequence[Node]) -> None:
        """Keep these nodes from eviction until unlock(). The path starts below the root or below locked nodes."""
        for node in path:
            if node.locks == 0:
                self._unlocked -= 1
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Take one lock off each node, leaves first. Raises ValueError for a node without locks."""
        for node in reversed(path):
            if node.locks == 0:
                raise ValueError("a node is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0:
                self._unlocked += 1
                self._touch(node)

    def evict(self, count: int) -> list[int]:
        """Drop up to count unlocked leaves, least recently used first, and return their pages."""
        pages: list[int] = []
        while len(pages) < count and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children or not _is_in_tree(node):
                continue  # it queues again when it is an unlocked leaf
            if node.used != used:
                self._queue(node)
                continue
            pages.append(node.page)
            self._remove(node)
        return pages

    def drop(self, path: Sequence[Node]) -> list[int]:
        """Remove the nodes of a path, last one first, up to a node that is locked or has children.

        Returns their pages.
        """
        pages: list[int] = []
        for node in reversed(path):
            if node.locks or node.children:
                break
            pages.append(node.page)
            self._remove(node)
        return pages

    def walk(self) -> Iterator[Node]:
        """Every node, parents first (for checks)."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: Node) -> None:
        self._tick += 1
        node.used = self._tick
        if not node.children:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.used, node.number, node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are never queued"
        del parent.children[node.key]
        self.version += 1
        if self._events is not None and node.digest is not None:
            self._events.removed(node.digest)
        self._nodes -= 1
        self._unlocked -= 1
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.key]
        elif parent.locks == 0:
            self._queue(parent)


def _is_in_tree(node: Node) -> bool:
    """Whether a queued node is still in the tree: dropped nodes stay in the heap until they are popped."""
    return node.parent is not None and node.parent.children.get(node.key) is node
