"""The page allocator and the deadlines, against naive models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import SchedulerConfig
from headrace.core.types.errors import ConfigError
from headrace.scheduler.kv.page_allocator import PageAllocator
from headrace.scheduler.policies.policy import make_policy
from headrace.scheduler.queues.deadlines import (
    AnswerTimer,
    BootstrapTimer,
    CopyTimer,
    Deadlines,
    DrainTimer,
    LeaseTimer,
    OrderTimer,
    PlanTimer,
    RequestTimer,
    ReservationTimer,
    Timer,
    TransferTimer,
)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.booleans()), max_size=40))
def test_allocator_agrees_with_a_dict(steps: list[tuple[int, int, bool]]) -> None:
    allocator = PageAllocator(10)
    owned: dict[int, int] = {}
    for owner, count, give_back in steps:
        mine = [page for page, who in owned.items() if who == owner]
        if give_back:
            allocator.release(mine, owner)
            for page in mine:
                del owned[page]
        elif count <= 10 - len(owned):
            pages = allocator.allocate(count, owner)
            assert len(set(pages)) == count
            assert not set(pages) & set(owned)
            owned.update(dict.fromkeys(pages, owner))
        else:
            with pytest.raises(ValueError, match="are free"):
                allocator.allocate(count, owner)
        assert allocator.free == 10 - len(owned)
        assert all(allocator.owner(page) == owned.get(page, 0) for page in range(10))


def test_only_the_owner_frees_and_only_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2, 1)
    with pytest.raises(ValueError, match="belongs to 1"):
        allocator.release(pages, 2)
    with pytest.raises(ValueError, match="twice"):
        allocator.release([pages[0], pages[0]], 1)
    allocator.transfer(pages[0], 1, 2)
    with pytest.raises(ValueError, match="belongs to 2"):
        allocator.release(pages, 1)
    assert allocator.free == 2, "a refused release takes nothing"
    allocator.release([pages[0]], 2)
    with pytest.raises(ValueError, match="belongs to 0"):
        allocator.release([pages[0]], 2)


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 50), st.integers(0, 5)), max_size=60))
def test_deadlines_agree_with_a_dict(steps: list[tuple[int, int | None, int]]) -> None:
    deadlines = Deadlines()
    naive: dict[int, int] = {}
    now = 0
    for key, delay, passed in steps:
        if delay is None:
            deadlines.clear(RequestTimer(key))
            naive.pop(key, None)
        else:
            deadlines.set(RequestTimer(key), now + delay)
            naive[key] = now + delay
        now += passed
        due = [timer.arrival for timer in deadlines.due(now) if isinstance(timer, RequestTimer)]
        expected = [key for key, at in sorted(naive.items(), key=lambda item: item[1]) if at <= now]
        assert sorted(due, key=str) == sorted(expected, key=str)
        for key in expected:
            del naive[key]
        assert deadlines.next() == min(naive.values(), default=None)


def test_moving_a_deadline_again_and_again_keeps_the_heap_small() -> None:
    deadlines = Deadlines()
    for step in range(1000):
        deadlines.set(TransferTimer(1), 10.0 + step)
        if step % 3 == 0:
            deadlines.clear(TransferTimer(1))
    assert len(deadlines._heap) == 1


def test_deadlines_of_different_kinds_are_independent_whatever_their_keys() -> None:
    deadlines = Deadlines()
    of_one = [kind(1) for kind in (BootstrapTimer, TransferTimer, RequestTimer, AnswerTimer, LeaseTimer)]
    timers: list[Timer] = [*of_one, PlanTimer(1), CopyTimer(1), OrderTimer(1), ReservationTimer("1"), DrainTimer()]
    for at, timer in enumerate(timers):
        deadlines.set(timer, at)
    deadlines.clear(RequestTimer(1))
    assert not deadlines.active(RequestTimer(1))
    assert list(deadlines.due(len(timers))) == [timer for timer in timers if timer != RequestTimer(1)]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lifo'.*fcfs"):
        make_policy(SchedulerConfig(policy="lifo"))  # type: ignore[arg-type]
