"""A node of the prefix cache: one cached page, its copies in the host and disk tiers, and the operations on them."""

from dataclasses import dataclass, field

from headrace.core.types.kv.kv_tiers import Tier

TIERS: tuple[Tier, ...] = ("host", "disk")  # nearest first
NONE = -1  # no page of the pool, no slot of a tier


class TierCopies:
    """What the tiers have of a node and below it; only nodes that need it have one."""

    __slots__ = ("busy", "children", "leaving", "load", "slots")

    def __init__(self) -> None:
        self.slots: dict[Tier, int] = {"host": NONE, "disk": NONE}
        """Its slot in each tier."""

        self.children: dict[Tier, int] = {"host": 0, "disk": 0}
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
        return self.slots["host"] != NONE or self.slots["disk"] != NONE


class Node:
    """One cached page, or the root of a cache salt."""

    __slots__ = (
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
        """What the host and disk tiers have of it, or have of its children."""

        self.locks = 0
        """Leases whose path runs through it, and copies of its page that are under way."""

        self.used = 0
        """Tick of its last use."""

        self.turn = 0
        """Turn of the conversation that used it last."""

        self.rank = 0
        """Its place in the eviction order, as of its last use; equal ones go by `used`."""


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


def has_copy(node: Node) -> bool:
    """Whether the node has a page in the pool or a copy in a tier."""
    return node.page != NONE or (node.copies is not None and node.copies.any)
