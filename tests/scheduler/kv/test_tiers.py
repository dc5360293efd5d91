"""The host and disk tiers of the prefix cache: what is copied, what is loaded, and what a failure costs."""

from collections.abc import Iterable, Sequence

from headrace.core.types.kv.kv_tiers import PageHeader, Tier
from headrace.core.types.kv.page_digests import page_digest, root_digest
from headrace.core.types.packed import pack
from headrace.scheduler.kv.kv_cache import KvCache, Lease
from headrace.scheduler.kv.node import NONE, Node, PageLoad, StoringPages
from headrace.scheduler.kv.tier_slots import TierSlots
from tests.scheduler.growth import grown_bytes

A, B, C = [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]
LONG = [*range(31, 39)]


def everything(tiers: Sequence[Tier]) -> int:
    return len(tiers)


class Cache:
    """A cache with pages of one token, whose copies end when finish() is called."""

    def __init__(self, pages: int = 8, host: int = 0, disk: int = 0, disk_turn: int = 0) -> None:
        self.kv = KvCache(pages, 1, disk_turn=disk_turn)
        self.kv.reset(pages, host, disk)
        assert self.kv.tiers is not None
        self.tiers = self.kv.tiers
        self.tiers.disk_ready = True
        self.dropped: dict[Tier, list[int]] = {"host": [], "disk": []}

    def lease(self, tokens: Iterable[int], load: bool = True) -> Lease | None:
        """Lease pages for tokens and one more."""
        lease = self.kv.acquire(pack([*tokens, 99]), "", load=everything if load else None)
        assert self.kv.check() == []
        return lease

    def use(self, tokens: Sequence[int]) -> int:
        """Compute a prompt and end it. Returns the pages that were found or loaded."""
        packed = pack([*tokens, 99])
        lease = self.kv.acquire(packed, "", load=everything)
        while lease is None:
            assert self.finish(), "waits for copies"
            lease = self.kv.acquire(packed, "", load=everything)
        self.finish()
        self.kv.publish(lease, packed, len(tokens))
        self.kv.release(lease)
        self.finish()
        assert self.kv.check() == []
        return lease.matched

    def finish(self, failed: Iterable[int] = (), kinds: tuple[type, ...] = (StoringPages, PageLoad)) -> int:
        """End all copies under way; returns how many there were."""
        begun = [copy for copy in self.kv.copies_begun() if isinstance(copy, kinds)]
        for copy in begun:
            self.kv.copied(copy, set(failed))
            assert self.kv.check() == []
        for tier, dropped in self.dropped.items():
            dropped += self.tiers.slots(tier).dropped()
        return len(begun)

    def used(self, tier: Tier) -> int:
        return self.tiers.slots(tier).used


def test_cold_pages_leave_for_the_host_tier_and_come_back() -> None:
    cache = Cache(pages=9, host=20)
    for prompt in (A, B, C, LONG):
        cache.use(prompt)
    assert cache.used("host") == len(A + B + C)
    assert cache.use(A) == len(A), "loaded"
    assert cache.used("host") + cache.kv.cached == len(A + B + C + LONG), "nothing is lost"


def computed(cache: Cache, tokens: Sequence[int], finite: bool = True) -> Lease:
    """A lease of a prompt that was computed."""
    lease = cache.lease(tokens)
    assert lease is not None
    cache.kv.publish(lease, pack([*tokens, 99]), len(tokens))
    lease.nonfinite = not finite
    return lease


def test_pages_that_turn_out_bad_while_they_are_copied_are_dropped_when_that_ends() -> None:
    """To disk, and to the host tier to leave the pool: neither has them then, nor the pages before them."""
    for tiers in ({"disk": 20}, {"host": 20}):
        cache = Cache(pages=6, **tiers)
        cache.kv.release(computed(cache, A))
        if "host" in tiers:
            assert cache.lease(B) is None, "pages of A have to be copied"
        lease = computed(cache, A, finite=False)
        assert lease.matched == len(A)
        cache.kv.release(lease)
        assert cache.kv.check() == []
        assert cache.kv.free < 6, "they are being copied"
        assert cache.finish() == 1
        assert (cache.used("disk"), cache.used("host"), cache.kv.free) == (0, 0, 6)
        assert cache.use(A) == 0, "computed again"


