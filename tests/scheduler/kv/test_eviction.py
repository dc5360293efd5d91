"""Eviction by aged turn count, and the ghosts of evicted pages."""

from collections.abc import Iterable

from headrace.core.types.packed import pack
from headrace.scheduler.kv.eviction import MAX_TURN, SHARED_BY
from headrace.scheduler.kv.kv_cache import GHOSTS_PER_PAGE, KvCache

SHORT = 2


def cache(pages: int, **changes: object) -> KvCache:
    return KvCache(pages, 1, eviction="turns", short_tokens=SHORT, **changes)  # type: ignore[arg-type]


def use(kv: KvCache, tokens: Iterable[int]) -> int:
    """Compute a prompt, one page a token. Returns the pages that were found."""
    packed = pack(tokens)
    lease = kv.acquire(packed, "")
    assert lease is not None
    kv.publish(lease, packed, len(packed) // 4)
    kv.release(lease)
    assert kv.check() == []
    return lease.matched


def cached(kv: KvCache, tokens: Iterable[int]) -> int:
    """Pages of a prompt that are in the pool."""
    return len(kv._tree.match([pack([token]) for token in tokens], ""))


def conversation(number: int, turns: int) -> list[int]:
    """The prompt of a turn: four pages longer with every turn."""
    return [1000 * number + index for index in range(4 * turns)]


def test_a_conversation_with_turns_outlives_newer_prompts_without() -> None:
    kv = cache(32)
    for turn in (1, 2, 3):
        assert use(kv, conversation(1, turn)) == 4 * (turn - 1)
    for number in range(2, 9):
        use(kv, conversation(number, 1))
    assert use(kv, conversation(1, 4)) == 12, "LRU would have evicted it"


def test_an_old_conversation_ages() -> None:
    kv = cache(32)
    for turn in (1, 2, 3):
        use(kv, conversation(1, turn))
    for number in range(2, 200):
        use(kv, conversation(number, 1))
    assert use(kv, conversation(1, 4)) < 12


def test_short_first_prompts_leave_before_all_others() -> None:
    kv = cache(16)
    use(kv, conversation(1, 1))
    for number in range(500, 510):
        use(kv, [number, -number])
    assert use(kv, conversation(1, 2)) == 4


def test_a_conversation_that_comes_back_after_its_eviction_goes_on_counting() -> None:
    kv = cache(16)
    for turn in (1, 2, 3):
        use(kv, conversation(1, turn))
    for number in range(2, 6):
        use(kv, conversation(number, 3))
    back = kv.acquire(pack(conversation(1, 4)), "")
    assert back is not None
    assert (back.matched, back.turn) == (0, 3)
    kv.release(back)


def test_a_prefix_of_many_conversations_makes_no_turn() -> None:
    kv = cache(64)
    for number in range(1, SHARED_BY + 1):
        use(kv, [0, *conversation(number, 1)])
    fresh = kv.acquire(pack([0, *conversation(100, 1)]), "")
    going_on = kv.acquire(pack([0, *conversation(1, 2)]), "")
    assert fresh is not None
    assert going_on is not None
    assert (fresh.turn, going_on.turn) == (0, 1)


def test_turns_beyond_the_limit_count_no_more() -> None:
    kv = cache(256)
    for turn in range(1, MAX_TURN + 3):
        use(kv, conversation(1, turn))
        use(kv, conversation(2, turn))
    use(kv, conversation(1, MAX_TURN + 3))  # a turn more than 2, and used before it
    use(kv, conversation(2, MAX_TURN + 2))
    ranks = {node.rank for node in kv._tree.walk()}
    assert len(ranks) == 1


def test_ghosts_are_bounded_and_their_paths_whole() -> None:
    kv = cache(8)
    for number in range(300):
        use(kv, conversation(number, 2))
    nodes = list(kv._tree.walk_all())
    assert len(nodes) <= 8 + GHOSTS_PER_PAGE * 8
    assert len(nodes) > 8, "some are remembered"
    known = set(map(id, nodes))
    assert all(node.parent is not None for node in nodes)
    assert all(id(child) in known for node in nodes for child in node.children.values())


def test_a_refused_lease_leaves_the_order_as_it_was() -> None:
    kv = KvCache(4, 1)
    use(kv, [1, 2])
    use(kv, [3, 4])
    assert kv.acquire(pack([1, 2, 5, 6, 7]), "") is None
    use(kv, [8, 9])
    assert (cached(kv, [1, 2]), cached(kv, [3, 4])) == (0, 2)
