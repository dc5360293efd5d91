"""Hidden states and draft data: which rows are asked for them, and what is passed on to the client."""

import pytest

from headrace.core.messages.orders import Forward, SendChunk
from headrace.core.messages.replies import HiddenPart, RequestFinished, Tokens
from headrace.core.messages.stage_events import PlanDone, RowHidden, SampledToken
from headrace.core.types.requests.draft import Draft, DraftTerms, DraftTokens, HiddenStates
from headrace.core.types.requests.request import DecodeHere, Discard, FirstToken, SendTo
from tests.scheduler.bench import Bench

DRAFT = DraftTokens((7, 8, 9), (0.5, 0.25, 0.125))


def states(forward: Forward) -> tuple[RowHidden, ...]:
    """One byte-like element a position: what a stage reports of a plan's rows."""
    return tuple(
        RowHidden(row.request, HiddenStates(start, 2, "float16", bytes([start, 0, 0, 0]) * row.hidden))
        for row in forward.rows
        if row.hidden
        for start in [row.start + row.count - row.hidden]
    )


def report(bench: Bench, forward: Forward | None, *tokens: int) -> None:
    assert forward is not None
    sampled = [row for row in forward.rows if row.sample is not None]
    samples = tuple(
        SampledToken(row.request, token, None, DRAFT.best(row.draft_top_k))
        for row, token in zip(sampled, tokens, strict=True)
    )
    bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.003, samples=samples, hidden=states(forward)))


def asked(forward: Forward | None) -> list[tuple[int, int, int]]:
    assert forward is not None
    return [(row.start, row.count, row.hidden) for row in forward.rows]


def parts(bench: Bench, rid: str = "a") -> list[tuple[int, int]]:
    return [(part.states.start, part.states.count) for part in bench.all(HiddenPart) if part.rid == rid]


def test_all_states_are_computed_past_the_prefix_cache_and_come_in_order() -> None:
    bench = Bench(chunk_tokens=4)
    bench.submit("before", 10, route=Discard())
    bench.compute(1)
    bench.submit("a", 10, route=Discard(), hidden_states="all")
    plans = [bench.plan(), bench.plan()]
    assert [asked(plan) for plan in plans] == [[(0, 4, 4)], [(4, 4, 4)]]
    report(bench, plans[0])
    last = bench.plan()
    assert asked(last) == [(8, 2, 2)]
    report(bench, plans[1])
    report(bench, last, 3)
    assert parts(bench) == [(0, 4), (4, 4), (8, 2)]
    kinds = [type(effect) for effect in bench.seen]
    assert kinds.index(RequestFinished, kinds.index(HiddenPart)) > len(kinds) - 1 - kinds[::-1].index(HiddenPart)
    assert bench.finished("a").usage.cached_tokens == 0


def test_the_last_state_leaves_the_prefix_cached() -> None:
    bench = Bench()
    bench.submit("before", 10, route=Discard())
    bench.compute(1)
    bench.submit("a", 10, route=Discard(), hidden_states="last")
    forward = bench.plan()
    assert asked(forward) == [(8, 2, 1)]
    report(bench, forward, 3)
    assert parts(bench) == [(9, 1)]
    assert bench.finished("a").usage.cached_tokens == 8


def test_generated_tokens_have_states_too_and_those_after_a_preemption_come_once() -> None:
    """Two requests of 8 tokens in 5 pages of 4: the later one is preempted, and computed again."""
    bench = Bench(kv_pages=5, pipeline_depth=0)
    for rid in ("a", "b"):
        bench.submit(rid, [ord(rid), *range(7)], route=DecodeHere(), max_tokens=6, hidden_states="all")
    while (forward := bench.plan()) is not None:
        report(bench, forward, *[5 for row in forward.rows if row.sample is not None])
    assert bench.metric("preemptions_total")
    for rid in ("a", "b"):
        covered = [position for start, count in parts(bench, rid) for position in range(start, start + count)]
        assert covered == list(range(8 + 6 - 1))


def test_rows_of_others_are_asked_for_nothing() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard())
    bench.submit("b", [1, 2], route=Discard(), hidden_states="last", draft_top_k=2)
    forward = bench.plan()
    assert forward is not None
    assert [(row.hidden, row.draft_top_k) for row in forward.rows] == [(0, 0), (1, 2)]
    report(bench, forward, 3, 4)
    assert parts(bench, "a") == []
    drafts = {tokens.rid: tokens.draft for tokens in bench.all(Tokens)}
    assert drafts == {"a": None, "b": DRAFT.best(2)}


def test_draft_data_is_of_the_first_token_alone() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 4, route=DecodeHere(), max_tokens=3, draft_top_k=3)
    seen = []
    while (forward := bench.plan()) is not None:
        seen += [row.draft_top_k for row in forward.rows]
        report(bench, forward, 5)
    assert seen == [3, 0, 0]
    assert [tokens.draft for tokens in bench.all(Tokens)] == [DRAFT, None, None]


def test_states_of_a_request_that_has_ended_are_dropped() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard(), hidden_states="all")
    forward = bench.plan()
    bench.abort("a")
    report(bench, forward, 3)
    assert parts(bench) == []


BOTH = DraftTerms(hidden=True, top_k=2)


def sent(bench: Bench) -> FirstToken:
    last = bench.last(SendChunk).last
    assert last is not None
    return last


def test_a_peer_that_asks_gets_the_last_state_and_the_first_tokens() -> None:
    """In the last chunk; the client, who has not asked, gets neither."""
    bench = Bench(chunk_tokens=4)
    bench.join()
    bench.submit("a", 10, route=SendTo("t"))
    bench.reserve(draft=BOTH)
    wanted = []
    while (forward := bench.plan()) is not None:
        wanted += [(row.hidden, row.draft_top_k) for row in forward.rows]
        report(bench, forward, *[5 for row in forward.rows if row.sample is not None])
    assert wanted == [(0, 0), (0, 0), (1, 2)]
    assert [send.last is None for send in bench.all(SendChunk)] == [True, True, False]
    state = HiddenStates(9, 2, "float16", bytes([9, 0, 0, 0]))
    assert sent(bench).draft == Draft(state, DraftTokens((7, 8), (0.5, 0.25)))
    assert (parts(bench), bench.one(Tokens).draft) == ([], None)


@pytest.mark.parametrize("early", [True, False])
def test_a_peer_that_comes_late_gets_what_the_prompt_asked_for(early: bool) -> None:
    bench = Bench()
    bench.join()
    asks = {"hidden_states": "all", "draft_top_k": 1} if early else {}
    bench.submit("a", 10, route=SendTo("t", hold=True), **asks)
    report(bench, bench.plan(), 5)
    bench.reserve(draft=BOTH)
    state = HiddenStates(9, 2, "float16", bytes([0, 0, 0, 0]))
    assert sent(bench).draft == (Draft(state, DraftTokens((7,), (0.5,))) if early else None)


def test_a_peer_that_does_not_ask_gets_nothing_whatever_the_client_asks() -> None:
    bench = Bench()
    bench.join()
    bench.submit("a", 10, route=SendTo("t"), hidden_states="last", draft_top_k=3)
    bench.reserve()
    report(bench, bench.plan(), 5)
    assert sent(bench).draft is None
    assert parts(bench) == [(9, 1)]
    assert bench.one(Tokens).draft == DRAFT
