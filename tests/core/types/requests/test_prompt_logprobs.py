"""Logprobs of prompts in runs."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.requests.prompt_logprobs import PackedLogprobs, pack_runs
from headrace.core.types.requests.request import TokenLogprob

ENTRIES = st.builds(
    TokenLogprob,
    st.integers(0, 1 << 17),
    st.floats(-100, 0),
    st.lists(st.integers(0, 1 << 17), max_size=3).map(tuple),
    st.lists(st.floats(-100, 0), max_size=3).map(tuple),
)


@given(st.lists(st.lists(ENTRIES, max_size=9), max_size=4), st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
def test_chunks_in_runs_come_back_in_order(
    chunks: list[list[TokenLogprob]], start: int, most: int, behind: int
) -> None:
    position, entries = start, [entry for chunk in chunks for entry in chunk]
    found = PackedLogprobs(start + len(entries) + behind)
    for chunk in chunks:
        for run in pack_runs(position, chunk, most):
            assert 1 <= run.count <= most
            found.add(run)
        position += len(chunk)
    expected = [*(None,) * start, *entries, *(None,) * behind] if entries else []
    assert list(found) == expected
    assert len(found) == len(expected)
    assert [found[index] for index in range(len(found))] == expected
    assert list(found[1:]) == expected[1:]


@given(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=4), st.integers(1, 4))
def test_what_is_computed_again_counts(tokens: int, restarts: list[int], most: int) -> None:
    """A prompt whose computation begins again at some positions, beside a plain list."""
    found, expected = PackedLogprobs(tokens), [None] * tokens
    for turn, begin in enumerate((0, *(restart % tokens for restart in restarts))):
        entries = [TokenLogprob(position, -float(turn)) for position in range(begin, tokens)]
        expected[begin:] = entries  # type: ignore[assignment]
        for run in pack_runs(begin, entries, most):
            found.add(run)
    assert list(found) == expected
