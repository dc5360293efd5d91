"""Shares of turns that are followed by others, and of evicted pages that are needed again."""

from headrace.core.types.packed import pack
from headrace.scheduler.kv.kv_cache import KvCache
from headrace.scheduler.kv.turn_chances import TurnChances

PAGE, SHORT = 4, 16


def turn(cache: KvCache, tokens: list[int]) -> None:
    lease = cache.acquire(pack(tokens), "")
    assert lease is not None
    cache.publish(lease, pack(tokens), len(tokens))
    cache.release(lease)


def test_chances_follow_what_was_seen() -> None:
    cache = KvCache(1000, PAGE, eviction="turns", short_tokens=SHORT)
    assert cache.forecast(pack(range(40)), "").turn_chance == 0.5
    for number in range(40):
        turn(cache, [number, *range(19)])
        if number % 4:
            turn(cache, [number, *range(19), *range(100, 110)])
    first, second = (cache.forecast(pack([0, *range(count)]), "").turn_chance for count in (19, 0))
    assert abs(first - 0.75) < 0.05
    assert second == 0.5  # short ones are another kind
    known = cache.forecast(pack([1, *range(19), *range(100, 110)]), "")
    assert known.cached == 28
    assert known.turn_chance < 0.1  # none of 30 second turns went on


def test_short_prompts_are_told_apart() -> None:
    chances = TurnChances(SHORT)
    for _ in range(50):
        chances.began(0, 0, SHORT, 0)
        chances.began(0, 0, SHORT + 1, 0)
        chances.began(1, SHORT + 1, 100, 0)
    assert chances.next_turn(0, SHORT) < 0.05
    assert chances.next_turn(0, SHORT + 1) > 0.95


def test_old_counts_fade() -> None:
    chances = TurnChances(SHORT)
    for _ in range(1000):
        chances.began(0, 0, 100, 0)
        chances.began(1, 100, 200, 0)
    for _ in range(5000):
        chances.began(0, 0, 100, 0)
    assert chances.next_turn(0, 100) < 0.1


def test_pages_that_are_needed_again() -> None:
    cache = KvCache(8, PAGE, eviction="turns", short_tokens=SHORT)
    before = cache.chances.needed_again
    for number in range(2000):
        turn(cache, [number, *range(15)])
    assert cache.chances.needed_again < before
    lower = cache.chances.needed_again
    for number in range(4000):
        turn(cache, [number % 6, *range(15)])
    assert cache.chances.needed_again > lower


def test_moving_a_turn_is_no_turn() -> None:
    cache = KvCache(64, PAGE, eviction="turns", short_tokens=SHORT)
    turn(cache, list(range(21)))
    before = cache.forecast(pack(range(20)), "")
    lease = cache.acquire(pack(range(28)), "", computed=False, whole=True)
    assert lease is not None
    assert (lease.matched, lease.turn) == (5, 0)
    cache.publish(lease, pack(range(28)), 28)
    cache.release(lease)
    after = cache.forecast(pack(range(20)), "")
    assert after.turn_chance == before.turn_chance
    following = cache.acquire(pack(range(30)), "")
    assert following is not None
    assert following.turn == 1


def test_a_piece_of_an_open_prompt_is_no_turn() -> None:
    """A turn that grows page by page counts once, when its prompt is complete."""
    counted = []
    for pieces in ((), (24,), (24, 28, 32, 36)):
        cache = KvCache(64, PAGE, eviction="turns", short_tokens=SHORT)
        turn(cache, list(range(21)))
        for end in pieces:
            lease = cache.acquire(pack(range(end)), "", piece=True)
            assert lease is not None
            assert lease.turn == 0
            cache.publish(lease, pack(range(end)), end)
            cache.release(lease)
        following = cache.acquire(pack(range(40)), "")
        assert following is not None
        assert following.turn == 1
        counted.append([cache.chances.next_turn(number, 40) for number in range(4)])
    assert counted[0] == counted[1] == counted[2]