def test_pages_that_another_lease_shows_to_be_good_stay() -> None:
    cache = Cache(pages=8, disk=20)
    cache.kv.release(computed(cache, A))
    bad, good = computed(cache, A, finite=False), computed(cache, A)
    cache.kv.release(bad)
    cache.kv.prove(good)
    cache.kv.release(good)
    assert cache.finish() == 1
    assert (cache.kv.cached, cache.used("disk")) == (len(A), len(A))


def test_a_page_is_in_the_pool_or_in_the_host_tier() -> None:
    cache = Cache(pages=6, host=20)
    for prompt in (A, B, C, A, B, C):
        cache.use(prompt)
        for node in cache.kv._tree.walk_all():
            in_host = node.copies is not None and node.copies.slots["host"] >= 0
            assert in_host != (node.page >= 0)


def test_the_host_tier_gives_up_its_coldest_leaves() -> None:
    cache = Cache(pages=6, host=5)
    for prompt in (A, B, C, [31, 32, 33, 34]):
        cache.use(prompt)
    assert cache.used("host") <= 5
    assert cache.dropped["host"]
    assert cache.use(A) < len(A)


def test_an_allocation_waits_for_copies_rather_than_lose_pages() -> None:
    cache = Cache(pages=4, host=8)
    cache.use([1, 2, 3])
    assert cache.lease([11, 12, 13]) is None
    assert cache.finish() == 1
    assert cache.lease([11, 12, 13]) is not None
    assert cache.used("host") == 3


def test_a_store_that_fails_loses_the_page_and_makes_room_all_the_same() -> None:
    cache = Cache(pages=4, host=8)
    cache.use([1, 2, 3])
    assert cache.lease([11, 12, 13]) is None
    cache.finish(failed=range(3))
    assert cache.lease([11, 12, 13]) is not None
    assert cache.used("host") == 0
    assert sorted(cache.dropped["host"]) == [0, 1, 2]


def test_a_page_that_is_used_again_while_it_is_stored_stays() -> None:
    cache = Cache(pages=5, host=8)
    cache.use([1, 2, 3])
    assert cache.lease([11, 12, 13]) is None, "1, 2, 3 are on their way out"
    again = cache.lease([1, 2, 3])
    assert again is not None
    assert again.matched == 3
    cache.finish()
    assert (cache.used("host"), len(cache.dropped["host"])) == (0, 2), "of the two pages that would have sufficed"


def nodes(cache: Cache, tokens: Sequence[int]) -> list[Node]:
    """What the tree has of a prompt."""
    return cache.kv._tree.find(cache.kv._keys(pack(tokens), 0, len(tokens), None, ""), "")


def in_host(host: int) -> Cache:
    """A cache with the pages of A in the host tier, and those of LONG in the pool, one page of which is free."""
    cache = Cache(pages=9, host=host)
    cache.use(A)
    cache.use(LONG)
    assert len(cache.tiers.loadable(nodes(cache, A), 0)) == 4
    return cache


def loading(cache: Cache) -> Lease:
    """A lease on A, which waits for its pages."""
    while (lease := cache.lease(A)) is None:
        assert cache.finish()
    assert lease.load is not None
    assert lease.matched == 4
    return lease


def test_what_is_loaded_is_not_given_up_to_make_room_for_it() -> None:
    cache = in_host(host=4)
    assert cache.used("host") == 4, "it is full"
    loading(cache)


def test_a_load_that_fails_costs_what_was_not_loaded() -> None:
    cache = in_host(host=20)
    lease = loading(cache)
    cache.kv.release(lease)  # as the request begins again
    cache.finish(failed=[2])
    assert [node.page >= 0 for node in lease.path] == [True, True, False, False]
    again = cache.lease(A)
    assert again is not None
    assert (again.matched, again.load) == (2, None), "the bad page and the one behind it are gone from the tier"


def test_two_requests_share_a_load() -> None:
    cache = in_host(host=20)
    first = loading(cache)
    while (second := cache.lease(A)) is None:
        assert cache.finish(kinds=(StoringPages,))
    assert second.load is first.load
    assert list(first.pages[:4]) == list(second.pages[:4])


