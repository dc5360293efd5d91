"""Retention of cached pages: what is retained stays, and a tenant that retains what it likes harms itself."""

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config.scheduler import Eviction
from headrace.core.types.packed import pack
from headrace.core.types.requests.kv_hints import MAX_PRIORITY, OPEN_PRIORITY
from headrace.scheduler.kv.kv_cache import KvCache, Lease

PAGES = 24
PERCENT = 25
BOUND = PAGES * PERCENT // 100


def cache(pages: int = PAGES, percent: int = PERCENT, eviction: Eviction = "lru") -> KvCache:
    return KvCache(pages, 1, eviction=eviction, retain_percent=percent)


class Tenant:
    """Computes prompts under a name, one page a token."""

    def __init__(self, kv: KvCache, name: str) -> None:
        self.kv, self.name = kv, name

    def use(self, tokens: Sequence[int], until: float = 0.0, priority: int = 0) -> int:
        """Compute a prompt, and retain it until then. Returns of how many pages that was granted."""
        packed = pack(tokens)
        lease = self.kv.acquire(packed, self.name, tenant=self.name)
        assert lease is not None
        self.kv.publish(lease, packed, len(tokens))
        granted = self.kv.retain(lease.path, until, priority) if until else 0
        self.kv.release(lease)
        assert self.kv.check() == []
        return granted

    def cached(self, tokens: Sequence[int]) -> int:
        """Pages of a prompt that are in the pool."""
        return len(self.kv._tree.match([pack([token]) for token in tokens], self.name))


def prompt(number: int, length: int = 4) -> list[int]:
    return [100 * number + index for index in range(length)]


def test_a_retained_path_stays_until_its_time_and_no_longer() -> None:
    kv = cache()
    own, others = Tenant(kv, "own"), Tenant(kv, "others")
    assert own.use(prompt(1), until=10.0) == 4
    for number in range(2, 20):
        others.use(prompt(number))
    assert own.cached(prompt(1)) == 4
    assert kv.retained == 4
    kv.expire(9.9)
    assert kv.retained == 4
    kv.expire(10.0)
    assert kv.retained == 0
    others.use(prompt(20))
    assert own.cached(prompt(1)) == 0, "it stands where its last use has put it"


def test_another_page_of_the_tenant_leaves_instead() -> None:
    hinted, plain = cache(), cache()
    for kv in (hinted, plain):
        own, others = Tenant(kv, "own"), Tenant(kv, "others")
        own.use(prompt(1), until=10.0 if kv is hinted else 0.0)
        own.use(prompt(2))
        others.use(prompt(3))
        for number in range(4, 7):
            others.use(prompt(number))
        others.use([700, 701])  # two pages more than there are
    assert (Tenant(plain, "own").cached(prompt(1)), Tenant(plain, "own").cached(prompt(2))) == (2, 4)
    assert (Tenant(hinted, "own").cached(prompt(1)), Tenant(hinted, "own").cached(prompt(2))) == (4, 2)


def test_the_bound_is_for_each_tenant_and_a_higher_priority_displaces() -> None:
    kv = cache()
    own, other = Tenant(kv, "own"), Tenant(kv, "other")
    assert own.use(prompt(1), until=10.0) == 4
    assert own.use(prompt(2), until=20.0) == BOUND - 4
    assert other.use(prompt(1), until=10.0) == 4
    assert own.use(prompt(3), until=5.0, priority=1) == 4
    assert own.use(prompt(2), until=20.0) == BOUND - 4, "those that end first gave way"
    assert own.use(prompt(1), until=10.0) == 0
    assert kv.retained == BOUND + 4


def test_requests_without_a_name_share_one_bound() -> None:
    kv = cache()
    granted = []
    for salt in "abcdef":
        lease = kv.acquire(pack(prompt(1)), salt)
        assert lease is not None
        kv.publish(lease, pack(prompt(1)), 4)
        granted.append(kv.retain(lease.path, 10.0, 0))
        kv.release(lease)
    assert sum(granted) == BOUND
    assert kv.check() == []


def test_what_is_retained_gives_way_to_prompts_that_are_computed() -> None:
    kv = KvCache(12, 1, retain_percent=50)
    assert Tenant(kv, "a").use(prompt(1, 6), until=10.0) == 6
    assert Tenant(kv, "b").use(prompt(2, 6), until=10.0) == 6
    assert Tenant(kv, "c").use(prompt(3, 12)) == 0
    assert Tenant(kv, "c").cached(prompt(3, 12)) == 12
    assert kv.retained == 0


