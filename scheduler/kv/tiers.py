"""The tiers of the prefix cache: which nodes have copies there, and the copy operations under way.

    pool ──coldest pages, before the pool is full──► host        a page is in one of the two
    pool ◄────────────at admission, to be used────── host, disk, library
    pool ──pages of later turns, when a request ends──► disk     a page on disk stays there
    the pages of KV files, as they are listed ────────────► library  is never written

Every node with a copy has a parent with a copy, or is the first of its salt; so do the nodes with a page in the pool
among themselves, and those with a copy on disk. A page that is being copied is locked in the pool, and no slot that is
being written or read is given away. A failed copy costs what was copied, never more.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from headrace.core.types.kv.kv_tiers import LIBRARY, TIERS, PageHeader, Tier
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.node import NONE, Node, PageCopy, PageLoad, StoringPages, has_copy, load_of, slot_of
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.kv.tier_slots import TierSlots

UNUSED = -1  # turn of a page that no request has used, so that the first one is nobody's second turn


class KvTiers:
    """The copies of one prefix tree in other tiers. Begun operations are taken with begun(), and are to be ended."""

    def __init__(
        self,
        tree: PrefixTree,
        slots: Mapping[Tier, int],
        admission_turn: int,
        events: CacheEventLog | None = None,
    ) -> None:
        """slots: of each tier. admission_turn: pages of requests from this turn of their conversation on are written to
        disk. events: is told of every copy that comes and goes."""
        self._tree = tree
        self._slots = {tier: TierSlots(tier, slots[tier], None if tier == LIBRARY else events) for tier in TIERS}
        self._admission_turn = admission_turn
        self._begun: list[PageCopy] = []
        self._lost: set[tuple[Tier, int]] = set()  # slots that the stages lost while they were being copied
        self.disk_ready = False
        """What the disk holds is known, so that it can be written to."""

        self.may_write = True
        """The budget of disk writes is not used up."""

        self.incomplete = False
        """Pages of KV files have lost their nodes since enter()."""

        self.leaving = 0
        """Pages that are being copied to the host tier."""

        self.archiving = 0
        """Pages that are being copied to disk."""

        self.loading = 0
        """Pages that are being filled."""

        tree.on_change = self._changed

    def slots(self, tier: Tier) -> TierSlots:
        """The slots of a tier."""
        return self._slots[tier]

    def begun(self) -> list[PageCopy]:
        """The operations begun since the last call. Before them the stages drop what dropped() of the slots says."""
        begun, self._begun = self._begun, []
        return begun

    def store(self, count: int, spare: bool = False) -> list[int]:
        """Copy up to count of the coldest pages to the host tier, to leave the pool. spare: none that is retained.
        Returns pages that have left it at once, since all that is in the tier is worth more."""
        slots, left = self._slots["host"], []
        store = StoringPages("host")
        for _ in range(count if slots.total else 0):
            node = self._tree.coldest(spare)
            if node is None:
                break
            if not slots.free():
                victim = slots.coldest()
                if victim is None:  # all others are being copied, or have children that are
                    self._tree.stay(node)
                    break
                if victim.rank > node.rank and node.retained is None:
                    if (page := self._tree.leave(node)) is None:
                        break
                    left.append(page)
                    continue
                self._forget(victim, "host")
            self._add(store, node, slots.assign(node))
        self._begin(store)
        self.leaving += len(store.nodes)
        return left

    def demote(self, path: Sequence[Node]) -> int:
        """Copy the last pages of a path to the host tier, to leave the pool, up to one that is in use or worth less
        than all that is there. Returns how many."""
        slots, store = self._slots["host"], StoringPages("host")
        for node in self._tree.taken(path):
            if not slots.free():
                victim = slots.coldest()
                if victim is None or victim.rank > node.rank:
                    self._tree.stay(node)
                    break
                self._forget(victim, "host")
            self._add(store, node, slots.assign(node))
        self._begin(store)
        self.leaving += len(store.nodes)
        return len(store.nodes)

    def archive(self, path: Sequence[Node], turn: int, limit: int) -> None:
        """Copy the pages of a locked path that are not on disk to it, if the request's turn is admitted. limit: pages
        that may be under way."""
        if not self.disk_ready or not self.may_write or turn < self._admission_turn:
            return
        slots, store = self._slots["disk"], StoringPages("disk")
        anchor: Node | None = None  # the page before those, which must not be evicted meanwhile
        for node in path:
            if slot_of(node, "disk") != NONE:
                anchor = node
                continue
            if self.archiving + len(store.nodes) >= limit or load_of(node) is not None:
                break
            if not slots.free():
                if (victim := slots.coldest()) is None or victim is anchor or victim.rank > node.rank:
                    break
                self._forget(victim, "disk")
            self._tree.lock([node])
            self._add(store, node, slots.assign(node))
        self._begin(store)
        self.archiving += len(store.nodes)

    def loadable(self, known: Sequence[Node], resident: int) -> list[Node]:
        """The nodes of a path beyond its pages in the pool that can be loaded."""
        if resident and load_of(known[resident - 1]) is not None:
            return []
        return list(takewhile(lambda node: node.copies is not None and node.copies.any, known[resident:]))

    def pin(self, nodes: Sequence[Node]) -> None:
        """Keep the slots of nodes, which have copies, from being given to others until unpin()."""
        for node in nodes:
            assert node.copies is not None, "it has a copy"
            node.copies.busy += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """The end of pin()."""
        for node in nodes:
            assert node.copies is not None, "it was pinned"
            node.copies.busy -= 1
            self._offer(node)

    def load(self, nodes: list[Node], pages: Sequence[int], used: bool = True) -> PageLoad:
        """Fill pages, which belong to the tree from now on, from the copies of nodes. The nodes are locked until
        loaded(). used: they are, by a request."""
        load = PageLoad(nodes, [nearest(node) for node in nodes])
        for node, page in zip(nodes, pages, strict=True):
            assert node.copies is not None, "it has a copy"
            node.copies.busy += 1
            node.copies.load = load
            self._tree.fill(node, page, used)
        self._begun.append(load)
        self.loading += len(nodes)
        return load

    def stored(self, store: StoringPages, failed: set[int]) -> list[int]:
        """A store has ended; failed: indices of pages that some stage could not store. Returns the pages of the pool
        that have become free."""
        for index, node in enumerate(store.nodes):
            assert node.copies is not None, "it has a slot"
            node.copies.busy -= 1
            if (store.tier, store.slots[index]) in self._lost:
                failed = failed | {index}
        freed = self._archived(store, failed) if store.tier == "disk" else self._left(store, failed)
        for node in store.nodes:
            self._forget_lost(node)
            self._slots[store.tier].announce(node)
        return freed

    def loaded(self, load: PageLoad, failed: set[int]) -> list[int]:
        """A load has ended; failed: indices of pages that some stage could not load. These, and those after them, are
        locked by no lease any more. Returns the pages of the pool that have become free."""
        self.loading -= len(load.nodes)
        first = min(failed, default=len(load.nodes))
        for node in load.nodes:
            assert node.copies is not None, "it has a copy"
            node.copies.busy -= 1
            node.copies.load = None
        for node in load.nodes[:first]:
            self._forget(node, "host")
            self._tree.unlock_unused([node])
        freed = []
        for index in range(len(load.nodes) - 1, first - 1, -1):
            node = load.nodes[index]
            self._tree.unlock_unused([node])
            if index in failed:
                self._forget(node, load.tiers[index])
            freed.append(self._tree.vacate(node))
        for node in load.nodes:
            self._forget_lost(node)
            self._offer(node)
        return freed

    def lost(self, tier: Tier, slots: Iterable[int]) -> None:
        """A stage has lost what slots hold."""
        for slot in slots:
            node = self._slots[tier].node(slot)
            if node is None or node.copies is None:
                continue
            if node.copies.busy:
                self._lost.add((tier, slot))
            else:
                self._forget(node, tier)

    def purge(self, path: Sequence[Node]) -> None:
        """Drop the copies of pages that have turned out bad, and of all below them."""
        for node in reversed(path):
            for tier in TIERS:
                if node.copies is not None and not node.copies.busy and not node.locks:
                    self._forget(node, tier)

    def restore(self, found: Iterable[tuple[int, PageHeader]]) -> int:
        """Insert the pages that every stage has found on disk, where their parents were found, too. Returns how many.
        The rest is to be dropped, with TierSlots.drop()."""
        children: dict[bytes, list[tuple[int, PageHeader]]] = {}
        for slot, header in found:
            children.setdefault(header.parent, []).append((slot, header))
        claimed: dict[int, Node] = {}
        seen: set[int] = set()
        roots = {header.salt for entries in children.values() for _, header in entries}
        stack: list[tuple[bytes, bytes, Node | None]] = [(salt, salt, None) for salt in sorted(roots)]
        while stack:
            digest, salt, parent = stack.pop()
            for slot, header in children.pop(digest, ()):
                if header.salt != salt or header.digest == digest:
                    continue
                node = self._tree.place(parent, salt, header.digest, header.turn)
                if id(node) not in seen and slot_of(node, "disk") == NONE:
                    seen.add(id(node))
                    claimed[slot] = node
                    stack.append((header.digest, salt, node))
        self._slots["disk"].claim(claimed)
        for node in claimed.values():
            self._offer(node)
            self._slots["disk"].announce(node)
        return len(claimed)

    def enter(self, files: Iterable[tuple[bytes, Sequence[bytes], int]]) -> None:
        """Have the pages of KV files found. files: of each the digest of its salt, its pages' digests, and the slot of
        the first one, which the others follow. What is known already stays as it is: enter() is called again for what
        could not be loaded meanwhile."""
        slots = self._slots[LIBRARY]
        claimed: dict[int, Node] = {}
        seen: set[int] = set()
        for root, digests, first in files:
            node: Node | None = None
            for slot, digest in enumerate(digests, first):
                node = self._tree.place(node, root, digest, UNUSED)
                if slot_of(node, LIBRARY) == NONE and id(node) not in seen:
                    seen.add(id(node))
                    claimed[slot] = node
        slots.claim(claimed)
        for node in claimed.values():
            self._offer(node)
        self.incomplete = False

    def check(self, nodes: Sequence[Node]) -> list[str]:
        """Discrepancies between tiers and tree. nodes: all of the tree."""
        return _check_tiers(nodes, self._slots.values(), self.loading, self.leaving + self.archiving)

    def _add(self, store: StoringPages, node: Node, slot: int) -> None:
        assert node.copies is not None, "it has just been given a slot"
        node.copies.busy += 1
        store.nodes.append(node)
        store.slots.append(slot)

    def _begin(self, store: StoringPages) -> None:
        if store.nodes:
            self._begun.append(store)

    def _left(self, store: StoringPages, failed: set[int]) -> list[int]:
        """Pages have been copied to the host tier, children first. They leave the pool, unless they are used again."""
        self.leaving -= len(store.nodes)
        freed = []
        for index, node in enumerate(store.nodes):
            if index in failed:
                self._release(node, "host")
            if (page := self._tree.leave(node)) is not None:
                freed.append(page)
            elif index not in failed:
                self._release(node, "host")
        return freed

    def _archived(self, store: StoringPages, failed: set[int]) -> list[int]:
        """Pages have been copied to disk, parents first. With a page that failed go those behind it."""
        self.archiving -= len(store.nodes)
        for index, node in enumerate(store.nodes):
            if index in failed:
                self._forget(node, "disk")
            self._offer(node)
        self._tree.unlock_unused(store.nodes)
        return []

    def _changed(self, node: Node) -> bool:
        """A node's page has come to the pool, or has left it."""
        copies = node.copies
        if node.page != NONE:
            if copies is not None and copies.slots["host"] != NONE and not copies.busy:
                self._release(node, "host")  # it was computed again
            return True
        if copies is not None and copies.any:
            self._offer(node)
            return True
        self._forget_below(node)
        return False

    def _forget(self, node: Node, tier: Tier) -> None:
        """Drop a node's copy in a tier, and what could not be reached or kept without it."""
        if slot_of(node, tier) == NONE:
            return
        if tier == "disk":
            below = [one for one in _below(node, tier) if one is not node]
            for one in reversed(below):
                assert one.copies is not None, "it has a slot"
                if one.copies.busy:
                    self._lost.add((tier, one.copies.slots[tier]))
                else:
                    self._release(one, tier)
                    self._bury_without_copy(one)
        self._release(node, tier)
        self._bury_without_copy(node)

    def _forget_lost(self, node: Node) -> None:
        """Drop the copies of a node that were lost while it was busy, once it is not."""
        for tier in TIERS:
            if (tier, slot_of(node, tier)) in self._lost and node.copies is not None and not node.copies.busy:
                self._forget(node, tier)

    def _release(self, node: Node, tier: Tier) -> None:
        self.incomplete = self.incomplete or tier == LIBRARY
        self._lost.discard((tier, slot_of(node, tier)))
        self._slots[tier].release(node)

    def _bury_without_copy(self, node: Node) -> None:
        if not has_copy(node):
            self._forget_below(node)
            self._tree.bury(node)

    def _forget_below(self, node: Node) -> None:
        """Drop all copies below a node that has none."""
        for tier in TIERS if node.copies is not None else ():
            for one in reversed(_below(node, tier)):
                if one is not node:
                    self._release(one, tier)
                    self._bury_without_copy(one)  # other tiers may have what is below it

    def _offer(self, node: Node) -> None:
        for slots in self._slots.values():
            slots.offer(node)


