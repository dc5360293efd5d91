"""Logprobs of prompts in runs."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.prompt_logprobs import pack_runs, unpacked
from headrace.core.types.request import TokenLogprob

ENTRIES = st.builds(
    TokenLogprob,
    st.integers(0, 1 << 17),
    st.floats(-100, 0),
    st.lists(st.integers(0, 1 << 17), max_size=3).map(tuple),
    st.lists(st.floats(-100, 0), max_size=3).map(tuple),
)


@given(st.lists(st.lists(ENTRIES, max_size=9), max_size=4), st.integers(0, 5), st.integers(1, 4))
def test_chunks_in_runs_come_back_in_order(chunks: list[list[TokenLogprob]], start: int, most: int) -> None:
    runs, position = [], start
    for chunk in chunks:
        runs += pack_runs(position, chunk, most)
        position += len(chunk)
    assert all(1 <= run.count <= most for run in runs)
    entries = [entry for chunk in chunks for entry in chunk]
    assert unpacked(runs, position) == ((None,) * start + tuple(entries) if entries else ())


def test_of_a_position_that_was_computed_twice_the_later_entry_counts() -> None:
    first, second = ([TokenLogprob(token, -value) for token in range(4)] for value in (1.0, 2.0))
    runs = [*pack_runs(1, first), *pack_runs(3, second[2:])]
    assert unpacked(runs, 6) == (None, *first[:2], *second[2:], None)