def test_a_shared_prefix_counts_once_and_keeps_its_longest_time() -> None:
    kv = cache()
    own = Tenant(kv, "own")
    assert own.use([1, 2, 3, 4], until=10.0) == 4
    assert own.use([1, 2, 5], until=20.0) == 3
    assert kv.retained == 5
    kv.expire(10.0)
    assert kv.retained == 3


def test_no_grant_without_a_share() -> None:
    kv = cache(percent=0)
    assert Tenant(kv, "own").use(prompt(1), until=10.0) == 0


def tiered(pages: int, percent: int) -> KvCache:
    kv = cache(pages, percent)
    kv.reset(pages, host_pages=100)
    return kv


def copy_all(kv: KvCache) -> None:
    for copy in kv.copies_begun():
        kv.copied(copy, set())
    assert kv.check() == []


def test_what_is_demoted_leaves_and_comes_back_by_a_prefetch() -> None:
    kv = tiered(32, 25)
    own = Tenant(kv, "own")
    own.use(prompt(1), until=10.0)
    tokens = pack(prompt(1))
    assert kv.demote(kv.resident(tokens, "own")) == 4
    copy_all(kv)
    assert (kv.resident(tokens, "own"), kv.retained) == ([], 0)
    assert kv.prefetch(tokens, "own", "own", 20.0, 0) == 4
    copy_all(kv)
    assert (len(kv.resident(tokens, "own")), kv.retained) == (4, 4)


def test_what_is_retained_while_it_is_copied_stays() -> None:
    kv = tiered(32, 25)
    own = Tenant(kv, "own")
    own.use(prompt(1))
    tokens = pack(prompt(1))
    assert kv.demote(kv.resident(tokens, "own")) == 4
    assert kv.prefetch(tokens, "own", "own", 20.0, 0) == 4, "all of it is in the pool still"
    copy_all(kv)
    assert (len(kv.resident(tokens, "own")), kv.retained) == (4, 4)


def test_what_is_retained_leaves_by_the_host_tier_where_a_prompt_needs_its_pages() -> None:
    kv = tiered(12, 100)
    own = Tenant(kv, "own")
    assert own.use(prompt(1, 12), until=10.0) == 12
    packed = pack(prompt(2, 8))
    assert kv.acquire(packed, "other", tenant="other") is None, "it waits for the copies"
    copy_all(kv)
    assert kv.acquire(packed, "other", tenant="other") is not None
    assert kv.retained == 4


def test_a_prefetch_keeps_to_the_bound() -> None:
    kv = tiered(32, 6)  # 1 page
    own = Tenant(kv, "own")
    own.use(prompt(1))
    tokens = pack(prompt(1))
    kv.demote(kv.resident(tokens, "own"))
    copy_all(kv)
    assert kv.prefetch(tokens, "own", "own", 20.0, 0) == 1


def test_a_prefetch_takes_no_page_that_is_retained() -> None:
    kv = tiered(12, 50)
    own, other = Tenant(kv, "own"), Tenant(kv, "other")
    own.use(prompt(1))
    tokens = pack(prompt(1))
    kv.demote(kv.resident(tokens, "own"))
    copy_all(kv)
    other.use(prompt(2, 6), until=10.0)
    running = kv.acquire(pack(prompt(3, 6)), "third", tenant="third")
    assert running is not None
    assert (kv.free, kv.cached) == (0, 6)
    assert kv.prefetch(tokens, "own", "own", 20.0, 0) == 0
    assert (len(kv.resident(pack(prompt(2, 6)), "other")), kv.retained) == (6, 6)
    kv.release(running)
    assert kv.prefetch(tokens, "own", "own", 20.0, 0) == 4
    copy_all(kv)


def spared(kv: KvCache, name: str, tokens: Sequence[int]) -> Lease | None:
    """Pages for KV that comes before it is needed."""
    return kv.acquire(pack(tokens), name, computed=False, whole=True, tenant=name, spare=True)


def arrived(kv: KvCache, lease: Lease, tokens: Sequence[int]) -> None:
    kv.publish(lease, pack(tokens), len(tokens))
    kv.release(lease)