def test_a_request_that_computes_what_is_being_loaded_does_not_rely_on_it() -> None:
    cache = Cache(pages=13, host=20)
    cache.use(A)
    cache.use([*LONG, 41, 42, 43, 44])
    while (computing := cache.lease(A, load=False)) is None:
        assert cache.finish()
    waiting = loading(cache)
    cache.kv.publish(computing, pack(A), 4)
    assert len(computing.path) < 4
    cache.kv.release(waiting)
    cache.finish(failed=range(4))
    cache.kv.publish(computing, pack(A), 4)
    assert len(computing.path) == 4
    assert cache.kv.check() == []


def test_pages_of_later_turns_are_written_to_disk_and_stay_there() -> None:
    cache = Cache(pages=16, disk=16, disk_turn=1)
    cache.use(A)
    assert cache.used("disk") == 0, "a first turn"
    cache.use([*A, 5])
    assert cache.used("disk") == 5, "with all pages before them"
    cache.use([*A, 5, 6])
    assert cache.used("disk") == 6, "no page is written twice"


def test_a_page_on_disk_is_loaded_and_not_written_again() -> None:
    cache = Cache(pages=9, disk=16)
    cache.use(A)
    cache.use(LONG)
    assert cache.used("disk") == 4 + 4, "half of the pool at once"
    assert cache.use(A) == 4
    assert cache.used("disk") == 8
    assert cache.dropped["disk"] == []


def test_a_page_whose_parent_could_not_be_written_is_not_on_disk_either() -> None:
    cache = Cache(pages=8, disk=16)
    lease = cache.lease(A)
    assert lease is not None
    cache.kv.publish(lease, pack(A), 4)
    cache.kv.release(lease)
    cache.finish(failed=[1])
    assert cache.used("disk") == 1
    assert len(cache.dropped["disk"]) == 3


def test_slots_that_the_disk_lost_take_their_subtree_with_them() -> None:
    cache = Cache(pages=8, disk=16)
    cache.use(A)
    second = nodes(cache, A)[1].copies
    assert second is not None
    cache.tiers.lost("disk", [second.slots["disk"]])
    assert cache.used("disk") == 1
    assert cache.kv.check() == []


def test_the_disk_tier_is_full_and_keeps_what_is_worth_more() -> None:
    cache = Cache(pages=16, disk=6)
    for prompt in (A, B, C):
        cache.use(prompt)
        assert cache.used("disk") <= 6
    assert cache.dropped["disk"]


def headers(tokens: Sequence[int], salt: str = "") -> list[PageHeader]:
    root = parent = root_digest(salt.encode())
    made = []
    for token in tokens:
        digest = page_digest(parent, pack([token]))
        made.append(PageHeader(digest, parent, root, 3))
        parent = digest
    return made


def test_a_restart_finds_the_chains_whose_parents_are_there() -> None:
    cache = Cache(pages=16, disk=32)
    a, b, other = headers(A), headers(B), headers(A, "tenant")
    found = [*enumerate(a), *((10 + index, header) for index, header in enumerate(b) if index != 1), (20, other[0])]
    assert cache.tiers.restore(reversed(found)) == 4 + 1 + 1
    assert cache.used("disk") == 6
    assert cache.kv.check() == []
    lease = cache.lease(A)
    assert lease is not None
    assert (lease.matched, lease.turn) == (4, 4)
    cache.finish()
    assert cache.use(B) == 1


def test_two_slots_with_the_same_page_count_once() -> None:
    cache = Cache(pages=16, disk=32)
    assert cache.tiers.restore([(1, headers(A)[0]), (2, headers(A)[0])]) == 1
    assert cache.used("disk") == 1


def test_without_tiers_pages_are_keyed_by_their_tokens() -> None:
    kv = KvCache(4, 1)
    lease = kv.acquire(pack([7, 8]), "")
    assert lease is not None
    kv.publish(lease, pack([7, 8]), 2)
    assert [node.key for node in lease.path] == [pack([7]), pack([8])]
    assert [node.copies for node in lease.path] == [None, None]


def test_copies_that_a_tier_loses_take_up_no_memory() -> None:
    """A disk that takes no page: the tier is never full, so that no candidate for its eviction comes up."""
    slots, root = TierSlots("disk", 100), Node(b"", NONE, None, 0)

    def lose(number: int) -> None:
        node = Node(number.to_bytes(8), NONE, root, number)
        slots.assign(node)
        slots.offer(node)
        slots.release(node)
        slots.dropped()

    assert grown_bytes(lose) < 50_000
