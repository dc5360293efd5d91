"""Constraints on their way to the stages, and requests whose grammar rejects a token."""

import pytest

from headrace.core.messages.orders import Forward, PrepareReceive
from headrace.core.messages.replies import RequestFailed, RequestFinished
from headrace.core.messages.stage_events import KvReceived, PlanDone, SampledToken
from headrace.core.types.packed import pack
from headrace.core.types.requests.constraint import Constraint, GrammarRejection, GrammarStart
from headrace.core.types.requests.request import FetchFrom, FirstToken
from tests.scheduler.bench import Bench, ids, only

WORD = Constraint("regex", "[a-z]+")


def forward_of(bench: Bench) -> Forward:
    forward = bench.plan()
    assert forward is not None
    return forward


def test_the_first_row_brings_the_constraint_and_no_other_row() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=4)
    bench.submit("a", 7, max_tokens=3, constraint=WORD)
    found = []
    for tokens in ((), (1,), (2,), (3,)):
        forward = forward_of(bench)
        found.append(forward.rows[0].grammar)
        bench.done(forward, *tokens)
    assert found == [GrammarStart(WORD), None, None, None]
    bench.assert_empty()


def test_a_preempted_request_brings_it_again_with_its_tokens() -> None:
    bench = Bench(kv_pages=4, pipeline_depth=0, prefix_cache=False)
    bench.submit("old", 7, max_tokens=6)
    bench.submit("young", 7, max_tokens=6, constraint=WORD)
    bench.done(forward_of(bench), 1, 101)
    bench.done(forward_of(bench), 2, 102)
    for token in (3, 4, 5, 6):
        bench.done(forward_of(bench), token)
    assert bench.metric("preemptions_total") == 1
    (row,) = forward_of(bench).rows
    assert row.grammar == GrammarStart(WORD, pack((101, 102)))
    assert ids(row.tokens)[-2:] == [101, 102]


def fetched(bench: Bench) -> Forward:
    """A request whose first token comes from a prefill server, in its first plan here."""
    bench.prefill_up()
    bench.submit("a", 10, route=FetchFrom("p", "a"), max_tokens=5, constraint=WORD)
    expect = bench.last(PrepareReceive)
    bench.expecting(expect.request)
    bench.do(KvReceived(stage=0, request=expect.request, first=FirstToken(42, 10, 0), bytes=100, chunks=1))
    return forward_of(bench)


def test_a_fetched_request_brings_its_first_token() -> None:
    assert fetched(Bench(pipeline_depth=0)).rows[0].grammar == GrammarStart(WORD, pack((42,)))


def rejecting(bench: Bench, forward: Forward) -> list[object]:
    """The grammar of the one request in a plan cannot go on."""
    rejected = (GrammarRejection(forward.rows[0].request, "why"),)
    return list(bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.01, rejected=rejected)))


def test_a_first_token_of_a_prefill_server_that_is_rejected_fails_its_request() -> None:
    bench = Bench(pipeline_depth=0)
    error = only(rejecting(bench, fetched(bench)), RequestFailed).error
    assert (error.code, error.status, error.message, error.at_prefill) == ("grammar_rejected", 502, "why", True)
    bench.assert_empty()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_that_cannot_go_on_is_cut_short_and_is_no_error_of_the_server(depth: int) -> None:
    bench = Bench(pipeline_depth=depth)
    forward = fetched(bench)
    bench.done(forward, 7)
    assert only(rejecting(bench, forward_of(bench)), RequestFinished).reason == "length"
    assert bench.tokens("a") == [42, 7]
    bench.assert_empty()


def test_a_request_without_any_token_can_be_tried_again() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 5, max_tokens=2, constraint=WORD)
    error = only(rejecting(bench, forward_of(bench)), RequestFailed).error
    assert (error.code, error.status, error.retry_after_s) == ("grammar_rejected", 503, 1.0)
    bench.assert_empty()


def test_others_of_the_plan_go_on() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("bad", 5, max_tokens=2, constraint=WORD)
    bench.submit("good", 5, max_tokens=2, constraint=WORD)
    forward = forward_of(bench)
    bad, good = (row.request for row in forward.rows)
    rejected = (GrammarRejection(bad, "why"),)
    done = PlanDone(stage=0, seq=forward.seq, duration_s=0.01, samples=(SampledToken(good, 7),), rejected=rejected)
    assert only(bench.do(done), RequestFailed).rid == "bad"
    bench.done(forward_of(bench), 8)
    assert bench.tokens("good") == [7, 8]
    bench.assert_empty()
