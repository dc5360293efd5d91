"""Invariants of the tiers of a prefix tree: no copy without a parent's, no slot without a node, right counts."""

from collections.abc import Iterable, Sequence

from headrace.scheduler.kv.node import NONE, Node, has_copy, slot_of
from headrace.scheduler.kv.tier_slots import TierSlots


def check_tiers(nodes: Sequence[Node], tiers: Iterable[TierSlots], loading_now: int, stored_now: int) -> list[str]:
    """Discrepancies; none when all is well. nodes: all of the tree. loading_now, stored_now: pages that are counted as
    being copied from and to tiers."""
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
