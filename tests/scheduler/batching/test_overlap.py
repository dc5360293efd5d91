"""Dual-batch overlap as planned: which passes of lockstep replicas are cut, as ordered and as counted."""

import msgspec
import pytest

from headrace.core.messages.orders import AnyOrder, Forward
from headrace.core.types.ranks.coordinate import Agreement, Rules, halves
from headrace.core.types.requests.request import Discard
from tests.scheduler.state.test_binding import Replicas, prompt

RULES = Rules(cut=True, cut_prefill=16, cut_decode=2)


def overlapping(**changes: object) -> Replicas:
    """Two replicas in lockstep whose passes are cut from 16 tokens of each, or 2 decoding requests."""
    given: dict[str, object] = {"lockstep": True, "rules": RULES, "chunk_tokens": 64, "prefix_cache": False, **changes}
    return Replicas(dp=2, **given)


def agreed(bench: Replicas) -> Agreement:
    """Of the next pass, as a rank reads it from the wire; it is reported."""
    forwards = bench.forwards()
    for replica, forward in forwards:
        bench.report(replica, forward)
    decoded = [msgspec.msgpack.decode(msgspec.msgpack.encode(forward), type=AnyOrder) for _, forward in forwards]
    first, second = (order.agreement for order in decoded if isinstance(order, Forward))
    assert first == second
    assert first is not None
    return first


def results(bench: Replicas) -> dict[str, float]:
    """What was counted, by result."""
    samples = bench.scheduler.statistics(bench.now).samples
    return {one.labels[0]: one.value for one in samples if one.name == "overlap_passes_total" and one.value}


@pytest.mark.parametrize(
    ("tokens", "cut", "result"),
    [
        ((20, 20), 10, "cut"),
        ((16, 31), 15, "cut"),
        ((16, 32), 0, "short"),  # the half of the longer one is all of the shorter one
        ((15, 20), 0, "threshold"),
        ((20, 0), 0, "idle"),
        ((60, 60), 30, "cut"),
    ],
)
def test_a_pass_is_cut_when_all_replicas_wish_it(tokens: tuple[int, int], cut: int, result: str) -> None:
    bench = overlapping()
    for replica, count in enumerate(tokens):
        if count:
            bench.submit(str(replica), prompt(count, 100 * replica), route=Discard(), max_tokens=1, replica=replica)
    found = agreed(bench)
    assert (found.tokens, found.cut) == (tokens, cut)
    assert found.padded == (max(tokens) if cut else 0)
    assert results(bench) == {result: 1}


def test_passes_that_only_decode_have_a_threshold_of_their_own() -> None:
    """Rows of two prompts first, then a token of each request."""
    bench = overlapping(pipeline_depth=0)
    for number in range(5):
        bench.submit(str(number), prompt(10, 100 * number), max_tokens=4, replica=number % 2)
    assert agreed(bench).tokens == (30, 20)
    assert [agreed(bench) for _ in range(3)] == [Agreement((3, 2), 3, 1)] * 3
    assert results(bench) == {"cut": 4}


def test_rows_on_both_sides_of_the_cut_stay_one_row_in_the_order() -> None:
    """Ranks cut by themselves: the same rows with and without overlap."""
    orders = []
    for rules in (RULES, Rules()):
        bench = overlapping(rules=rules)
        for number in range(4):
            bench.submit(str(number), prompt(12, 100 * number), route=Discard(), max_tokens=1, replica=number % 2)
        orders.append(bench.forwards())
    assert [forward.rows for _, forward in orders[0]] == [forward.rows for _, forward in orders[1]]
    for _, forward in orders[0]:
        assert forward.agreement is not None
        first, second = halves([row.count for row in forward.rows], forward.agreement.cut)
        assert ([part.count for part in first], [part.count for part in second]) == ([12], [12])


def test_nothing_is_counted_without_overlap() -> None:
    bench = overlapping(rules=Rules())
    for replica in (0, 1):
        bench.submit(str(replica), prompt(40, 100 * replica), route=Discard(), max_tokens=1, replica=replica)
    assert agreed(bench) == Agreement((40, 40))
    assert results(bench) == {}
