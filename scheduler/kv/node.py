"""A node of the prefix cache: one cached page, its copies in the tiers, and the operations on them."""

from dataclasses import dataclass, field

from headrace.core.types.kv.kv_tiers import TIERS, Tier
from headrace.scheduler.kv.eviction_queue import EvictionQueue

NONE = -1  # no page of the pool, no slot of a tier


class TierCopies:
    """What the tiers have of a node and below it; only nodes that need it have one."""

    __slots__ = ("busy", "children", "leaving", "load", "slots")

    def __init__(self) -> None:
        self.slots: dict[Tier, int] = dict.fromkeys(TIERS, NONE)
        """Its slot in each tier."""

        self.children: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        """Children with a slot in each tier."""

        self.leaving = 0
        """Children that are being copied to the host tier, to leave the pool."""

        self.busy = 0
        """Copy operations that read or write its page and slots."""

        self.load: PageLoad | None = None
        """The operation that is filling its page."""

    @property
    def any(self) -> bool:
        """It has a slot in some tier."""
        slots = self.slots
        return slots["host"] != NONE or slots["disk"] != NONE or slots["library"] != NONE


class Account:
    """What one tenant has in the prefix cache: the name of an API key, or a cache salt of requests without one."""

    __slots__ = ("candidates", "tenant", "waiting")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        """The name of the key; "" for none: the bound on what is retained is one for all of those."""

        self.candidates: EvictionQueue[Node] | None = None
        """Its pages that may be evicted; None until one of them is retained."""

        self.waiting: dict[int, Node] = {}
        """Its retained pages, by number, that came up for eviction when it had no other page to give instead."""


class Retained:
    """A page's right to stay in the pool."""

    __slots__ = ("gives_way", "place", "priority", "settled", "until")

    def __init__(self, until: float, priority: int) -> None:
        self.until = until
        self.priority = priority
        self.place: tuple[int, int] | None = None
        """Rank and last use of the page that was evicted instead: its place in the eviction order meanwhile."""

        self.gives_way = False
        """It is copied to leave the pool nevertheless, as all that could leave is retained."""

        self.settled = 0
        """Children that have such a place: with them, its own turn comes as if they had left."""


class Node:
    """One cached page, or the root of a cache salt."""

    __slots__ = (
        "account",
        "children",
        "copies",
        "digest",
        "key",
        "locks",
        "number",
        "page",
        "parent",
        "rank",
        "resident",
        "retained",
        "slot",
        "turn",
        "used",
    )

    def __init__(self, key: bytes, page: int, parent: "Node | None", number: int) -> None:
        self.key = key
        self.page = page
        """Its page of the pool, or NONE."""

        self.slot = NONE
        """Slot of the state behind its page, or NONE: see state_slots.py."""

        self.parent = parent
        self.number = number
        self.digest: bytes | None = None
        """Its name in the cache events; None without them, and in roots."""

        self.children: dict[bytes, Node] = {}
        self.resident = 0
        """Children that have a page in the pool."""

        self.copies: TierCopies | None = None
        """What the tiers have of it, or have of its children."""

        self.locks = 0
        """Leases whose path runs through it, and copies of its page that are under way."""

        self.used = 0
        """Tick of its last use."""

        self.turn = 0
        """Turn of the conversation that used it last."""

        self.rank = 0
        """Its place in the eviction order, as of its last use; equal ones go by `used`."""

        self.account: Account | None = None if parent is None else parent.account
        """Whose page it is; None while that is not known, as of pages found on disk."""

        self.retained: Retained | None = None
        """Set while it has to stay in the pool."""

    @property
    def leases(self) -> int:
        """Leases whose path runs through it."""
        return self.locks - (0 if self.copies is None else self.copies.busy)

    @property
    def place(self) -> tuple[int, int]:
        """Rank and last use by which it stands in the eviction order."""
        kept = self.retained
        return (self.rank, self.used) if kept is None or kept.place is None else kept.place


@dataclass(slots=True, eq=False)
class StoringPages:
    """Pages of the pool that are being copied to a tier."""

    tier: Tier
    nodes: list[Node] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages of one path that are being filled from tiers."""

    nodes: list[Node]
    """Nodes from the root outwards, each the child of the one before it."""

    tiers: list[Tier]
    """Where each of them is read from."""


PageCopy = StoringPages | PageLoad


def slot_of(node: Node, tier: Tier) -> int:
    """The node's slot in a tier; NONE without a copy there."""
    return NONE if node.copies is None else node.copies.slots[tier]


def load_of(node: Node) -> PageLoad | None:
    """The operation that is filling the node's page; None if none is."""
    return None if node.copies is None else node.copies.load


def in_use(node: Node) -> bool:
    """Whether the path of a lease runs through the node; copies lock it beside."""
    return node.locks > (0 if node.copies is None else node.copies.busy)


def has_copy(node: Node) -> bool:
    """Whether the node has a page in the pool or a copy in a tier."""
    return node.page != NONE or (node.copies is not None and node.copies.any)


def root_of(node: Node) -> Node:
    """The root of the node's cache salt."""
    while node.parent is not None:
        node = node.parent
    return node
