"""The KV pool of an engine: leases on its pages, and the prefix cache.

A lease is the right of one request to KV pages, and to a slot for its states where the model keeps any. It has one
owner and one end.

pool   = free | tree (cached) | private
leased = private pages of leases + pages of the tree that some lease has locked

    lease.pages:   p0   p1   p2   p3   p4        the request's page table, position // page_size
    lease.path:    n0   n1   n2                  locked nodes of the tree for its first pages
                   n0.page == p0: the tree owns p0;  n1.page != p1: an equal page was there first, p1 is private
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.core.config.scheduler import Eviction
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.kv.kv_tiers import NONE_LOADED, TIERS, Tier, TierTokens
from headrace.core.types.kv.page_digests import page_digests
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.images import ImageInput, page_key
from headrace.core.types.requests.kv_return import PoolForecast
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.eviction import MAX_TURN, SHORT_TOKENS, make_ranking
from headrace.scheduler.kv.node import NONE, Node, PageCopy, PageLoad, StoringPages, load_of, root_of
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.kv.prefix_tree import PrefixTree, next_turn, pages_of
from headrace.scheduler.kv.state_slots import CHECKPOINT_TOKENS, StateSlots, resumable
from headrace.scheduler.kv.tiers import KvTiers, nearest
from headrace.scheduler.kv.turn_chances import TurnChances
from headrace.scheduler.kv.unproven import Unproven

GHOSTS_PER_PAGE = 4  # evicted pages that are remembered, for each page of the pool; a few hundred bytes each
LOW_WATER = 16  # one page of so many is kept free, where evicted pages are copied to the host tier
COPYING = 2  # at most one page of so many is being written to disk
LOADING = 2  # at most one page of so many is being loaded
TREE = -1  # owner of the pages in the tree; leases own theirs by positive numbers

LoadChoice = Callable[[Sequence[Tier]], int]  # tiers of the pages that follow -> how many to load


@dataclass(slots=True, eq=False)
class Lease:
    """The right of one request to KV pages; ended by KvCache.release()."""

    owner: int
    """Owner of its private pages in the allocator."""

    salt: str
    images: Sequence[ImageInput]
    pages: "array[int]"
    """The page table: the page of position p is pages[p // page_size]."""

    path: list[Node]
    """Locked nodes of the prefix tree for its first pages."""

    matched: int
    """Pages that were found in the tree when the lease began, and those that are loaded for it."""

    load: PageLoad | None = None
    """Pages of its path are being filled by this operation: nothing is computed before it has ended."""

    keep: int | None = None
    """The tree gets none of its pages behind so many positions; None: all that are full."""

    turn: int = 0
    """The request's turn of its conversation, from 0."""

    short: bool = False
    """It is the first turn, and of few tokens."""

    slot: int = -1
    """Of its states; -1 where the model keeps none."""

    resume: int = -1
    """Slot of the checkpoint that it begins from, behind the pages that were found; -1: there is none."""

    pending: "dict[int, int]" = field(default_factory=dict)
    """Checkpoints that passes under way make: slots, by pages of its table."""

    tenant: str = ""
    """Whose pages those are that it adds to the tree: the name of an API key, "" for none."""

    to_retain: int = 0
    """Pages of it that its tenant is to retain when it has ended: it has room for them."""

    proven: int = -1
    """What Unproven.prove() has returned for its path."""

    ended: bool = False
    nonfinite: bool = False
    """Results computed from its pages were NaN or infinite: release() takes them out of the tree."""

    def from_tiers(self, page_size: int) -> TierTokens:
        """Tokens of the pages that are being loaded for it, by the tier that they come from."""
        if self.load is None:
            return NONE_LOADED
        own = set(map(id, self.path))
        tiers = Counter(tier for node, tier in zip(self.load.nodes, self.load.tiers, strict=True) if id(node) in own)
        return _by_tier(tiers, page_size)


@dataclass(slots=True, eq=False)
class PagePrefetch:
    """Pages that are loaded before the request comes that needs them."""

    load: PageLoad
    tokens: bytes
    salt: str
    path: list[Node]
    """The nodes of the load, and those before them."""


class KvCache:
    """The KV pool of one engine: the page allocator, the prefix tree, and the leases on both."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        prefix_cache: bool = True,
        events: CacheEventLog | None = None,
        eviction: Eviction = "lru",
        short_tokens: int = SHORT_TOKENS,
        disk_turn: int = 1,
        retain_percent: int = 0,
    ) -> None:
        """events: is told of every page that the tree gains or loses. eviction: which cached pages leave first, see
        eviction.py. short_tokens: a first prompt of at most so many tokens is short. disk_turn: requests
        from this turn of their conversation on are written to disk, where there is a disk tier. retain_percent: of
        the pool, which each tenant may retain."""
        self._events = events
        self.page_size = page_size
        """Token positions in one page."""

        self._prefix_cache = prefix_cache
        self._allocator = PageAllocator(pages)
        self._slots = StateSlots()
        self._eviction = eviction
        self._short_tokens = short_tokens
        self._disk_turn = disk_turn
        self._retain_percent = retain_percent
        self.tiers: KvTiers | None = None
        """The tiers, if there is one."""

        self.chances = TurnChances(short_tokens)
        """What its turns and evictions were followed by."""

        self._tree = self._new_tree(pages, 0, 0)
        self._leases: dict[int, Lease] = {}
        self._unproven = Unproven()
        self._prefetches: list[PagePrefetch] = []
        self._owners = 0
        self.version = 0
        """Rises whenever a lease that was refused might now be granted."""

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self._allocator.total

    @property
    def free(self) -> int:
        """Pages that are neither leased nor in the tree."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Pages in the tree that no lease uses."""
        return self._tree.unlocked

    @property
    def leased(self) -> int:
        """Pages that some lease uses."""
        return self.total - self.free - self.cached

    @property
    def slots(self) -> dict[str, int]:
        """Slots for states, by use: free, checkpoint or leased."""
        slots = self._slots
        kept = {"free": slots.free, "checkpoint": slots.checkpoints}
        return {**kept, "leased": slots.total - sum(kept.values())}

    @property
    def has_states(self) -> bool:
        """Requests have states, beside their pages."""
        return self._slots.total > 0

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def copying(self) -> bool:
        """Pages are being copied from or to tiers."""
        return self.tiers is not None and self.tiers.leaving + self.tiers.archiving + self.tiers.loading > 0

    def reset(
        self, pages: int, host_pages: int = 0, disk_pages: int = 0, slots: int = 0, library_pages: int = 0
    ) -> None:
        """Start over with an empty pool of so many pages: the one before is gone with its engine, and so is the host
        tier. host_pages, disk_pages: slots of the tiers; what the disk holds is restored by KvTiers. slots: of states;
        0 where requests need none. library_pages: of KV files, at most; they are entered by KvTiers. Raises ValueError
        while a lease has not ended."""
        if self._leases:
            raise ValueError(f"{len(self._leases)} leases have not ended")
        self._allocator = PageAllocator(pages)
        self._slots = StateSlots(slots)
        self._prefetches.clear()
        self._unproven.clear()
        self._tree = self._new_tree(pages, host_pages, disk_pages, library_pages)
        self.version += 1
        if self._events is not None:
            self._events.cleared()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many token positions."""
        return ceil_div(tokens, self.page_size)

    @property
    def tree_version(self) -> int:
        """Rises whenever cached_positions() may give another answer."""
        return self._tree.version

    def cached_positions(
        self,
        tokens: bytes | bytearray,
        salt: str,
        images: Sequence[ImageInput] = (),
        cacheable: int | None = None,
    ) -> int:
        """Positions of packed tokens that acquire() would find in the tree now."""
        path = pages_of(self._known(tokens, salt, images, cacheable))
        return len(resumable(path) if self._slots.total else path) * self.page_size

    def held(self, tokens: bytes | bytearray, salt: str, images: Sequence[ImageInput] = ()) -> tuple[int, TierTokens]:
        """Positions of packed tokens that acquire_held() can lease, the last token's among them: those that the pool
        has, and those behind them that the tiers have. None where requests have states, which only checkpoints have."""
        return self._held([] if self._slots.total else self._known(tokens, salt, images, whole=True))

    def forecast(self, tokens: bytes | bytearray, salt: str, tenant: str = "") -> PoolForecast:
        """What the pool and the tiers have of packed tokens, and what may be expected of a turn with them. tenant: who
        is to retain them."""
        known = [] if self._slots.total else self._known(tokens, salt, whole=True)
        cached, in_tiers = self._held(known)
        turn = max(0, next_turn(known) - 1) if cached else 0
        retainable = _retained(pages_of(known)) + self._tree.retention.room(tenant)
        return PoolForecast(
            cached=cached,
            in_tiers=in_tiers,
            retainable=retainable * self.page_size,
            free=self.free,
            evictable=self.cached,
            turn_chance=self.chances.next_turn(turn, len(tokens) // ITEM_BYTES),
            again_chance=self.chances.needed_again,
        )

    def acquire(
        self,
        tokens: bytes | bytearray,
        salt: str,
        images: Sequence[ImageInput] = (),
        *,
        extra: int = 0,
        cacheable: int | None = None,
        load: LoadChoice | None = None,
        computed: bool = True,
        whole: bool = False,
        piece: bool = False,
        tenant: str = "",
        keep: int | None = None,
        spare: bool = False,
    ) -> Lease | None:
        """Lease pages for packed tokens and extra positions behind them; None when they do not fit now. images: among
        the tokens.

        Pages found in the tree are used, but never for the last token: it has to be computed to get logits. cacheable:
        positions that they may serve; None: all. load: how many of the pages that follow in other tiers are to be
        loaded; Lease.load is set when some are. computed: what follows is computed here, so that it needs the state
        behind the pages that are found; False: states come with what follows. whole: pages that are found may be those
        of the last token, too, as nothing is computed from them. piece: what is computed is a part of an open prompt,
        and no turn of its conversation. keep: see Lease. tenant: name of the API key that the prompt came with, "" for
        none. spare: the tenant is to retain its pages: not more than it may, and no page that is retained gives way.
        """
        length = len(tokens) // ITEM_BYTES
        known = self._known(tokens, salt, images, cacheable, whole=whole)
        path, turn = pages_of(known), next_turn(known)
        again = len(known) - len(path)
        begins = computed and not (whole or piece)
        if whole or piece:
            turn = max(0, turn - 1)  # it goes on with none: the turn is that of the pages
        if self._slots.total and computed:
            path = resumable(path)
        if self.tiers is not None and load is None:
            path = _loaded(path)  # the rest is being loaded
        to_retain = self.pages_for(length) - _retained(path) if spare else 0
        if to_retain and to_retain > self._unclaimed(tenant):
            return None
        further = self._further(known, len(path), load)
        taken = self._take_behind(path, self.pages_for(length + extra) - len(path), further, spare=spare)
        if taken is None:
            return None
        pages, slot = taken
        table = array("i", [node.page for node in path])
        table.extend(pages)
        self._load(further, pages, tenant)
        path.extend(further)
        short = turn == 0 and length <= self._short_tokens
        loading = load_of(path[-1]) if path else None
        lease = Lease(
            self._owners, salt, images, table, path, len(path), loading, keep, turn, short, slot, tenant=tenant
        )
        lease.to_retain = to_retain
        if self._slots.total and computed and path:
            lease.resume = self._slots.used(path[-1])
        self._leases[lease.owner] = lease
        if begins:
            self.chances.began(turn, len(known) * self.page_size, length, again)
        return lease

    def _take_behind(
        self, path: list[Node], count: int, further: Sequence[Node], *, spare: bool
    ) -> tuple[list[int], int] | None:
        """Lock a path and take so many pages to go behind it, and a slot where requests have states, for a new owner.
        further: nodes that stay meanwhile. spare: see acquire(). None where they do not fit: nothing is locked then."""
        self._tree.lock(path)
        self._owners += 1
        slot = self._slots.take(self._owners)
        refused = self._slots.total and slot == NONE
        pages = None if refused else self._take(count, self._owners, wait=not spare, keep=further, spare=spare)
        if pages is not None:
            return pages, slot
        if slot != NONE:
            self._slots.give_back(slot, self._owners)
        self._tree.unlock_unused(path)
        return None

    def acquire_held(
        self, tokens: bytes | bytearray, salt: str, images: Sequence[ImageInput] = (), tenant: str = ""
    ) -> Lease | None:
        """Lease the pages of packed tokens, whole ones that held() counts, to be handed over: those in tiers are loaded
        whatever that takes. None where they do not fit, or more are being loaded than may be, now."""
        known = self._known(tokens, salt, images, whole=True)
        resident = len(pages_of(known))
        if resident + len(self._further(known, resident, len)) < self.pages_for(len(tokens) // ITEM_BYTES):
            return None
        return self.acquire(tokens, salt, images, load=len, whole=True, tenant=tenant)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Add pages until the lease holds this many positions; False (and nothing added) when none can be had."""
        pages = self._take(self.pages_for(tokens) - len(lease.pages), lease.owner)
        if pages is None:
            return False
        lease.pages.extend(pages)
        return True

    def publish(self, lease: Lease, tokens: bytes | bytearray, computed: int) -> None:
        """Insert the lease's full pages among the first computed positions into the prefix tree, as far as it is kept.

        Where the tree already has an equal page, the lease keeps its own, and later pages go below that one.
        """
        if not self._prefix_cache:
            return
        first, end = len(lease.path), self._kept(lease.keep, computed) // self.page_size
        keys = self._keys(tokens, first, end, lease.path[-1] if lease.path else None, lease.salt, lease.images)
        for index, key in enumerate(keys, first):
            parent = lease.path[-1] if lease.path else None
            node = self._tree.child(parent, lease.salt, key)
            if node is None:
                page = lease.pages[index]
                self._allocator.transfer(page, lease.owner, TREE)
                content = None if self.tiers is None else self._page_key(tokens, index, lease.images)
                node = self._tree.insert(parent, lease.salt, key, page, content, lease.tenant)
                self.version += 1
            elif load_of(node) is not None:
                return  # an equal page is being loaded, and it is not certain that it can be
            else:
                self._tree.lock([node])
            lease.path.append(node)
        for index in [index for index in lease.pending if index < len(lease.path)]:
            self._slots.attach(lease.pending.pop(index), lease.owner, lease.path[index])

    def leave(self, lease: Lease, tokens: bytes | bytearray, positions: int) -> int:
        """The fetch of a lease has failed, and its first positions have come: publish the full pages among them, free
        all others. Returns how many pages the lease has left.

        Nothing has shown yet that what came is finite. Such pages stay in the tree as long as leases use them, and
        beyond that only if prove() has been called for one of those.
        """
        self.share(lease, tokens, positions)
        kept = len(lease.path)
        self._allocator.release(lease.pages[kept:].tolist(), lease.owner)
        del lease.pages[kept:]
        self.version += 1
        return kept

    def share(self, lease: Lease, tokens: bytes | bytearray, positions: int) -> None:
        """The first positions of a fetch have come, which goes on: publish the full pages among them. See leave()."""
        found = len(lease.path)
        self.publish(lease, tokens, positions)
        came = zip(lease.path[found:], lease.pages[found:], strict=False)
        self._unproven.doubt(node for node, page in came if node.page == page)

    def prove(self, lease: Lease) -> None:
        """What was computed from the pages of a lease is finite."""
        lease.proven = self._unproven.prove(lease.path, lease.proven)

    def proven(self, lease: Lease) -> int:
        """How many of the first pages of a lease's path are known to be finite, as far as pages are."""
        return self._unproven.proven(lease.path)

    @property
    def _keeps_checkpoints(self) -> bool:
        """Passes leave copies of states, for prompts that go on from there."""
        return self._prefix_cache and self._slots.total > 0

    @staticmethod
    def _kept(keep: int | None, positions: int) -> int:
        """How many of the first positions of a lease the tree may have the pages of. keep: see Lease."""
        return positions if keep is None else min(keep, positions)

    def cut(self, start: int, count: int, target: int, keep: int | None = None) -> int:
        """How many of the next count positions of a request to compute in one pass, so that it ends where a checkpoint
        may be kept: at a page's end, and at the last one before its target if that is worth a pass of its own. keep:
        see Lease; the pass that reaches it ends there."""
        if not self._keeps_checkpoints:
            return count
        end = start + count
        if keep is not None and end >= (kept := keep - keep % self.page_size):
            return kept - start if start < kept else count
        last = end if end < target else target - 1
        aligned = last - last % self.page_size
        least = 1 if end < target else CHECKPOINT_TOKENS
        return aligned - start if aligned - start >= least else count

    def checkpoint(self, lease: Lease, end: int) -> int:
        """A pass computes a lease's positions below end: returns the slot in which the state behind them is to be kept,
        -1 for none."""
        if not self._keeps_checkpoints or end % self.page_size or self._kept(lease.keep, end) < end:
            return NONE
        slot = self._slots.keep(lease.owner, lease.path)
        if slot != NONE:
            lease.pending[end // self.page_size - 1] = slot
        return slot

    def release(self, lease: Lease) -> None:
        """End a lease: unlock its path, free its private pages. Raises ValueError when it has already ended.

        The path of a nonfinite lease leaves the tree, except pages that other requests use or that have children: the
        results of those requests show whether the pages are good. So do pages that a failed fetch has left, once no
        lease uses them any more, unless results have shown it (see leave()).
        """
        if lease.ended:
            raise ValueError("the lease has already ended")
        lease.ended = True
        del self._leases[lease.owner]
        self._allocator.release(self._private(lease), lease.owner)
        for slot in self._slots_of(lease):
            self._slots.give_back(slot, lease.owner)
        good = 0 if lease.nonfinite else self.proven(lease)
        if self.tiers is not None and good:
            self.tiers.archive(lease.path[:good], lease.turn, self.total // COPYING)
        self._tree.unlock(lease.path, lease.turn, lease.short)
        if good < len(lease.path):
            self._drop(lease.path[good:], bad=lease.nonfinite)
        self.version += 1

    def _drop(self, path: list[Node], bad: bool) -> None:
        """Take pages out of the tree whose KV may be of no use, up to one that is used or has children. bad: results
        computed from them say so; what others use of them has to be shown to be good, and what is being copied is
        dropped then."""
        in_use = max((index for index, node in enumerate(path, 1) if node.locks), default=0)
        if bad:
            for node in path:
                self._slots.forget(node)
            if self.tiers is not None:
                self.tiers.purge(path)
            self._unproven.doubt(path[:in_use])
        self._allocator.release(self._tree.drop(path), TREE)
        self._unproven.forget(path[in_use:])

    def resident(self, tokens: bytes | bytearray, salt: str) -> list[Node]:
        """The pages that the pool has of packed tokens."""
        return pages_of(self._known(tokens, salt, whole=True))

    def retain(self, path: Sequence[Node], until: float, priority: int) -> int:
        """Keep the pages of resident(), or of a lease's path beyond its end, in the pool until a time; returns of how
        many that was granted. priority: of the tenant's pages, those of a higher one displace others beyond its
        bound."""
        return self._tree.retain(path, until, priority)

    def commit(self, path: Sequence[Node]) -> None:
        """The prompt of a lease's path has come: an open prompt that had its pages retained is not open any more."""
        self._tree.retention.commit(path)

    def prefetch(self, tokens: bytes | bytearray, salt: str, tenant: str, until: float, priority: int) -> int:
        """Load the pages that the tiers have of packed tokens, and keep them and those before them in the pool until a
        time. Returns of how many that was granted: pages are loaded within the tenant's bound."""
        known = self._known(tokens, salt, whole=True)
        path = pages_of(known)
        kept = self._tree.retain(path, until, priority)
        if self.tiers is None or kept < len(path):
            return kept
        room = min(self._unclaimed(tenant), self.total // LOADING - self.tiers.loading)
        nodes = self.tiers.loadable(known, len(path))[: max(0, room)]
        if not nodes:
            return kept
        self._owners += 1
        self._tree.lock(path)
        self.tiers.pin(nodes)
        pages = self._take(len(nodes), self._owners, spare=True)
        self.tiers.unpin(nodes)
        self._tree.unlock_unused(path)
        if pages is None:
            return kept
        load = self._fill(nodes, pages, tenant, used=False)
        self._prefetches.append(PagePrefetch(load, bytes(tokens), salt, path + nodes))
        return kept + self._tree.retain(nodes, until, priority)

    def demote(self, path: Sequence[Node]) -> int:
        """Copy the last pages of resident(), or of a lease that has ended, to the host tier, or else to disk, to leave
        the pool; up to one that others use. Returns how many."""
        tiers = self.tiers
        if tiers is None:
            return 0
        if tiers.slots("host").total and (count := tiers.demote(path)):
            return count
        if not (tiers.disk_ready and tiers.may_write):
            return 0
        if count := self._tree.let_go(path):
            tiers.archive(path, MAX_TURN, self.total // COPYING)
        return count

    def demotable(self, lease: Lease) -> int:
        """Pages that demote() would take if the lease ended now, and the host tier has room."""
        tiers = self.tiers
        if tiers is None or not (tiers.slots("host").total or (tiers.disk_ready and tiers.may_write)):
            return 0
        return len(self._tree.unused(lease.path, leases=1))

    def let_go(self, path: Sequence[Node]) -> int:
        """Have the last pages of resident(), or of a lease that has ended, leave the pool before all others, up to one
        that others use. Returns how many."""
        return self._tree.let_go(path)

    def expire(self, now: float) -> None:
        """End what is retained until now or less."""
        self._tree.retention.expire(now)

    @property
    def retained(self) -> int:
        """Pages that are retained."""
        return len(self._tree.retention)

    def copies_begun(self) -> list[PageCopy]:
        """The copies of pages that are to be ordered now. Cold pages are copied before the pool is full."""
        if self.tiers is None:
            return []
        self._make_room(self.total // LOW_WATER, spare=True)
        return self.tiers.begun()

    def copied(self, copy: PageCopy, failed: set[int]) -> None:
        """A copy of pages has ended on all stages; failed: indices of pages that failed on one of them. For a load:
        leases on those, and on pages after them, have ended."""
        assert self.tiers is not None, "it has begun the copy"
        freed = self.tiers.stored(copy, failed) if isinstance(copy, StoringPages) else self.tiers.loaded(copy, failed)
        self._allocator.release(freed, TREE)
        for path in self._unproven.paths(copy.nodes):
            self._drop(path, bad=True)
        self.version += 1
        for prefetch in [one for one in self._prefetches if one.load is copy]:
            self._prefetches.remove(prefetch)
            for index, node in enumerate(pages_of(prefetch.path)):
                self._tree.announce(node, prefetch.salt, self._page_key(prefetch.tokens, index, ()))

    def loaded(self, lease: Lease, tokens: bytes | bytearray) -> None:
        """The pages of a lease have been filled: it can be used."""
        assert lease.load is not None, "it has waited for them"
        for index, node in enumerate(lease.path):
            self._tree.announce(node, lease.salt, self._page_key(tokens, index, lease.images))
        lease.load = None

    def check(self) -> list[str]:
        """Discrepancies; none when free + cached + leased pages are the pool and the locks match the leases."""
        problems: list[str] = []
        locks: dict[int, int] = {}
        private = 0
        owner = self._allocator.owner
        for lease in self._leases.values():
            own = self._private(lease)
            private += len(own)
            for node in lease.path:
                locks[node.number] = locks.get(node.number, 0) + 1
            if lease.keep is not None and len(lease.path) > max(lease.matched, lease.keep // self.page_size):
                problems.append(f"lease {lease.owner} keeps {len(lease.path)} pages, beyond position {lease.keep}")
            if foreign := [page for page in own if owner(page) != lease.owner]:
                problems.append(f"lease {lease.owner} holds pages of others: {foreign}")
        nodes = unlocked = 0
        if self.tiers is not None:
            problems += self.tiers.check(self._tree.walk_all())
        for node in self._tree.walk():
            nodes += 1
            unlocked += node.locks == 0
            expected = locks.get(node.number, 0) + (0 if node.copies is None else node.copies.busy)
            if node.locks != expected:
                problems.append(f"page {node.page} has {node.locks} locks, leases and copies count {expected}")
            if owner(node.page) != TREE:
                problems.append(f"page {node.page} is in the tree but owned by {owner(node.page)}")
        if nodes != self._tree.pages or unlocked != self._tree.unlocked:
            problems.append(f"the tree counts {self._tree.pages} pages, {self._tree.unlocked} unlocked; it has {nodes}")
        problems += self._tree.retention.check(self._tree.walk_all())
        if stray := self._unproven.stray(self._tree.walk()):
            problems.append(f"{len(stray)} unproven pages are in the tree that no lease and no copy uses")
        slots = {slot: lease.owner for lease in self._leases.values() for slot in self._slots_of(lease)}
        problems += self._slots.check(slots, self._tree.walk_all())
        if self.free + nodes + private != self.total:
            problems.append(f"{self.free} free + {nodes} in the tree + {private} private pages != {self.total}")
        return problems

    def _known(
        self,
        tokens: bytes | bytearray,
        salt: str,
        images: Sequence[ImageInput] = (),
        cacheable: int | None = None,
        *,
        whole: bool = False,
    ) -> list[Node]:
        """The nodes of the longest prefix that is known, ghosts among them, within the positions that are cacheable,
        and without the page of the last token unless it is to be whole. None without a prefix cache."""
        if not self._prefix_cache:
            return []
        computed = len(tokens) // ITEM_BYTES - (0 if whole else 1)
        full = (computed if cacheable is None else min(computed, cacheable)) // self.page_size
        return self._tree.find(self._keys(tokens, 0, full, None, salt, images), salt)

    def _held(self, known: Sequence[Node]) -> tuple[int, TierTokens]:
        """Positions of a path that are in the pool, and those behind them that are being loaded, or can be: no more
        than may be at a time."""
        pool = len(_loaded(pages_of(known)))
        further = [] if self.tiers is None else self.tiers.loadable(known, pool)
        tiers = Counter(map(nearest, further[: self.total // LOADING]))
        return pool * self.page_size, _by_tier(tiers, self.page_size)

    def _new_tree(self, pages: int, host_pages: int, disk_pages: int, library_pages: int = 0) -> PrefixTree:
        held = host_pages + disk_pages + library_pages
        has_tiers = self._prefix_cache and held > 0 and not self._slots.total
        ghosts = 0 if self._eviction == "lru" else GHOSTS_PER_PAGE * pages
        retained = pages * self._retain_percent // 100
        ranking = make_ranking(self._eviction)
        tree = PrefixTree(self._events, ranking, ghosts, digests=has_tiers, retained=retained)
        self.tiers = None
        if has_tiers:
            sizes: dict[Tier, int] = {"host": host_pages, "disk": disk_pages, "library": library_pages}
            self.tiers = KvTiers(tree, sizes, self._disk_turn, self._events)
        if self._slots.total:
            tree.on_change = self._slots.left
        return tree

    def _further(self, known: list[Node], resident: int, load: LoadChoice | None) -> list[Node]:
        """The nodes of a path that are to be loaded."""
        if self.tiers is None or load is None:
            return []
        nodes = self.tiers.loadable(known, resident)[: max(0, self.total // LOADING - self.tiers.loading)]
        return nodes[: load([nearest(node) for node in nodes])] if nodes else []

    def _load(self, nodes: list[Node], pages: list[int], tenant: str) -> None:
        """Begin to fill the first pages of a new lease, and lock them for it."""
        if nodes:
            self._fill(nodes, pages[: len(nodes)], tenant)
            self._tree.lock(nodes)

    def _fill(self, nodes: list[Node], pages: list[int], tenant: str, used: bool = True) -> PageLoad:
        """Begin to fill pages of the newest owner, which belong to the tree from now on."""
        assert self.tiers is not None, "the nodes have copies"
        self._tree.own(root_of(nodes[0]), tenant)
        for page in pages:
            self._allocator.transfer(page, self._owners, TREE)
        return self.tiers.load(nodes, pages, used)

    def _unclaimed(self, tenant: str) -> int:
        """Pages more that a tenant may retain, beyond those that it is to retain when their leases have ended."""
        claimed = sum(lease.to_retain for lease in self._leases.values() if lease.tenant == tenant)
        return self._tree.retention.room(tenant) - claimed

    def _take(
        self, count: int, owner: int, wait: bool = False, keep: Sequence[Node] = (), spare: bool = False
    ) -> list[int] | None:
        """Allocate count pages, evicting where needed; None when there are not that many. wait: pages that can be
        copied to the host tier are not evicted before. keep: nodes whose copies are not given up for others. spare:
        pages that are retained stay."""
        if count <= 0:
            return []
        if self.free < count:
            spared = self._tree.retention.unlocked if spare else 0
            if self.free + self.cached - spared < count:
                return None
            if wait and self._make_room(count, keep):
                return None
            if self.free < count:
                evicted = self._tree.evict(count - self.free, spare)
                self.chances.evicted(len(evicted))
                self._allocator.release(evicted, TREE)
        return self._allocator.allocate(count, owner) if self.free >= count else None

    def _make_room(self, count: int, keep: Sequence[Node] = (), spare: bool = False) -> bool:
        """Begin to copy cold pages to the host tier, until so many pages are free. True when that takes time. keep:
        nodes whose copies are not given up for them. spare: pages that are retained stay."""
        if self.tiers is None or not self.tiers.slots("host").total:
            return False
        missing = count - self.free - self.tiers.leaving
        if missing > 0:
            self.tiers.pin(keep)
            self._allocator.release(self.tiers.store(missing, spare), TREE)
            self.tiers.unpin(keep)
        return self.free < count and self.tiers.leaving > 0

    @staticmethod
    def _slots_of(lease: Lease) -> list[int]:
        """Slots that a lease owns."""
        return [slot for slot in (lease.slot, *lease.pending.values()) if slot >= 0]

    def _private(self, lease: Lease) -> list[int]:
        """Pages of a lease that the tree does not own."""
        own = [page for page, node in zip(lease.pages, lease.path, strict=False) if node.page != page]
        own.extend(lease.pages[len(lease.path) :])
        return own

    def _keys(
        self,
        tokens: bytes | bytearray,
        first: int,
        end: int,
        above: Node | None,
        salt: str,
        images: Sequence[ImageInput] = (),
    ) -> Iterator[bytes]:
        """Keys of the full pages [first, end), which come after the node above (None: the root)."""
        pages = (self._page_key(tokens, index, images) for index in range(first, end))
        if self.tiers is None:
            return pages
        return page_digests(pages, self._tree.root_key(salt) if above is None else above.key)

    def _page_key(self, tokens: bytes | bytearray, index: int, images: Sequence[ImageInput]) -> bytes:
        """What is on a full page."""
        return page_key(tokens, index * self.page_size, self.page_size, images)


def _by_tier(pages: Counter[Tier], page_size: int) -> TierTokens:
    return TierTokens(*(pages[tier] * page_size for tier in TIERS))


def _loaded(path: Sequence[Node]) -> list[Node]:
    """The first nodes of a path, up to one whose page is being loaded."""
    return list(takewhile(lambda node: load_of(node) is None, path))


def _retained(path: Sequence[Node]) -> int:
    """How many pages of a path are retained, which are its first ones."""
    return sum(node.retained is not None for node in path)
