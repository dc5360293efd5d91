"""Requests whose results are NaN or infinite: only they fail, and their pages are not kept in the prefix cache."""

import pytest

from headrace.core.messages.orders import Forward, PrepareReceive, ReleaseRequest, SendChunk
from headrace.core.messages.peers import TellFailed
from headrace.core.messages.replies import RequestFailed
from headrace.core.messages.stage_events import KvReceived, PlanDone, SampledToken
from headrace.core.types.requests.request import FetchFrom, FirstToken, PromptPosting, SendTo
from headrace.scheduler.scheduler import Effect
from tests.scheduler.bench import Bench, none, only


def forward_of(bench: Bench) -> Forward:
    forward = bench.plan()
    assert forward is not None
    return forward


def fail_rows(bench: Bench, forward: Forward, bad: set[int], token: int = 7) -> list[Effect]:
    """Report a plan in which the rows of the bad requests came out NaN; every other sampled row gets the token."""
    samples = tuple(
        SampledToken(row.request, token) for row in forward.rows if row.sample is not None and row.request not in bad
    )
    last = bench.config.stages - 1
    done = PlanDone(stage=last, seq=forward.seq, duration_s=0.01, samples=samples, nonfinite=tuple(bad))
    return bench.do(done)


def cached(bench: Bench) -> float:
    return bench.metric("kv_pages", "cached")


def fetch(bench: Bench, rid: str, *, token: int = 42, posting: PromptPosting = "local", **fields: object) -> None:
    """Submit a prompt of ten tokens whose KV and first token come from a prefill server."""
    bench.submit(rid, 10, route=FetchFrom("p", rid, posting), **fields)
    expect = bench.last(PrepareReceive)
    bench.expecting(expect.request)
    bench.do(KvReceived(stage=0, request=expect.request, first=FirstToken(token, 10, 0), bytes=100, chunks=1))


def test_one_row_of_a_batch_fails_and_the_others_go_on() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=64)
    bench.submit("good", 9, max_tokens=3)
    bench.submit("bad", list(range(100, 109)), max_tokens=3)
    bench.submit("other", list(range(200, 209)), max_tokens=1)
    forward = forward_of(bench)
    effects = fail_rows(bench, forward, {forward.rows[1].request})
    error = only(effects, RequestFailed).error
    assert (error.code, error.status, error.field) == ("nonfinite_values", 500, "prompt")
    assert "first 9 tokens" in error.message
    assert only(effects, RequestFailed).rid == "bad"
    bench.compute(7, 7)
    assert (bench.tokens("good"), bench.tokens("bad"), bench.tokens("other")) == ([7, 7, 7], [], [7])
    assert cached(bench) == 4, "two full pages of each of the others"
    bench.assert_empty()


def test_a_chunk_fails_its_request_at_once_and_is_not_published() -> None:
    bench = Bench(pipeline_depth=1)
    bench.submit("a", 60)
    first, second = forward_of(bench), forward_of(bench)
    effects = fail_rows(bench, first, {first.rows[0].request})
    assert only(effects, RequestFailed).error.code == "nonfinite_values"
    assert bench.plan() is None
    assert none(effects, ReleaseRequest), "the next chunk is being computed"
    only(fail_rows(bench, second, {second.rows[0].request}), ReleaseRequest)
    assert (bench.ended(), cached(bench)) == (1, 0)
    bench.assert_empty()


def test_a_decoding_row() -> None:
    bench = Bench(pipeline_depth=1)
    bench.submit("a", 9, max_tokens=20)
    bench.done(forward_of(bench), 1)
    first, second = forward_of(bench), forward_of(bench)
    fail_rows(bench, first, {first.rows[0].request})
    assert bench.error().code == "nonfinite_values"
    fail_rows(bench, second, {second.rows[0].request})
    assert (bench.tokens(), cached(bench)) == ([1], 0), "it is not known which of its pages is bad"
    bench.assert_empty()


def test_the_peer_gets_failed_and_no_last_chunk() -> None:
    bench = Bench(pipeline_depth=0)
    bench.join()
    bench.submit("a", 20, route=SendTo("t"), max_tokens=4)
    bench.reserve(tokens=20)
    bench.done(forward_of(bench))
    sent = bench.one(SendChunk)
    forward = forward_of(bench)
    effects = fail_rows(bench, forward, {forward.rows[0].request})
    assert only(effects, RequestFailed).error.status == 500
    assert none(effects, SendChunk)
    bench.ack(sent)
    told = only(bench.quiet(sent.request), TellFailed).error
    assert (told.code, told.status) == ("nonfinite_values", 500)
    assert cached(bench) == 0
    bench.assert_empty()


