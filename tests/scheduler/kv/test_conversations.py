"""When the next turn of a session is expected: the table against a list of all turns, and what a scheduler retains."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.replies import RequestFinished
from headrace.core.types.requests.kv_hints import Retain
from headrace.scheduler.kv.conversations import MAX_S, PAUSES, PREDICTED, Conversations
from tests.scheduler.bench import PAGE, Bench

NAMES = ("a", "b", "c", "d")
TENANTS = (("", ""), ("t", ""), ("", "salt"))
Turns = list[tuple[int, int, float, float]]  # of which tenant and name, seconds after the last event, and its length


def expected(turns: list[tuple[float, float]]) -> float:
    """By brute force, of all turns of one session in the order of their ends."""
    pauses = [began - before[1] for before, (began, _) in pairwise(turns) if began > before[1]]
    return min(MAX_S, PAUSES * sum(pauses) / len(pauses)) if pauses else 0.0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 400), st.floats(0, 50)), max_size=60),
    st.integers(1, 12),
)
def test_the_table_is_what_all_turns_say_of_the_sessions_that_it_remembers(turns: Turns, limit: int) -> None:
    table, now = Conversations(limit), 0.0
    known: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for tenant, name, later, length in turns:
        now += later
        key = (*TENANTS[tenant], NAMES[name])
        if key not in known and len(known) == limit:
            del known[min(known, key=lambda one: known[one][-1][1])]
        began, ended = max(0.0, now - length), now
        now += 0.001  # ends are apart
        known.setdefault(key, []).append((began, ended))
        assert abs(table.turn(*key, began, ended) - expected(known[key])) < 1e-6
        assert len(table) == len(known) <= limit


def retained(bench: Bench) -> float:
    return bench.metric("retained_pages")


def turn(bench: Bench, rid: str, tokens: int | list[int], **terms: object) -> None:
    bench.submit(rid, tokens, max_tokens=1, **terms)
    bench.compute(7)
    assert bench.all(RequestFinished)[-1].rid == rid
    assert list(bench.scheduler.check_integrity()) == []


def test_from_its_second_turn_on_a_session_stays_until_it_is_expected_again() -> None:
    bench = Bench(retain_percent=50)
    turn(bench, "first", 16, session="s")
    assert retained(bench) == 0, "nothing is known of it"
    bench.wait(10)
    turn(bench, "second", 24, session="s")
    assert retained(bench) == 24 // PAGE
    bench.wait(PAUSES * 10 - 0.1)
    for number in range(12):  # more prompts than the pool has room for
        turn(bench, f"other {number}", list(range(100 + 24 * number, 124 + 24 * number)))
    assert retained(bench) == 24 // PAGE
    turn(bench, "third", 24, session="s", retain=Retain(seconds=1.0))
    assert bench.all(RequestFinished)[-1].usage.cached_tokens >= 20
    bench.wait(PAUSES * 10)
    bench.submit("later", 4)
    assert retained(bench) == 0, "its time is over"


def test_without_a_pause_a_session_or_a_good_end_nothing_is_retained() -> None:
    bench = Bench(retain_percent=50)
    for number in range(3):
        turn(bench, f"none {number}", 16)
        turn(bench, f"tenant {number}", 16, session="s", tenant=f"t{number}")
        turn(bench, f"salt {number}", 16, session="s", cache_salt=f"s{number}")
        bench.wait(5)
    turn(bench, "over", 16, session="s", tenant="t2", let_go=True)
    bench.submit("a", 16, session="s", tenant="t1")
    bench.submit("b", 16, session="s", tenant="t1")
    bench.abort("a")
    bench.abort("b")
    assert retained(bench) == 0


def test_hints_displace_what_is_predicted() -> None:
    bench = Bench(retain_percent=10)  # six pages
    turn(bench, "first", 24, session="s")
    bench.wait(10)
    turn(bench, "second", 24, session="s")
    assert retained(bench) == 6
    hinted = list(range(100, 124))
    turn(bench, "hinted", hinted, retain=Retain(seconds=60, priority=PREDICTED + 1))
    bench.wait(30)
    bench.submit("later", 4)
    assert retained(bench) == 6, "of the hint, which is longer"


def test_pieces_of_open_prompts_are_no_turns() -> None:
    bench = Bench(retain_percent=50)
    for number in range(3):
        bench.submit(f"piece {number}", 16, session="s", open=True)
        while (forward := bench.plan()) is not None:
            bench.done(forward)
        bench.wait(5)
    turn(bench, "committed", 16, session="s")
    assert retained(bench) == 0