def test_what_comes_from_elsewhere_keeps_to_the_bound() -> None:
    kv = cache()
    Tenant(kv, "own").use(prompt(1), until=10.0)
    assert kv.forecast(pack(prompt(1)), "own", "own").retainable == BOUND
    assert kv.forecast(pack(prompt(2)), "own", "own").retainable == BOUND - 4
    assert spared(kv, "own", prompt(2, 3)) is None
    assert spared(kv, "own", prompt(1, BOUND + 1)) is None
    first = spared(kv, "own", prompt(1, 5))
    assert first is not None
    assert spared(kv, "own", prompt(2, 2)) is None, "the first will retain one page more"
    assert spared(kv, "other", prompt(2, 2)) is not None
    arrived(kv, first, prompt(1, 5))
    again = spared(kv, "own", prompt(2, 2))
    assert again is not None, "nothing of the first was retained in the end"
    assert Tenant(kv, "own").use(prompt(3), until=10.0) == 2, "hints need not wait for it"
    assert Tenant(kv, "own").use(prompt(4)) == 0
    assert Tenant(kv, "own").cached(prompt(4)) == 4, "requests are not bound by it"
    arrived(kv, again, prompt(2, 2))
    assert kv.check() == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "retain", "fetch", "come", "give up"]),
        st.sampled_from(["own", "other"]),
        st.integers(1, 4),  # the prompt
        st.integers(1, 8),  # its length
    ),
    max_size=40,
)


@given(STEPS)
def test_no_prefetch_harms_what_is_retained_or_goes_beyond_its_bound(steps: list[tuple[str, str, int, int]]) -> None:
    """retained: the pages of every tenant that retains some, by brute force."""
    kv, under_way = cache(16, 25), list[tuple[Lease, list[int]]]()
    for act, name, number, length in steps:
        tokens, tenant = prompt(number, length), Tenant(kv, name)
        before = {node.number for node in kv._tree.walk() if node.retained is not None}
        match act:
            case "fetch":
                if (lease := spared(kv, name, tokens)) is not None:
                    under_way.append((lease, tokens))
                assert before <= {node.number for node in kv._tree.walk() if node.retained is not None}
            case "come" if under_way:
                lease, tokens = under_way.pop(0)
                kv.publish(lease, pack(tokens), len(tokens))
                assert kv.retain(lease.path, 10.0, 0) == len(tokens), "there was room for it, and still is"
                kv.release(lease)
            case "give up" if under_way:
                kv.release(under_way.pop()[0])
            case "use" | "retain" if not under_way:  # other hints may take the room that is left
                if kv.free + kv.cached >= length:
                    tenant.use(tokens, until=10.0 if act == "retain" else 0.0)
        assert kv.check() == []


def test_what_is_released_leaves_first() -> None:
    kv = cache(12)
    own, other = Tenant(kv, "own"), Tenant(kv, "other")
    other.use(prompt(1))
    own.use(prompt(2), until=10.0)
    assert kv.let_go(kv.resident(pack(prompt(2)), "own")) == 4
    other.use(prompt(3))
    other.use(prompt(4))
    assert (own.cached(prompt(2)), other.cached(prompt(1)), kv.retained) == (0, 4, 0)


def test_a_shared_page_leaves_first_once_all_that_share_it_are_released() -> None:
    kv = cache(12)
    own, other = Tenant(kv, "own"), Tenant(kv, "other")
    other.use(prompt(1))
    first, second = prompt(2), [*prompt(2, 2), *prompt(3, 2)]
    own.use(first, until=10.0)
    own.use(second, until=10.0)
    assert kv.let_go(kv.resident(pack(first), "own")) == 2, "the second one needs the pages that they share"
    assert kv.let_go(kv.resident(pack(second), "own")) == 4
    assert kv.retained == 0
    other.use(prompt(4))
    other.use(prompt(5))
    assert (own.cached(first), own.cached(second), other.cached(prompt(1))) == (0, 0, 4)


# A trace: who computes which prompt, with or without a hint. Prompts of one tenant share prefixes.
PROMPTS = st.builds(
    lambda branch, length: [0, *(10 * branch + index for index in range(1, length))],
    st.integers(0, 3),
    st.integers(1, 6),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["liar", "other", "third"]),
        PROMPTS,
        st.floats(0, 30),  # seconds to retain it for, of the liar; below 1: none
        st.sampled_from([0, 1, 2, OPEN_PRIORITY]),
    ),
    max_size=80,
)