def test_fetched_kv_is_published_after_its_first_plan() -> None:
    bench = Bench(pipeline_depth=0)
    bench.prefill_up()
    fetch(bench, "a", max_tokens=4)
    assert bench.metric("kv_pages", "cached") == 0
    bench.done(forward_of(bench), 1)
    bench.submit("b", 10, route=FetchFrom("p", "b"))
    assert bench.last(PrepareReceive).start == 8, "its full pages are cached"


def test_fetched_kv_with_nan_is_not_cached() -> None:
    bench = Bench(pipeline_depth=0)
    bench.prefill_up()
    fetch(bench, "a", max_tokens=4)
    bench.submit("b", 10, route=FetchFrom("p", "b"))
    other = bench.last(PrepareReceive)
    assert other.start == 0, "fetched KV is not used by other requests before its first plan"
    forward = forward_of(bench)
    fail_rows(bench, forward, {forward.rows[0].request})
    assert bench.error().code == "nonfinite_values"
    assert cached(bench) == 0
    bench.expecting(other.request)
    bench.do(KvReceived(stage=0, request=other.request, first=FirstToken(5, 10, 0), bytes=100, chunks=1))
    bench.done(forward_of(bench), 6)
    assert bench.tokens("b") == [5, 6]


def test_fetched_kv_of_a_preempted_request_is_cached() -> None:
    bench = Bench(kv_pages=5, pipeline_depth=0)
    bench.prefill_up()
    bench.submit("old", list(range(500, 507)), max_tokens=20)
    bench.done(forward_of(bench), 1)
    bench.done(forward_of(bench), 2)  # position 7: its two pages are full
    fetch(bench, "young", max_tokens=4)
    forward = forward_of(bench)  # position 8 of old needs a page
    assert bench.metric("preemptions_total") == 1
    bench.done(forward, 3)
    bench.abort("old")
    again = forward_of(bench)
    assert (again.rows[0].start, again.rows[0].count) == (8, 3), "only what its cached pages lack is computed"


def test_a_forbidden_first_token_leaves_its_prompt_cached() -> None:
    for token, pages in ((42, 2), (43, 0)):
        bench = Bench(pipeline_depth=0)
        bench.prefill_up()
        fetch(bench, "a", token=token, posting="external", min_tokens=2, max_tokens=4, stop_token_ids=(42,))
        bench.abort("a")
        assert cached(bench) == pages


def test_pages_that_were_published_before_the_nan_was_found_leave_the_tree() -> None:
    """On a GPU chunks are not checked; requests that use their pages come out NaN as well."""
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 40)
    bench.done(forward_of(bench))
    bench.submit("b", [*range(16), 900, 901], priority=1)
    assert cached(bench) == 0
    bench.done(forward_of(bench))
    forward = forward_of(bench)  # the end of a, and all of b that is not cached
    rows = {row.request: row for row in forward.rows}
    assert sorted(row.start for row in rows.values()) == [16, 32]
    late = next(request for request, row in rows.items() if row.start == 32)
    fail_rows(bench, forward, {late}, token=3)
    assert bench.error("a").code == "nonfinite_values"
    assert cached(bench) == 0, "b uses the first four pages"
    forward = forward_of(bench)
    fail_rows(bench, forward, {forward.rows[0].request})
    assert bench.error("b").code == "nonfinite_values"
    assert cached(bench) == 0
    bench.assert_empty()


@pytest.mark.parametrize("finish", [False, True])
def test_pages_of_earlier_chunks_leave_the_tree_when_the_request_was_cancelled_meanwhile(finish: bool) -> None:
    """On a GPU chunks are not checked: those before the row in flight have been published."""
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 40)
    bench.done(forward_of(bench))
    bench.done(forward_of(bench))
    forward = forward_of(bench)
    bench.abort("a", finish=finish)
    assert bench.ended("a") == 1
    fail_rows(bench, forward, {forward.rows[0].request})
    assert (bench.ended("a"), cached(bench)) == (1, 0)
    bench.submit("b", 40)
    assert forward_of(bench).rows[0].start == 0, "nothing of it is used again"


def test_a_row_in_flight_of_a_cancelled_request_leaves_good_pages_cached() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 40)
    bench.done(forward_of(bench))
    bench.done(forward_of(bench))
    forward = forward_of(bench)
    bench.abort("a")
    bench.done(forward, 5)
    assert cached(bench) == 8
    bench.assert_empty()


def test_pages_below_which_results_were_good_stay() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("long", 16, max_tokens=1)
    bench.compute(5)
    assert cached(bench) == 4
    bench.submit("short", [*range(8), 900], max_tokens=4)
    forward = forward_of(bench)
    assert forward.rows[0].start == 8
    fail_rows(bench, forward, {forward.rows[0].request})
    assert cached(bench) == 4, "two of them were used, and have children"
    bench.assert_empty()
