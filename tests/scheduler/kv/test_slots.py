"""Slots of states: one for each lease of a model that keeps any, and leases wait for them as they do for pages."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.packed import pack
from headrace.scheduler.kv.kv_cache import KvCache, Lease

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


def run(
    cache: KvCache, tokens: list[int], chunk: int, kept: dict[int, list[int]], keep: int | None = None
) -> Lease | None:
    """Compute a prompt as the planner and an engine do. kept: what the state in each slot is of. keep: of the lease."""
    lease = cache.acquire(pack(tokens), "", keep=keep)
    if lease is None:
        return None
    start = lease.matched * PAGE
    assert (lease.resume >= 0) is (start > 0)
    if start:
        assert kept[lease.resume] == tokens[:start]
    while start < len(tokens):
        count = cache.cut(start, min(chunk, len(tokens) - start), len(tokens), keep)
        assert 1 <= count <= chunk
        start += count
        slot = cache.checkpoint(lease, start)
        kept[lease.slot] = tokens[:start]
        if slot >= 0:
            assert start % PAGE == 0
            kept[slot] = tokens[:start]
        assert cache.check() == []
        cache.publish(lease, pack(tokens), start)
    assert cache.check() == []
    return lease


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from([16, 64, 400]),
)
def test_a_request_goes_on_from_the_state_of_its_own_prefix(seed: int, slots: int, pages: int) -> None:
    random = Random(seed)
    cache, kept = KvCache(pages, PAGE), dict[int, list[int]]()
    cache.reset(pages, slots=slots)
    trunk = [random.randrange(3) for _ in range(1200)]
    open_leases: list[Lease] = []
    for _ in range(12):
        if open_leases and random.random() < 0.5:
            lease = open_leases.pop(random.randrange(len(open_leases)))
            lease.nonfinite = random.random() < 0.1
            cache.release(lease)
        length = random.choice((3, 9, 30, 300, 900))
        tokens = trunk[: random.randrange(length)] + [random.randrange(3) for _ in range(random.randrange(1, 9))]
        keep = random.choice((None, random.randrange(len(tokens) + PAGE)))
        lease_or_none = run(cache, tokens, random.choice((8, 100)), kept, keep)
        if lease_or_none is not None:
            open_leases.append(lease_or_none)
        assert cache.check() == []
    for lease in open_leases:
        cache.release(lease)
    assert cache.check() == []
    assert cache.leases == 0


def test_the_next_turn_of_a_conversation_goes_on_behind_the_last_whole_page() -> None:
    cache, kept = KvCache(400, PAGE), dict[int, list[int]]()
    cache.reset(400, slots=4)
    first = list(range(1, 602))
    lease = run(cache, first, 256, kept)
    assert lease is not None
    cache.release(lease)
    assert cache.cached_positions(pack([*first, 7, 8, 9]), "") == 512
    again = run(cache, [*first, *range(300)], 256, kept)
    assert again is not None
    assert again.matched == 512 // PAGE


def test_pages_whose_states_come_with_the_rest_are_used_without_a_checkpoint() -> None:
    cache = KvCache(64, PAGE)
    cache.reset(64, slots=SLOTS)
    tokens = pack(range(9))
    lease = cache.acquire(tokens, "", computed=False)
    assert lease is not None
    cache.publish(lease, tokens, 9)
    cache.release(lease)
    for computed, matched in ((False, 2), (True, 0)):
        again = cache.acquire(tokens, "", computed=computed)
        assert again is not None
        assert (again.matched, again.resume) == (matched, -1)
        cache.release(again)


def test_a_lease_that_gets_no_pages_takes_no_slot() -> None:
    cache = KvCache(4, PAGE)
    cache.reset(4, slots=SLOTS)
    assert cache.acquire(pack(range(17)), "") is None
    assert cache.acquire(pack(range(16)), "") is not None
    assert cache.check() == []


def test_a_prompt_that_keeps_its_prefix_alone_leaves_the_state_behind_it() -> None:
    """Others go on from there, though the prompt ends inside a page further on."""
    cache, kept = KvCache(64, PAGE), dict[int, list[int]]()
    cache.reset(64, slots=6)
    shared = list(range(30))
    for own, found in (([90], 0), ([91, 92, 93, 94, 95], 28), ([90], 28)):
        lease = run(cache, shared + own * 3, 16, kept, keep=29)
        assert lease is not None
        assert lease.matched * PAGE == found
        cache.release(lease)
        assert cache.cached == 7
    assert cache.check() == []