def run(kv: KvCache, steps: Sequence[tuple[str, list[int], float, int]], hints: bool) -> Iterator[set[tuple[str, int]]]:
    """Compute the prompts, one a second. Yields which pages of the others are cached after each, by name and number of
    all different prefixes."""
    for now, (name, tokens, seconds, priority) in enumerate(steps):
        kv.expire(float(now))
        tenant = Tenant(kv, name)
        hinted = hints and name == "liar" and seconds >= 1
        tenant.use(
            [1000 * "lot".index(name[0]) + token for token in tokens], now + seconds if hinted else 0.0, priority
        )
        yield others_cached(kv)


def others_cached(kv: KvCache) -> set[tuple[str, int]]:
    found = set()
    for node in kv._tree.walk():
        path, above = [], node
        while above.parent is not None:
            path.append(above.key)
            above = above.parent
        if above.key != b"liar":
            found.add((above.key.decode(), hash(tuple(path))))
    return found


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_others_have_never_less_than_in_a_pool_smaller_by_the_bound(
    steps: list[tuple[str, list[int], float, int]],
) -> None:
    pages, percent = 16, 25
    hinted = run(cache(pages, percent), steps, hints=True)
    smaller = run(cache(pages - pages * percent // 100, percent), steps, hints=False)
    for seen, least in zip(hinted, smaller, strict=True):
        assert seen >= least


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_while_the_tenant_has_pages_to_give_others_notice_nothing(
    steps: list[tuple[str, list[int], float, int]],
) -> None:
    """The liar never computes a prompt twice, so that it needs as many pages with hints as without; it retains half of
    its pages for ever."""
    fresh = [
        (
            name,
            [number * 10 + token for token in range(1, 5)] if name == "liar" else tokens,
            1e9 * (number % 2 + 1e-9),
            0,
        )
        for number, (name, tokens, _, _) in enumerate(steps)
    ]
    hinted_pool, plain_pool = cache(PAGES, 10), cache(PAGES, 10)
    hinted, plain = run(hinted_pool, fresh, hints=True), run(plain_pool, fresh, hints=False)
    for seen, expected in zip(hinted, plain, strict=True):
        if len(hinted_pool._tree.retention._waiting):
            return  # at some time it had nothing else to give
        assert seen == expected


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from(["lru", "turns"]))
def test_bookkeeping_under_both_eviction_orders(
    steps: list[tuple[str, list[int], float, int]], order: Eviction
) -> None:
    kv = cache(16, 25, order)
    for now, (name, tokens, seconds, priority) in enumerate(steps):
        kv.expire(float(now))
        Tenant(kv, name).use(tokens, now + seconds if seconds >= 1 else 0.0, priority)


def test_open_prompts_have_most_of_the_bound_whatever_hints_say_and_hints_the_rest() -> None:
    kv = cache()
    own = Tenant(kv, "own")
    most = BOUND * 3 // 4
    assert own.use(prompt(1, BOUND), until=10.0, priority=MAX_PRIORITY) == BOUND
    assert own.use(prompt(2, BOUND), until=10.0, priority=OPEN_PRIORITY) == most, "it displaces hints, up to its part"
    assert own.use(prompt(3, BOUND), until=99.0, priority=MAX_PRIORITY) == 0, "equal hints displace none"
    assert own.use(prompt(4, BOUND), until=99.0, priority=OPEN_PRIORITY) == 0
    kv.expire(10.0)
    assert own.use(prompt(5, BOUND), until=20.0, priority=OPEN_PRIORITY) == BOUND, "what nobody retains is for all"
    assert own.use(prompt(6, BOUND), until=20.0, priority=1) == BOUND - most, "beyond its part it gives way"


def test_an_open_prompt_that_has_come_gives_way_to_hints() -> None:
    kv = cache(pages=40)
    own = Tenant(kv, "own")
    whole = kv.total * PERCENT // 100
    shared = prompt(1, 2)
    assert own.use([*shared, 101, 102], until=10.0, priority=OPEN_PRIORITY) == 4
    assert own.use([*shared, 201], until=10.0, priority=OPEN_PRIORITY) == 3
    kv.commit(kv.resident(pack([*shared, 101, 102]), "own"))
    assert kv.check() == []
    assert own.use(prompt(3, whole), until=10.0, priority=1) == whole - 3, "the other open prompt keeps what it has"
    kv.commit(kv.resident(pack([*shared, 201]), "own"))
    assert kv.check() == []
    assert own.use(prompt(3, whole), until=10.0, priority=1) == whole
