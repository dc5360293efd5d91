"""Whether KV that is offered back is taken."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.requests.kv_return import PoolForecast, judge_return

PAGE = 16
POOL = PoolForecast(cached=64, free=100, evictable=50, turn_chance=0.5, again_chance=0.25)


def judge(pool: PoolForecast = POOL, pages: int = 8, work_s: float | None = 1.0, transfer_s: float = 0.1) -> str:
    return judge_return(pool, pages * PAGE, PAGE, work_s, transfer_s)


def test_the_saving_is_weighed_by_the_chance_of_another_turn() -> None:
    assert judge(transfer_s=0.49) == "taken"
    assert judge(transfer_s=0.51) == "not_worth_it"
    assert judge(replace(POOL, turn_chance=0.05)) == "not_worth_it"


def test_what_is_cached_is_not_taken_and_what_has_no_room_is_not_either() -> None:
    assert judge(pages=4) == "cached"
    assert judge(replace(POOL, free=1, evictable=2)) == "no_room"
    assert judge(replace(POOL, free=2, evictable=2, again_chance=0.0)) == "taken"


def test_pages_that_are_pushed_out_cost_what_computing_them_again_may() -> None:
    full = replace(POOL, free=0, again_chance=0.39)
    assert judge(full) == "taken"
    assert judge(replace(full, again_chance=0.41)) == "not_worth_it"
    assert judge(replace(full, free=2, again_chance=0.41)) == "taken"


def test_while_nothing_is_predicted_nothing_is_pushed_out() -> None:
    assert judge(work_s=None, transfer_s=9.0) == "taken"
    assert judge(replace(POOL, free=3), work_s=None) == "not_worth_it"


POOLS = st.builds(
    PoolForecast,
    cached=st.integers(0, 20).map(lambda pages: pages * PAGE),
    free=st.integers(0, 30),
    evictable=st.integers(0, 30),
    turn_chance=st.floats(0, 1),
    again_chance=st.floats(0, 1),
)


@given(POOLS, st.integers(1, 40), st.floats(0, 10), st.floats(0, 10))
def test_what_makes_an_offer_better_never_has_it_refused(
    pool: PoolForecast, pages: int, work_s: float, transfer_s: float
) -> None:
    if judge(pool, pages, work_s, transfer_s) != "taken":
        return
    assert judge(pool, pages, work_s, transfer_s / 2) == "taken"
    for better in (
        replace(pool, free=pool.free + 1),
        replace(pool, evictable=pool.evictable + 1),
        replace(pool, turn_chance=min(1.0, pool.turn_chance + 0.1)),
        replace(pool, again_chance=pool.again_chance / 2),
    ):
        assert judge(better, pages, work_s, transfer_s) == "taken"


@given(POOLS, st.integers(1, 40), st.floats(0, 10), st.floats(0, 10))
def test_what_is_taken_fits_and_is_not_here(pool: PoolForecast, pages: int, work_s: float, transfer_s: float) -> None:
    needed = pages - pool.cached // PAGE
    if judge(pool, pages, work_s, transfer_s) == "taken":
        assert 0 < needed <= pool.free + pool.evictable
        assert work_s * pool.turn_chance > transfer_s
