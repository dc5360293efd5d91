"""Retention: cached pages that stay in the pool until a time, within a bound for each tenant, at its own cost.

A page that is retained does not leave when its turn in the eviction order comes:

a. Its tenant gives another page instead, the lowest in the order of those that it does not retain. The retained page
   takes that one's place in the order, so that the tenant's pages are evicted as often as without retention.
b. If its tenant has no other page that can leave, the next page in the order leaves.
c. Once all that could leave is retained, pages leave in their order: prompts that are computed come first.

A tenant retains at most a share of the pool (--retain-percent). So what the others have cached is never less than in a
pool that is smaller by that share, whatever a tenant retains; and while it has other pages to give, it is what it would
be without. When a page's time is over, it stands where its last use put it.

What open prompts retain has a priority above that of all hints, within three quarters of the tenant's bound: hints
displace none of it, and have the rest. Beyond that it has the priority of a hint without one. It falls to that, too,
when the prompt has come (commit()).

A tenant is the name of an API key. Requests without one are one tenant, which retains within one bound; a page of them
is paid for by pages of the same cache salt.

What is retained is closed towards the root, and so are times and priorities: a page is retained at least as long as
those behind it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from headrace.core.lazy_heap import LazyHeap
from headrace.core.types.requests.kv_hints import OPEN_PRIORITY
from headrace.scheduler.kv.eviction_queue import EvictionQueue
from headrace.scheduler.kv.node import NONE, Account, Node, Retained

OPEN_SHARE = 3, 4  # of what a tenant may retain
RELEASED = -1  # rank of pages that leave before all others


class Retention:
    """The eviction order of a pool, and which of its pages are retained; O(log n) a page."""

    def __init__(self, evictable: Callable[[Node], bool], pages: Callable[[], int], limit: int) -> None:
        """evictable: a node's page may leave the pool now. pages: of the tree that are in the pool, which bound the
        size of the orders. limit: pages that each tenant may retain."""
        self._evictable = evictable
        self._holders = pages
        self.limit = limit
        """Pages that each tenant may retain."""

        self._open_limit = limit * OPEN_SHARE[0] // OPEN_SHARE[1]
        self._order = EvictionQueue(evictable, _has_page)
        self._waiting = EvictionQueue(self._waits, self._waits)
        self._named: dict[str, Account] = {}
        self._pages: Counter[str] = Counter()
        self._of_open: Counter[str] = Counter()  # those of them with the priority of open prompts
        self._ends: LazyHeap[int, Node] = LazyHeap()
        self._by_priority: dict[str, LazyHeap[int, Node]] = {}

    def __len__(self) -> int:
        """Pages that are retained."""
        return len(self._ends)

    @property
    def unlocked(self) -> int:
        """Pages that are retained and used by no lease, O(n)."""
        return sum(not node.locks for node in self._ends.items())

    def account(self, tenant: str) -> Account:
        """The account of a tenant; a new one for a cache salt without a tenant."""
        return self._named.setdefault(tenant, Account(tenant)) if tenant else Account("")

    def grant(self, path: Sequence[Node], until: float, priority: int, roots: Iterable[Node]) -> int:
        """Retain the leading pages of a path until a time. Returns how many of them are retained until then at least.

        Beyond the tenant's bound, pages of lower priority are retained no more. roots: of the tenant's pages.
        """
        granted, wanted = 0, priority
        for node in path:
            account, kept = node.account, node.retained
            if account is None or node.page == NONE:
                break
            priority = self._bounded(account.tenant, kept, wanted)
            if kept is None:
                if not self._has_room(account.tenant, priority):
                    break
                self._open(account, roots)
                kept = node.retained = Retained(until, priority)
                self._pages[account.tenant] += 1
                self._of_open[account.tenant] += priority == OPEN_PRIORITY
                self._note(node, kept)
            elif until > kept.until or priority > kept.priority:
                self._of_open[account.tenant] += kept.priority < priority == OPEN_PRIORITY
                kept.until, kept.priority = max(until, kept.until), max(priority, kept.priority)
                self._note(node, kept)
            kept.gives_way = False
            granted += 1
        return granted

    def commit(self, path: Sequence[Node]) -> None:
        """The prompt of a path has come: its pages are not those of an open prompt any more, up to the last one that
        another open prompt has, too."""
        for node in reversed(path) if self._of_open.total() else ():
            kept, account = node.retained, node.account
            if kept is None or account is None or kept.priority != OPEN_PRIORITY:
                continue
            behind = [one.retained.priority for one in node.children.values() if one.retained is not None]
            if OPEN_PRIORITY in behind:
                return
            kept.priority = max((0, *behind))
            self._of_open[account.tenant] -= 1
            self._note(node, kept)

    def expire(self, now: float) -> None:
        """End what is retained until now or less."""
        while (first := self._ends.first()) is not None and first[0][0] <= now:
            self.end(first[1])

    def used(self, node: Node) -> None:
        """A retained page is used: it stands where that puts it."""
        kept, above = node.retained, node.parent
        if kept is None or kept.place is None:
            return
        kept.place = None
        if above is not None and above.retained is not None:
            above.retained.settled -= 1

    def end(self, node: Node) -> None:
        """A page, which is in the pool or leaves it, is retained no more."""
        account = node.account
        assert account is not None, "it was retained"
        self.used(node)
        self._of_open[account.tenant] -= node.retained is not None and node.retained.priority == OPEN_PRIORITY
        node.retained = None
        account.waiting.pop(node.number, None)
        self._pages[account.tenant] -= 1
        self._ends.remove(node.number)
        self._by_priority[account.tenant].remove(node.number)
        self._order.put(node, self._holders())
        self.offer(node)

    def first_to_leave(self, node: Node) -> None:
        """A page stands before all others in the order from now on, until it is used again."""
        if node.retained is not None:
            self.end(node)
        node.rank = RELEASED
        self._order.put(node, self._holders())
        if node.account is not None and node.account.candidates is not None:
            node.account.candidates.put(node, self._holders())

    def room(self, tenant: str) -> int:
        """Pages more that a tenant may retain."""
        return max(0, self.limit - self._pages[tenant])

    def offer(self, node: Node) -> None:
        """Make the node a candidate for eviction, if it may be evicted."""
        self._order.offer(node, self._holders())
        account = node.account
        if account is None or account.candidates is None:
            return
        if node.retained is not None:
            account.waiting.pop(node.number, None)
        elif self._evictable(node):
            account.candidates.offer(node, self._holders())
            self._call(account)

    def pop(self, spare: bool = False) -> tuple[Node, int] | None:
        """Take out the node that is evicted next, and the rank at which it is; None when there is none. spare: none
        that is retained."""
        while (node := self._order.pop()) is not None:
            kept, account = node.retained, node.account
            if kept is None or account is None:
                return node, node.rank
            rank, payer = node.place[0], self._payer(account)
            if payer is not None:
                self._settle(node, kept, payer.place)
                return payer, rank
            account.waiting[node.number] = node
            self._waiting.put(node, self._holders())
        node = None if spare else self._waiting.pop()
        if node is None or node.account is None:
            return None
        del node.account.waiting[node.number]
        rank = node.place[0]
        self.used(node)  # it counts as a child that leaves now
        if node.retained is not None:
            node.retained.gives_way = True
        return node, rank

    def check(self, nodes: Sequence[Node]) -> list[str]:
        """Discrepancies. nodes: all of the tree, whose pages that may be evicted all stand in an order."""
        problems: list[str] = []
        pages: Counter[str] = Counter()
        for node in nodes:
            account, kept = node.account, node.retained
            waits = account is not None and node.number in account.waiting
            leaving = node.copies is not None and node.copies.leaving > 0  # it is offered again when they have left
            if self._evictable(node) and not leaving and node not in self._order and not waits:
                problems.append(f"page {node.page} can never be evicted")
            if kept is None:
                continue
            if account is None or node.page == NONE:
                problems.append(f"page {node.page} is retained outside the pool, or for nobody")
                continue
            pages[account.tenant] += 1
            above = node.parent
            if above is None or (above.parent is not None and not _covers(above, kept)):
                problems.append(f"page {node.page} is retained longer than the one before it")
        if +pages != +self._pages:
            problems.append(f"{dict(self._pages)} pages are counted as retained; {dict(pages)} are")
        for node in nodes:
            settled = sum(one.retained is not None and one.retained.place is not None for one in node.children.values())
            if node.retained is not None and node.retained.settled != settled:
                problems.append(f"page {node.page} counts {node.retained.settled} settled children and has {settled}")
        opened = Counter(
            node.account.tenant
            for node in nodes
            if node.account is not None and node.retained is not None and node.retained.priority == OPEN_PRIORITY
        )
        if +opened != +self._of_open:
            problems.append(f"{dict(self._of_open)} pages are counted as those of open prompts; {dict(opened)} are")
        problems += [
            f"open prompts of tenant {tenant!r} retain {n} pages"
            for tenant, n in opened.items()
            if n > self._open_limit
        ]
        problems += [f"tenant {tenant!r} retains {n} pages" for tenant, n in pages.items() if n > self.limit]
        if len(self._ends) != pages.total() or sum(map(len, self._by_priority.values())) != pages.total():
            problems.append("pages are retained without an end")
        return problems

    def _settle(self, node: Node, kept: Retained, place: tuple[int, int]) -> None:
        """Another page has left instead of a retained one, which takes its place; the page before it is next."""
        above = node.parent
        if kept.place is None and above is not None and above.retained is not None:
            above.retained.settled += 1
            self._order.offer(above, self._holders())
        kept.place = place
        self._order.put(node, self._holders())

    def _note(self, node: Node, kept: Retained) -> None:
        """The time or priority of a retained node has changed. Of equal ones the last of a path comes first."""
        assert node.account is not None, "it is retained"
        self._ends.put(node.number, (kept.until, -node.number), node)
        heap = self._by_priority.setdefault(node.account.tenant, LazyHeap())
        heap.put(node.number, (kept.priority, kept.until, -node.number), node)

    def _bounded(self, tenant: str, kept: Retained | None, priority: int) -> int:
        """The priority that a page gets which is to have this one."""
        if priority < OPEN_PRIORITY or (kept is not None and kept.priority == OPEN_PRIORITY):
            return priority
        return priority if self._of_open[tenant] < self._open_limit else 0

    def _has_room(self, tenant: str, priority: int) -> bool:
        """Whether a tenant may retain a page more, of this priority; the lowest of a lower one gives way."""
        if self._pages[tenant] < self.limit:
            return True
        heap = self._by_priority.get(tenant)
        lowest = None if heap is None else heap.first()
        if lowest is None or lowest[0][0] >= priority:
            return False
        self.end(lowest[1])
        return True

    def _open(self, account: Account, roots: Iterable[Node]) -> None:
        """Begin to keep an account's pages in an order of their own: it retains its first page."""
        if account.candidates is not None:
            return
        account.candidates = EvictionQueue(self._evictable, _has_page)
        nodes = [root for root in roots if root.account is account]
        for node in nodes:  # which grows meanwhile
            account.candidates.offer(node, self._holders())
            nodes += [child for child in node.children.values() if child.page != NONE]

    @staticmethod
    def _payer(account: Account) -> Node | None:
        """Take out the page that an account gives instead of a retained one; None when it has none."""
        assert account.candidates is not None, "it retains pages"
        while (node := account.candidates.pop()) is not None:
            if node.retained is None:
                return node
        return None

    def _call(self, account: Account) -> None:
        """An account has a page to give: one of its pages that wait for that comes back into the order."""
        while account.waiting:
            node = account.waiting.pop(next(iter(account.waiting)))
            if self._evictable(node):
                self._order.offer(node, self._holders())
                return

    def _waits(self, node: Node) -> bool:
        kept, account = node.retained, node.account
        return (
            kept is not None
            and account is not None
            and node.number in account.waiting
            and self._evictable(node)
            and not kept.settled
        )


def _has_page(node: Node) -> bool:
    return node.page != NONE


def _covers(above: Node, kept: Retained) -> bool:
    """A node is retained at least as long as one behind it."""
    own = above.retained
    return own is not None and own.until >= kept.until and own.priority >= kept.priority
