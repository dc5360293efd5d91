"""The slots of one tier: which node has which, and which node gives its slot away first."""

from collections.abc import Iterable

from headrace.core.types.kv.kv_tiers import Tier
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.eviction_queue import EvictionQueue
from headrace.scheduler.kv.node import NONE, Node, TierCopies, slot_of
from headrace.scheduler.kv.page_allocator import PageAllocator

TAKEN = 1  # owner of slots in the allocator


class TierSlots:
    """Slots are given to nodes and taken back, leaves first, lowest (rank, last use) first."""

    def __init__(self, tier: Tier, count: int, events: CacheEventLog | None = None) -> None:
        """events: is told of every copy that can be loaded."""
        self._events = events
        self._announced: set[int] = set()
        self._tier = tier
        self._allocator = PageAllocator(count)
        self._nodes: dict[int, Node] = {}
        self._candidates = EvictionQueue(self._may_lose, self._holds)
        self._dropped: list[int] = []

    @property
    def total(self) -> int:
        """Slots, taken or not."""
        return self._allocator.total

    @property
    def used(self) -> int:
        """Slots that a node has."""
        return len(self._nodes)

    def node(self, slot: int) -> Node | None:
        """The node that has a slot."""
        return self._nodes.get(slot)

    def free(self) -> bool:
        """A slot is free."""
        return self._allocator.free > 0

    def assign(self, node: Node) -> int:
        """Give a node a free slot; returns it. Raises ValueError when none is free."""
        slot = self._allocator.allocate(1, TAKEN)[0]
        self._give(node, slot)
        return slot

    def claim(self, found: dict[int, Node]) -> None:
        """Give nodes the slots that hold their pages already. Raises ValueError for a slot that is taken."""
        self._allocator.claim(found, TAKEN)
        for slot, node in found.items():
            self._give(node, slot)

    def release(self, node: Node) -> None:
        """Take a node's slot away; the stages have to be told, see dropped()."""
        copies, parent = node.copies, node.parent
        assert copies is not None, "it has a slot"
        assert parent is not None, "roots have no slot"
        assert parent.copies is not None, "it counts its children with slots"
        slot = copies.slots[self._tier]
        copies.slots[self._tier] = NONE
        parent.copies.children[self._tier] -= 1
        del self._nodes[slot]
        if self._events is not None and slot in self._announced:
            self._announced.discard(slot)
            self._events.copy_dropped(node.key, self._tier)
        self._allocator.release([slot], TAKEN)
        self._dropped.append(slot)
        self.offer(parent)

    def announce(self, node: Node) -> None:
        """Tell routers that what a node's slot holds can be loaded."""
        slot = slot_of(node, self._tier)
        if self._events is None or slot == NONE or slot in self._announced:
            return
        parent = node.parent
        above = b"" if parent is None or parent.parent is None else parent.key
        self._announced.add(slot)
        self._events.copied(above, node.key, self._tier)

    def drop(self, slots: Iterable[int]) -> None:
        """Note that the stages are to drop slots that no node has."""
        self._dropped.extend(slots)

    def dropped(self) -> list[int]:
        """The slots taken away since the last call. The stages drop them before any slot is given away again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def offer(self, node: Node) -> None:
        """Make the node a candidate for eviction, if it may lose its slot."""
        self._candidates.offer(node, len(self._nodes))

    def coldest(self) -> Node | None:
        """The candidate that is evicted next; None when there is none."""
        return self._candidates.first()

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Discrepancies between the slots and the nodes of the tree."""
        tier, problems, found = self._tier, [], 0
        for node in nodes:
            slot = slot_of(node, tier)
            if slot != NONE:
                found += 1
                if self._nodes.get(slot) is not node or self._allocator.owner(slot) != TAKEN:
                    problems.append(f"{tier} slot {slot} is not known to be the node's")
            children = sum(map(self._holds, node.children.values()))
            counted = 0 if node.copies is None else node.copies.children[tier]
            if counted != children:
                problems.append(f"a node counts {counted} children in the {tier} tier and has {children}")
        if found != len(self._nodes) or found + self._allocator.free != self.total:
            problems.append(f"{found} copies + {self._allocator.free} free != {self.total} slots of the {tier} tier")
        return problems

    def _give(self, node: Node, slot: int) -> None:
        parent = node.parent
        assert parent is not None, "roots have no slot"
        for one in (node, parent):
            if one.copies is None:
                one.copies = TierCopies()
        assert node.copies is not None
        assert parent.copies is not None
        node.copies.slots[self._tier] = slot
        parent.copies.children[self._tier] += 1
        self._nodes[slot] = node

    def _may_lose(self, node: Node) -> bool:
        copies, tier = node.copies, self._tier
        return copies is not None and copies.slots[tier] != NONE and not copies.busy and not copies.children[tier]

    def _holds(self, node: Node) -> bool:
        return slot_of(node, self._tier) != NONE
