"""Replays in which decode servers offer the KV of turns back to the prefill server."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tools.simulate.replay.conversations import answered
from headrace.tools.simulate.replay.decode_server import DecodeTier
from headrace.tools.simulate.replay.replay import ReplayResult
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest, packed_tokens, prompt
from tests.tools.simulate.replay import replays
from tests.tools.simulate.replay.replays import COST, PAGE

BLOCK = 64


def blocks(at: float, ids: Sequence[int], tokens: int, generated: int) -> TraceRequest:
    """A line of Mooncake's format, with blocks of 64 tokens."""
    segments = [PromptSegment(text, min(BLOCK, tokens - BLOCK * index)) for index, text in enumerate(ids)]
    return TraceRequest(at, tuple(segments), tokens, generated)


def replay(
    requests: Sequence[TraceRequest], returns: bool, fetch: float | None = 10_000.0, pages: int = 4096, servers: int = 1
) -> ReplayResult:
    tier = DecodeTier(remote="always", costs=(COST,), servers=servers, chunk_tokens=128, handoff_s=0.02)
    config = replays.config(kv_pages=pages)
    return replays.replay(requests, config, fetch_tokens_s=fetch, decode=tier, returns=returns)


TWO_TURNS = [
    blocks(0.0, (1, 2, 3, 4), 220, 150),
    blocks(30.0, (1, 2, 3, 5, 6, 7, 8), 400, 20),  # block 4 was not whole: it has another number when it is
]


def test_turn_two_computes_the_new_tokens_alone() -> None:
    off, on = (replay(TWO_TURNS, returns) for returns in (False, True))
    assert [outcome.turn for outcome in on.outcomes] == [1, 2]
    assert off.outcomes[1].cached_tokens == 220 // PAGE * PAGE
    assert on.outcomes[1].cached_tokens == (220 + 150 - 1) // PAGE * PAGE
    assert (off.offers, on.offers["taken"]) == ({}, 1)
    first_off, first_on = off.outcomes[1].first_token_s, on.outcomes[1].first_token_s
    assert first_off is not None
    assert first_on is not None
    assert first_on < first_off - 0.1, "a millisecond for each token of the answer"


def test_kv_that_has_not_come_yet_is_no_use() -> None:
    outcomes = replay([TWO_TURNS[0], blocks(3.0, (1, 2, 3, 5, 6, 7, 8), 400, 20)], True, fetch=100.0).outcomes
    assert outcomes[1].cached_tokens == 220 // PAGE * PAGE
    assert outcomes[1].error == ""


def test_a_prompt_without_room_for_the_answer_is_no_next_turn() -> None:
    outcomes = replay([TWO_TURNS[0], blocks(30.0, (1, 2, 3, 5), 250, 20)], True).outcomes
    assert outcomes[1].cached_tokens == 3 * BLOCK


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100)), min_size=1, max_size=12), st.sampled_from((64, 4096))
)
@settings(max_examples=8, deadline=None)
def test_single_turns_lose_nothing(prompts: list[tuple[int, int]], pages: int) -> None:
    requests = [
        TraceRequest(5.0 * index, (PromptSegment(index + 1, tokens),), tokens, output)
        for index, (tokens, output) in enumerate(prompts)
    ]
    off, on = (replay(requests, returns, fetch=None, pages=pages, servers=2).outcomes for returns in (False, True))
    for without, returned in zip(off, on, strict=True):
        assert returned.error == ""
        assert returned.generated == without.generated
        assert returned.cached_tokens == without.cached_tokens
        assert returned.end_s is not None
        assert without.end_s is not None
        assert returned.end_s <= without.end_s + 1e-6


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 200)), min_size=1, max_size=5), st.integers(0, 1))
def test_answers_are_what_the_next_turn_goes_on_with(turns: list[tuple[int, int]], shared: int) -> None:
    """Prompts whose last block is not whole, as Mooncake's."""
    requests, tokens, whole = [], 0, [1] * shared
    for at, (new, output) in enumerate(turns):
        tokens += new + (BLOCK if at == 0 else 0)
        while len(whole) < tokens // BLOCK:
            whole.append(1000 + len(whole))
        rest = [5000 + at] if tokens % BLOCK else []
        requests.append(blocks(float(at), (*whole[: tokens // BLOCK], *rest), tokens, output))
        tokens += output
    found = answered(requests)
    texts = [packed_tokens(turn.segments) for turn in found]
    for index, request in enumerate(requests):
        assert len(texts[index]) == 4 * (request.tokens + request.output_tokens)
    for index in range(len(requests) - 1):
        if found[index + 1].turn == found[index].turn + 1:
            assert texts[index + 1].startswith(texts[index])
    whole_tokens = requests[-1].tokens // BLOCK * BLOCK * 4
    assert texts[-1][:whole_tokens] == prompt(requests[-1])[:whole_tokens]
