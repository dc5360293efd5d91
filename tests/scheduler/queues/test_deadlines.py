"""Deadlines against a table of all of them, and what is left of those that were cleared."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduler.queues.deadlines import Deadlines, LeaseTimer, PlanTimer, RequestTimer, Timer
from tests.scheduler.growth import grown_bytes

KEYS = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("clear"), KEYS, st.just(0)),
        st.tuples(st.just("crowd"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(STEPS)
def test_what_is_due_is_what_was_set_last_and_not_cleared(steps: list[tuple[str, int, int]]) -> None:
    deadlines, expected, now = Deadlines(), dict[Timer, float](), 0
    for what, key, value in steps:
        match what:
            case "set":
                deadlines.set(RequestTimer(key), now + value)
                expected[RequestTimer(key)] = now + value
            case "clear":
                deadlines.clear(RequestTimer(key))
                expected.pop(RequestTimer(key), None)
            case "crowd":  # enough of them to have the heap tidied up
                for number in range(100, 300):
                    deadlines.set(LeaseTimer(number), now + 1000)
                    deadlines.clear(LeaseTimer(number))
            case _:
                now += value
                due = [(expected[timer], timer) for timer in deadlines.due(now)]
                assert [at for at, _ in due] == sorted(at for at in expected.values() if at <= now)
                for _, each in due:
                    del expected[each]
        assert deadlines.next() == min(expected.values(), default=None)


def test_deadlines_in_years_that_are_cleared_take_up_no_memory() -> None:
    """Clients choose them: deadline_s has no upper bound. Another deadline is always nearer."""
    deadlines = Deadlines()
    deadlines.set(PlanTimer(0), 1e8)

    def serve(number: int) -> None:
        deadlines.set(RequestTimer(number), number + 1e9)
        deadlines.set(LeaseTimer(number), number + 30.0)
        deadlines.clear(RequestTimer(number))
        deadlines.clear(LeaseTimer(number))
        assert list(deadlines.due(number)) == []

    assert grown_bytes(serve) < 50_000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.data())
def test_equal_deadlines_come_up_as_they_were_set_whenever_the_next_is_asked(
    sets: list[tuple[int, int]], data: st.DataObject
) -> None:
    """What a scheduler decides must not depend on how often its loop looks."""
    asked, never = Deadlines(), Deadlines()
    for request, at in sets:
        for deadlines in (asked, never):
            deadlines.set(LeaseTimer(request), float(at))
        if data.draw(st.booleans()):
            asked.next()
    assert list(asked.due(5.0)) == list(never.due(5.0))
