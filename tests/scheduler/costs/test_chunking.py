"""Chunk lengths against exact arithmetic, and in plans."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.stage_events import StageReady
from headrace.core.types.requests.request import Discard
from headrace.scheduler.costs.chunking import Cost, chunk_length, equal_time
from tests.scheduler.bench import Bench, geometry

COSTS = st.tuples(st.floats(0, 1e-6), st.floats(1e-7, 1e-3), st.floats(0, 1))
PREFIXES = st.integers(0, 200_000)
CHUNKS = st.integers(1, 8192)


def seconds(cost: Cost, prefix: int, count: int) -> Fraction:
    """f(prefix + count) - f(prefix), exactly."""
    a, b, c = map(Fraction, cost)
    end = prefix + count
    return a * end * end + b * end + c - (a * prefix * prefix + b * prefix + c)


@given(COSTS, PREFIXES, CHUNKS)
def test_the_closed_form_is_the_longest_chunk_that_takes_no_longer(cost: Cost, prefix: int, chunk: int) -> None:
    found = equal_time(cost, prefix, chunk)
    assert found <= chunk
    count, limit, rounding = int(found + 1e-6), seconds(cost, 0, chunk), Fraction(1, 10**5)
    assert seconds(cost, prefix, count) <= limit * (1 + rounding)
    assert count == chunk or seconds(cost, prefix, count + 1) >= limit * (1 - rounding), "one more would fit"


@given(st.lists(COSTS, max_size=3), PREFIXES, CHUNKS, st.sampled_from([1, 16, 64, 128]))
def test_lengths_keep_to_their_bounds(costs: list[Cost], prefix: int, chunk: int, page_size: int) -> None:
    length = chunk_length(costs, prefix, chunk, page_size)
    unit = max(64, page_size)
    assert 1 <= length <= chunk
    assert length == chunk or length % unit == 0
    assert length == chunk or length >= chunk // 4 // unit * unit
    assert length <= chunk_length(costs, prefix // 2, chunk, page_size)
    if costs and length > max(chunk / 4, unit) and length < chunk:
        limit = max(seconds(cost, prefix, length) / seconds(cost, 0, chunk) for cost in costs)
        assert limit <= 1 + 1e-6, "some stage takes longer than for the first chunk"


@pytest.mark.parametrize("cost", [(0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 1e-3, 1.0)])
def test_without_a_growing_cost_chunks_stay_as_long(cost: Cost) -> None:
    assert chunk_length([cost], 100_000, 512, 16) == 512


def ready(cost: Cost | None) -> StageReady:
    return StageReady(
        stage=0, geometry=geometry(16), fingerprint="f", data_port=1, kv_pages=1000, vocab_size=5000, cost=cost
    )


def lengths(chunking: str, tokens: int, cost: Cost | None) -> list[list[int]]:
    bench = Bench(
        chunking=chunking, chunk_tokens=512, page_size=16, kv_pages=1000, vocab_size=5000, max_model_len=8000, up=False
    )
    bench.do(ready(cost))
    bench.submit("a", tokens, route=Discard())
    plans = []
    while (forward := bench.plan()) is not None:
        plans.append([row.count for row in forward.rows])
        bench.done(forward, *[7 for row in forward.rows if row.sample is not None])
    return plans


QUADRATIC = (1e-6, 1e-4, 0.01)


def test_plans_take_about_the_same_time_when_chunks_are_dynamic() -> None:
    [counts] = zip(*lengths("dynamic", 3000, QUADRATIC), strict=True)
    assert sum(counts) == 3000
    assert counts[0] == 512
    assert list(counts[:-1]) == sorted(counts[:-1], reverse=True)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    times = [seconds(QUADRATIC, start, count) for start, count in zip(starts, counts, strict=True)]
    assert max(times) <= times[0] * (1 + 1e-9) or min(counts[:-1]) == 128
    assert min(times[:-1]) > 0.5 * times[0]


def test_chunks_are_fixed_unless_asked_for_and_measured() -> None:
    fixed = [[512]] * 5 + [[440]]
    assert lengths("fixed", 3000, QUADRATIC) == fixed
    assert lengths("dynamic", 3000, None) == fixed


def test_a_chunk_that_is_short_because_it_takes_long_leaves_no_room_in_its_plan() -> None:
    mild = (1e-7, 1e-4, 0.01)  # so mild that no chunk has to be shorter than a quarter
    bench = Bench(
        chunking="dynamic", chunk_tokens=512, kv_pages=1000, page_size=16, vocab_size=5000, max_model_len=8000, up=False
    )
    bench.do(ready(mild))
    bench.submit("a", 1500, route=Discard())
    bench.submit("b", list(range(2000, 2400)), route=Discard())
    plans = []
    while (forward := bench.plan()) is not None:
        plans.append([(row.request, row.start, row.count) for row in forward.rows])
        bench.done(forward, *[7 for row in forward.rows if row.sample is not None])
    for rows in plans:
        assert sum(seconds(mild, start, count) for _, start, count in rows) <= seconds(mild, 0, 512) * 1.05
    assert any(len(rows) == 2 for rows in plans), "the rest of the first prompt leaves room for the second"
