"""Slots of states: one for each lease of a model that keeps any, and leases wait for them as they do for pages."""

from headrace.core.types.packed import pack
from headrace.scheduler.kv.kv_cache import KvCache

PAGE, SLOTS = 4, 3


def test_a_lease_has_a_slot_of_its_own_until_it_ends() -> None:
    cache = KvCache(64, PAGE)
    cache.reset(64, slots=SLOTS)
    tokens = pack(range(10))
    leases = [cache.acquire(tokens, "") for _ in range(SLOTS)]
    assert sorted(lease.slot for lease in leases if lease is not None) == [0, 1, 2]
    assert cache.acquire(tokens, "") is None
    assert cache.free == 64 - SLOTS * 3
    assert cache.check() == []
    second = leases[1]
    assert second is not None
    version = cache.version
    cache.release(second)
    assert cache.version > version
    last = cache.acquire(tokens, "")
    assert last is not None
    assert last.slot == second.slot
    assert cache.check() == []


def test_pages_without_the_state_behind_them_are_not_cached() -> None:
    cache = KvCache(64, PAGE)
    tokens = pack(range(9))
    for slots, matched in ((0, 2), (SLOTS, 0), (0, 2)):
        cache.reset(64, slots=slots)
        lease = cache.acquire(tokens, "")
        assert lease is not None
        assert (lease.slot >= 0) is bool(slots)
        cache.publish(lease, tokens, 9)
        cache.release(lease)
        again = cache.acquire(tokens, "")
        assert again is not None
        assert again.matched == matched
        cache.release(again)


def test_a_lease_that_gets_no_pages_takes_no_slot() -> None:
    cache = KvCache(4, PAGE)
    cache.reset(4, slots=SLOTS)
    assert cache.acquire(pack(range(17)), "") is None
    assert cache.acquire(pack(range(16)), "") is not None
    assert cache.check() == []