def nearest(node: Node) -> Tier:
    """The tier that a node is loaded from."""
    return next(tier for tier in TIERS if slot_of(node, tier) != NONE)


def _below(node: Node, tier: Tier) -> list[Node]:
    """A node and all nodes below it with a slot in the tier, parents first."""
    found, stack = [], [node]
    while stack:
        one = stack.pop()
        found.append(one)
        if one.copies is None or not one.copies.children[tier]:
            continue
        stack += [child for child in one.children.values() if slot_of(child, tier) != NONE]
    return found


def _check_tiers(nodes: Sequence[Node], tiers: Iterable[TierSlots], loading_now: int, stored_now: int) -> list[str]:
    """Discrepancies; none when no copy is without a parent's, no slot without a node, and counts are right. nodes: all
    of the tree. loading_now, stored_now: pages that are counted as being copied from and to tiers."""
    parents = {id(node.parent): node.parent for node in nodes if node.parent is not None}
    counting = [*nodes, *(parent for parent in parents.values() if parent.parent is None)]
    problems = [problem for slots in tiers for problem in slots.check(counting)]
    loading = busy = 0
    for node in nodes:
        parent, copies = node.parent, node.copies
        if copies is not None:
            loading += copies.load is not None
            busy += copies.busy
        if parent is None or parent.parent is None:
            continue
        if has_copy(node) and not has_copy(parent):
            problems.append("a node with a copy has a parent without")
        if node.page != NONE and parent.page == NONE:
            problems.append(f"page {node.page} has a parent outside the pool")
        if slot_of(node, "disk") != NONE and slot_of(parent, "disk") == NONE and copies is not None and not copies.busy:
            problems.append(f"disk slot {slot_of(node, 'disk')} has a parent that is not on disk")
    if (loading, busy) != (loading_now, loading_now + stored_now):
        problems.append(f"{loading_now} pages are being loaded and {busy} copied; nodes say {loading}")
    return problems
