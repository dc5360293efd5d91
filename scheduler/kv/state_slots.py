"""Slots for states of requests: one for each lease, and checkpoints at pages of the prefix tree.

A cached page is of use to a model with states only where the state behind it was kept: a request goes on from the
last checkpoint on its path. A checkpoint belongs to a node; those of nodes that no lease uses give way to leases and to
newer ones, the least recently used first.

    lease.slot      the state as of the last computed position, written by every pass
    lease.pending   copies of it that passes under way make at page ends
    node.slot       such a copy, once the pass is done and the page is in the tree
"""

from collections.abc import Sequence

from headrace.scheduler.kv.node import NONE, Node
from headrace.scheduler.kv.page_allocator import PageAllocator

CHECKPOINTS = -1  # owner of the slots of checkpoints; leases own theirs by positive numbers
CHECKPOINT_TOKENS = 256  # so many more tokens than the last checkpoint make another one worth a pass of its own


class StateSlots:
    """The slots of a pool. There are none where the model keeps no states."""

    def __init__(self, total: int = 0) -> None:
        self._allocator = PageAllocator(total)
        self._nodes: dict[Node, None] = {}  # with a checkpoint, the least recently used first

    @property
    def total(self) -> int:
        """Slots of the pool."""
        return self._allocator.total

    @property
    def free(self) -> int:
        """Slots that neither a lease nor a checkpoint has."""
        return self._allocator.free

    @property
    def checkpoints(self) -> int:
        """Nodes that have one."""
        return len(self._nodes)

    def take(self, owner: int) -> int:
        """A slot for a lease; NONE when there is none now."""
        if not self.free and not self._evict():
            return NONE
        return self._allocator.allocate(1, owner)[0]

    def keep(self, owner: int, own: Sequence[Node]) -> int:
        """A slot for a checkpoint of a lease; NONE when there is none now. At most half of all slots are checkpoints.
        own: nodes of the lease, of which the last one with a checkpoint that no other uses gives way as a last
        resort."""
        if (2 * self.checkpoints >= self.total or not self.free) and not self._evict():
            spare = next((node for node in reversed(own) if node.slot != NONE and node.locks == 1), None)
            if spare is None:
                return NONE
            self.forget(spare)
        return self._allocator.allocate(1, owner)[0]

    def attach(self, slot: int, owner: int, node: Node) -> None:
        """A checkpoint of a lease becomes that of a node; one that the node has already stays."""
        if node.slot != NONE:
            self.give_back(slot, owner)
            return
        self._allocator.transfer(slot, owner, CHECKPOINTS)
        node.slot = slot
        self._nodes[node] = None

    def give_back(self, slot: int, owner: int) -> None:
        """A lease does not need a slot any more."""
        self._allocator.release([slot], owner)

    def used(self, node: Node) -> int:
        """A request begins from the checkpoint of a node. Returns its slot."""
        del self._nodes[node]
        self._nodes[node] = None
        return node.slot

    def forget(self, node: Node) -> None:
        """Give up the checkpoint of a node, if it has one."""
        if node.slot != NONE:
            del self._nodes[node]
            self._allocator.release([node.slot], CHECKPOINTS)
            node.slot = NONE

    def left(self, node: Node) -> bool:
        """A node's page has come to the pool or left it (PrefixTree.on_change). Nothing of it is kept elsewhere."""
        if node.page == NONE:
            self.forget(node)
        return False

    def check(self, owned: dict[int, int], nodes: Sequence[Node]) -> list[str]:
        """Discrepancies. owned: slots of leases and their owners; nodes: of the tree."""
        problems = [
            f"slot {slot} is not lease {owner}'s"
            for slot, owner in owned.items()
            if self._allocator.owner(slot) != owner
        ]
        if {node for node in nodes if node.slot != NONE} != self._nodes.keys():
            problems.append("checkpoints are counted that are not in the tree, or the other way round")
        if self.free + len(owned) + self.checkpoints != self.total:
            problems.append(
                f"{self.free} free + {len(owned)} leased slots + {self.checkpoints} checkpoints != {self.total}"
            )
        return problems

    def _evict(self) -> bool:
        """Give up the least recently used checkpoint of a node that no lease uses. False when there is none."""
        node = next((node for node in self._nodes if not node.locks), None)
        if node is not None:
            self.forget(node)
        return node is not None


def resumable(path: Sequence[Node]) -> list[Node]:
    """The part of a path up to its last checkpoint."""
    end = next((index for index in range(len(path), 0, -1) if path[index - 1].slot != NONE), 0)
    return list(path[:end])
