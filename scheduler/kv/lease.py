"""Leases on KV pages: the right of one request to pages of the pool. It has one owner and one end (kv_cache.py)."""

from array import array
from dataclasses import dataclass

from headrace.scheduler.kv.node import Node, PageLoad


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
    """Pages that were found in the tree when the lease began, and those that are loaded for it."""

    load: PageLoad | None = None
    """Pages of its path are being filled by this operation: nothing is computed before it has ended."""

    turn: int = 0
    """The request's turn of its conversation, from 0."""

    short: bool = False
    """It is the first turn, and of few tokens."""

    ended: bool = False
    nonfinite: bool = False
    """Results computed from its pages were NaN or infinite: release() takes them out of the tree."""
