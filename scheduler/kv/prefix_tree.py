"""The prefix cache as a tree of full KV pages, found by the tokens that they hold.

One node is one page. Its key names what is on the page, tokens and images, its place in the tree the pages before it:
so a path from the root is a prompt prefix. Every cache salt has a root of its own, so tenants share no pages.
A lease locks every node of its path; what is locked cannot be evicted, and a locked node's ancestors are locked too.

A node without a page in the pool either has copies in other tiers (scheduler/kv/tiers.py), or it is a ghost: an evicted
page whose turn is remembered, so that a conversation that comes back does not count as a new one. The nodes with a page
in the pool are closed towards the root, and so are the nodes with any copy.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from headrace.core.types.kv.page_digests import root_digest
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.eviction import SHARED_BY, LeastRecentlyUsed, Ranking
from headrace.scheduler.kv.node import NONE, Node, TierCopies
from headrace.scheduler.kv.retention import RELEASED, Retention


class PrefixTree:
    """Longest-prefix match, insertion, and eviction of unlocked leaves by rank, O(log n) a page evicted."""

    def __init__(
        self,
        events: CacheEventLog | None = None,
        ranking: Ranking | None = None,
        ghosts: int = 0,
        digests: bool = False,
        retained: int = 0,
    ) -> None:
        """events: is told of every page that comes and goes. ranking: eviction order; None for LRU. ghosts: evicted
        pages that are remembered. digests: keys are digests of pages (cache_events.py), not their content. retained:
        pages that each tenant may retain."""
        self._events = events
        self._ranking = LeastRecentlyUsed() if ranking is None else ranking
        self._roots: dict[bytes, Node] = {}
        self.retention = Retention(_evictable, self._holders, retained)
        """Which page leaves next, and which of them stay."""

        self._ghosts: deque[tuple[Node, int]] = deque()
        self._ghost_limit = ghosts
        self._digests = digests
        self.on_change: Callable[[Node], bool] | None = None
        """Called when a node's page has come to the pool, or has left it. Returns whether the node has to be kept for
        the copies that it has elsewhere."""

        self._tick = 0
        self._numbers = 0
        self.pages = 0
        """Pages in the tree."""

        self.unlocked = 0
        """Pages that no lease uses; every one of them can be evicted."""

        self.version = 0
        """Rises with every page that comes or goes: what match() finds may be another path."""

    def find(self, keys: Iterable[bytes], salt: str) -> list[Node]:
        """The longest path whose keys are a prefix of keys, ghosts among them."""
        node = self._roots.get(self.root_key(salt))
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
        above = self._roots.get(self.root_key(salt)) if parent is None else parent
        node = None if above is None else above.children.get(key)
        return node if node is not None and node.page != NONE else None

    def insert(
        self,
        parent: Node | None,
        salt: str,
        key: bytes,
        page: int,
        content: bytes | None = None,
        tenant: str = "",
    ) -> Node:
        """Add a page below parent, locked once. content: of the page (page_key()), where the key is a digest. tenant:
        whose salt it is. Raises ValueError when an equal page is already there."""
        if parent is None:
            root = self.root_key(salt)
            parent = self._roots.setdefault(root, Node(root, NONE, None, 0))
            self.own(parent, tenant)
        node = parent.children.get(key)
        if node is None:
            node = self._add(parent, key)
        elif node.page != NONE:
            raise ValueError("an equal page is already in the tree")
        if self._events is not None:
            node.digest = self._events.stored(parent.digest, salt.encode(), key if content is None else content)
        self.fill(node, page)
        return node

    def fill(self, node: Node, page: int, used: bool = True) -> None:
        """Give a node that has none a page of the pool. It is locked once, for what fills it: unlocked pages stand in
        the eviction order. used: for a request; False: its last use stays what it was."""
        parent = node.parent
        assert parent is not None, "roots have no page"
        node.page = page
        if node.account is None:
            node.account = parent.account
        parent.resident += 1
        self.version += 1
        self.pages += 1
        node.locks = 1
        if used:
            self._tick += 1
            node.used, node.turn = self._tick, 0
            node.rank = self._ranking.rank(0, True)  # the lowest: the lease that uses it raises it
        if self.on_change is not None:
            self.on_change(node)

    def own(self, root: Node, tenant: str) -> None:
        """A request of a tenant uses pages below a root: they are that tenant's, if they are nobody's yet."""
        if root.account is None:
            root.account = self.retention.account(tenant)

    def retain(self, path: Sequence[Node], until: float, priority: int) -> int:
        """Keep the leading pages of a path in the pool until a time; returns of how many that was granted. See
        Retention.grant()."""
        root = path[0].parent if path else None
        if root is None or root.account is None:
            return 0
        roots = self._roots.values() if root.account.tenant else (root,)
        return self.retention.grant(path, until, priority, roots)

    def announce(self, node: Node, salt: str, content: bytes) -> None:
        """Tell routers of a page that was filled from a copy. content: of the page (page_key())."""
        assert node.parent is not None, "roots have no page"
        if self._events is not None and node.digest is None and node.page != NONE:
            node.digest = self._events.stored(node.parent.digest, salt.encode(), content)

    def place(self, parent: Node | None, root: bytes, digest: bytes, turn: int) -> Node:
        """The node of a digest below parent (None: below the root with that digest), added without a page if it is not
        there. What is added is newer than what was added before."""
        above = self._roots.setdefault(root, Node(root, NONE, None, 0)) if parent is None else parent
        node = above.children.get(digest)
        if node is None:
            node = self._add(above, digest)
            self._tick += 1
            node.used, node.turn, node.rank = self._tick, turn, self._ranking.rank(turn, False)
        return node

    def root_key(self, salt: str) -> bytes:
        """The key of a salt's root."""
        return root_digest(salt.encode()) if self._digests else salt.encode()

    def _holders(self) -> int:
        """Pages in the tree."""
        return self.pages

    def _add(self, parent: Node, key: bytes) -> Node:
        self._numbers += 1
        node = parent.children[key] = Node(key, NONE, parent, self._numbers)
        return node

    def lock(self, path: Sequence[Node]) -> None:
        """Keep these nodes from eviction until unlock(). The path starts below the root or below locked nodes."""
        for node in path:
            if node.locks == 0:
                self.unlocked -= 1
            node.locks += 1

    def unlock(self, path: Sequence[Node], turn: int = 0, short: bool = False) -> None:
        """Take one lock off each node, leaves first. Raises ValueError for a node without locks.

        turn, short: of the request that used them, for the eviction order.
        """
        rank = self._ranking.rank(turn, short)
        for node in reversed(path):
            if node.locks == 0:
                raise ValueError("a node is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0:
                self.unlocked += 1
                self._tick += 1
                node.used, node.turn = self._tick, turn
                if node.retained is not None:
                    self.retention.used(node)
                if rank > node.rank:  # it never falls: the queue finds nodes late, and never early
                    node.rank = rank
                if not node.resident or node.copies is not None or node.retained is not None:
                    self.retention.offer(node)

    def unlock_unused(self, path: Sequence[Node]) -> None:
        """Take one lock off each node, leaves first, as if it had never been there: the eviction order stays."""
        for node in reversed(path):
            node.locks -= 1
            if node.locks == 0:
                self.unlocked += 1
                self.retention.offer(node)

    def evict(self, count: int, spare: bool = False) -> list[int]:
        """Drop up to count unlocked leaves, lowest rank first, and return their pages. spare: none that is retained."""
        pages: list[int] = []
        while len(pages) < count and (found := self.retention.pop(spare)) is not None:
            node, rank = found
            if not node.resident:  # else its children are about to leave: it queues again when they have
                self._ranking.evicted(rank)
                pages.append(self.vacate(node))
        return pages

    def coldest(self, spare: bool = False) -> Node | None:
        """Take the next candidate for eviction, locked, to be copied before it leaves; None when there is none.
        spare: none that is retained. From now on its parent may be one, too. Followed by stay() or leave()."""
        found = self.retention.pop(spare)
        if found is None:
            return None
        node, rank = found
        self._ranking.evicted(rank)
        self._leaving(node)
        return node

    def taken(self, path: Sequence[Node]) -> Iterator[Node]:
        """Take the last pages of a path, last one first, as coldest() does, up to one that is in use."""
        for node in reversed(path):
            leaving = 0 if node.copies is None else node.copies.leaving
            if node.locks or node.page == NONE or node.resident != leaving:
                return
            if node.retained is not None:
                self.retention.end(node)
            self._leaving(node)
            yield node

    def _leaving(self, node: Node) -> None:
        """A node is copied before it leaves: its parent may leave, too."""
        parent = node.parent
        assert parent is not None, "roots are no candidates"
        self.lock([node])
        if parent.copies is None:
            parent.copies = TierCopies()
        parent.copies.leaving += 1
        self.retention.offer(parent)

    def stay(self, node: Node) -> None:
        """A node that coldest() gave does not leave the pool now."""
        self._settle(node)
        self.unlock_unused([node])

    def leave(self, node: Node) -> int | None:
        """A node that coldest() gave leaves the pool, unless it is used again, or retained meanwhile: returns its page,
        or None."""
        self._settle(node)
        kept = node.retained
        if node.locks > 1 or node.resident or (kept is not None and not kept.gives_way):
            self.unlock_unused([node])
            return None
        node.locks = 0
        self.unlocked += 1
        return self.vacate(node)

    def _settle(self, node: Node) -> None:
        assert node.parent is not None, "coldest() gives no root"
        assert node.parent.copies is not None, "coldest() has counted its child"
        node.parent.copies.leaving -= 1

    def let_go(self, path: Sequence[Node]) -> int:
        """Have the last pages of a path leave before all others, up to one that a lease uses or that has a page behind
        it which is not to leave so. Returns how many."""
        count = 0
        for node in reversed(path):
            if node.page == NONE:
                continue
            behind = (child for child in node.children.values() if child.page != NONE)
            if node.leases or any(child.rank != RELEASED or child.leases for child in behind):
                break
            self.retention.first_to_leave(node)
            count += 1
        return count

    @staticmethod
    def unused(path: Sequence[Node], leases: int = 0) -> list[Node]:
        """The last pages of a path, last one first, up to one that more leases use or that has others behind it. Copies
        under way are no use."""
        found: list[Node] = []
        for node in reversed(path):
            if node.page == NONE:
                continue
            if node.leases > leases or node.resident != bool(found):
                break
            found.append(node)
        return found

    def drop(self, path: Sequence[Node]) -> list[int]:
        """Remove the pages of a path, last one first, up to a node that is locked or has children.

        Returns them.
        """
        pages: list[int] = []
        for node in reversed(path):
            if node.locks or node.resident:
                break
            if node.page != NONE:
                pages.append(self.vacate(node))
        return pages

    def walk(self) -> list[Node]:
        """Every node with a page in the pool, parents first (for checks)."""
        return [node for node in self.walk_all() if node.page != NONE]

    def walk_all(self) -> list[Node]:
        """Every node, ghosts among them, parents first (for checks)."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        for node in nodes:  # which grows meanwhile
            nodes.extend(node.children.values())
        return nodes

    def vacate(self, node: Node) -> int:
        """Take an unlocked leaf's page out of the pool; return it."""
        parent, page = node.parent, node.page
        assert parent is not None, "roots have no page"
        node.page = NONE
        self.version += 1
        if self._events is not None and node.digest is not None:
            self._events.removed(node.digest)
            node.digest = None
        self.pages -= 1
        self.unlocked -= 1
        parent.resident -= 1
        if node.retained is not None:
            self.retention.end(node)
        if not parent.resident or parent.copies is not None or parent.retained is not None:
            self.retention.offer(parent)
        if self.on_change is None or not self.on_change(node):
            self.bury(node)
        return page

    def bury(self, node: Node) -> None:
        """Make a node that has no copy a ghost. The oldest ghost goes in its place: ghosts of children are older than
        those of their parents."""
        if not self._ghost_limit:
            self._forget(node)
            return
        self._ghosts.append((node, node.used))
        while len(self._ghosts) > self._ghost_limit:
            ghost, used = self._ghosts.popleft()
            if ghost.page == NONE and ghost.used == used and (ghost.copies is None or not ghost.copies.any):
                self._forget(ghost)

    def _forget(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are no ghosts"
        if parent.children.get(node.key) is not node:
            return  # it was buried twice
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]


def _evictable(node: Node) -> bool:
    """The node is in the pool, unlocked, and no child is there but such as are about to leave, or are retained and have
    had their turn."""
    if node.locks or node.page == NONE:
        return False
    staying = node.resident
    if staying and node.copies is not None:
        staying -= node.copies.leaving
    if staying and node.retained is not None:
        staying -= node.retained.settled
    return not staying


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
