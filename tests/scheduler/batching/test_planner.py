"""Which rows go into a plan, and their results when everything is computed here."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.orders import Forward, ReleaseRequest
from headrace.core.messages.replies import LogprobPart, Progress, RequestFinished
from headrace.core.messages.stage_events import PlanDone, PromptLogprobs, SampledToken
from headrace.core.types.requests.prompt_logprobs import PackedLogprobs, pack_runs
from headrace.core.types.requests.request import Discard, TokenLogprob
from tests.scheduler.bench import Bench, ids, only


def planned(forward: Forward | None) -> list[tuple[int, int, bool]]:
    assert forward is not None
    return [(row.start, row.count, row.sample is not None) for row in forward.rows]


def test_a_prompt_is_computed_in_chunks_and_plans_run_ahead() -> None:
    bench = Bench(stages=2, pipeline_depth=1)
    bench.submit("a", 40, route=Discard())
    first, second, third = bench.plan(), bench.plan(), bench.plan()
    assert [planned(forward) for forward in (first, second, third)] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
    ]
    assert bench.plan() is None, "no credit, and nothing to plan"
    assert first is not None
    assert second is not None
    assert third is not None
    row = third.rows[0]
    assert ids(row.tokens) == list(range(32, 40))
    assert len(ids(row.pages)) == 10
    assert ids(row.pages)[:4] == ids(first.rows[0].pages)
    bench.done(first, stage=0)
    assert bench.metric("plans_in_flight") == 3, "only the last stage ends a plan"
    for forward in (first, second):
        bench.done(forward)
    bench.done(third, 77)
    assert bench.finished().reason == "discarded"
    assert bench.tokens() == [77]
    bench.assert_empty()


def test_credits_bound_the_plans_in_flight() -> None:
    bench = Bench(stages=1, pipeline_depth=1)
    bench.submit("a", 60)
    assert bench.plan() is not None
    assert bench.plan() is not None
    assert bench.plan() is None
    bench.done(bench.all(Forward)[0])
    assert bench.plan() is not None


def test_the_budget_goes_to_decode_rows_then_running_prefills_then_new_ones() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 4)
    bench.compute(1)
    bench.submit("b", 20, cache_salt="b")
    bench.submit("c", 20, cache_salt="c")
    second = bench.plan()
    assert planned(second) == [(4, 1, True), (0, 15, False)]
    assert second is not None
    bench.done(second, 2)
    third = bench.plan()
    assert planned(third) == [(5, 1, True), (15, 5, True), (0, 10, False)]


def test_a_plan_has_no_more_rows_than_it_may() -> None:
    bench = Bench(max_running=2)
    for rid in "abc":
        bench.submit(rid, 2, route=Discard(), cache_salt=rid)
    assert planned(bench.plan()) == [(0, 2, True), (0, 2, True)]
    assert planned(bench.plan()) == [(0, 2, True)]


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(kv_pages=6, prefix_cache=False, policy="fcfs")
    bench.submit("a", 12, route=Discard())
    assert planned(bench.plan()) == [(0, 12, True)]
    bench.submit("b", 16, route=Discard())
    bench.submit("c", 2, route=Discard())
    assert bench.plan() is None
    bench.done(bench.last(Forward), 1)
    assert planned(bench.plan()) == [(0, 16, True)]


def test_decode_rows_run_ahead_of_their_tokens() -> None:
    bench = Bench()
    bench.submit("a", 4, max_tokens=3)
    prefill, ahead = bench.plan(), bench.plan()
    assert planned(ahead) == [(4, 1, True)]
    assert prefill is not None
    assert ahead is not None
    assert ahead.rows[0].tokens == b""
    bench.done(prefill, 50)
    third = bench.plan()
    assert third is not None
    assert third.rows[0].tokens == b"", "the token of position 5 is not known yet"
    bench.done(ahead, 51)
    assert bench.plan() is None, "max_tokens are planned"
    bench.done(third, 52)
    assert bench.tokens() == [50, 51, 52]
    bench.assert_empty()


def test_a_row_feeds_the_one_behind_it_unless_it_is_the_last() -> None:
    bench = Bench(pipeline_depth=4, policy="fcfs")
    bench.submit("a", 20, max_tokens=3)
    bench.submit("b", 4, route=Discard(), max_tokens=3, cache_salt="b")
    rows = [row for _ in range(4) if (forward := bench.plan()) is not None for row in forward.rows]
    mine = [(row.start, row.tokens == b"", row.feeds) for row in rows if row.request == rows[0].request]
    assert mine == [(0, False, False), (16, False, True), (20, True, True), (21, True, False)]
    assert not any(row.feeds for row in rows if row.request != rows[0].request), "it decodes elsewhere"


def test_exactly_max_tokens_are_planned() -> None:
    bench = Bench(pipeline_depth=3)
    bench.submit("a", 4, max_tokens=3)
    forwards = [bench.plan() for _ in range(4)]
    assert [forward is not None for forward in forwards] == [True, True, True, False]
    for forward, token in zip(forwards, (7, 8, 9), strict=False):
        assert forward is not None
        bench.done(forward, token)
    assert bench.tokens() == [7, 8, 9]
    assert bench.finished().reason == "length"
    bench.assert_empty()


def test_rows_beyond_a_stop_token_are_ignored() -> None:
    bench = Bench(pipeline_depth=2)
    bench.submit("a", 4, max_tokens=10, stop_token_ids=(9,))
    first, second, third = bench.plan(), bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert third is not None
    bench.done(first, 8)
    bench.done(second, 9)
    finished = bench.finished()
    assert (finished.reason, finished.usage.completion_tokens) == ("stop", 2)
    assert not bench.scheduler.idle, "its pages are in a plan in flight"
    only(bench.done(third, 10), ReleaseRequest)
    assert bench.tokens() == [8, 9]
    bench.assert_empty()


def test_min_tokens_outlasts_a_stop_token() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 4, max_tokens=10, min_tokens=3, stop_token_ids=(9,))
    bench.compute(9, 9, 9)
    assert bench.tokens() == [9, 9, 9]
    assert bench.finished().reason == "stop"


def test_a_shared_prefix_is_computed_once() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard())
    bench.compute(1)
    bench.submit("b", 10, route=Discard())
    assert planned(bench.plan()) == [(8, 2, True)]
    bench.done(bench.last(Forward), 1)
    assert bench.finished("b").usage.cached_tokens == 8
    bench.submit("c", 8, route=Discard())
    assert planned(bench.plan()) == [(4, 4, True)], "the last token is always computed"
    bench.done(bench.last(Forward), 1)
    bench.submit("d", 10, route=Discard(), cache_salt="other")
    assert planned(bench.plan()) == [(0, 10, True)]
    assert bench.metric("cached_tokens_total") == 12
    assert bench.metric("prompt_tokens_total") == 38


def test_prompt_logprobs_skip_the_prefix_and_come_back_in_order() -> None:
    bench = Bench(chunk_tokens=4)
    bench.submit("a", 6, route=Discard())
    bench.compute(1)
    bench.submit("b", 6, route=Discard(), prompt_logprobs=2)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert [(row.start, row.prompt_logprobs, row.next_token) for row in (*first.rows, *second.rows)] == [
        (0, 2, 4),
        (4, 2, None),
    ]
    entries = [TokenLogprob(token, -float(token)) for token in range(6)]
    serial = first.rows[0].request
    bench.do(
        PlanDone(
            stage=0,
            seq=first.seq,
            duration_s=0.1,
            prompt_logprobs=(PromptLogprobs(serial, pack_runs(1, entries[1:5])),),
        )
    )
    bench.do(
        PlanDone(
            stage=0,
            seq=second.seq,
            duration_s=0.1,
            samples=(SampledToken(serial, 3),),
            prompt_logprobs=(PromptLogprobs(serial, pack_runs(5, entries[5:])),),
        )
    )
    assert reported_logprobs(bench, "b", 6) == (None, *entries[1:])


def reported_logprobs(bench: Bench, rid: str, tokens: int) -> tuple[TokenLogprob | None, ...]:
    """Of a prompt of so many tokens; all of them are reported before the end of the request."""
    order = [effect for effect in bench.seen if isinstance(effect, LogprobPart | RequestFinished) and effect.rid == rid]
    assert [type(effect) for effect in order].index(RequestFinished) == len(order) - 1
    found = PackedLogprobs(tokens)
    for part in bench.all(LogprobPart):
        if part.rid == rid:
            found.add(part.run)
    return tuple(found)


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(token))


@given(start=st.integers(0, 14), chunk=st.integers(1, 14), shared=st.integers(0, 14))
def test_prompt_logprobs_from_a_position_on(start: int, chunk: int, shared: int) -> None:
    """The cache serves whole pages below the position whose logits are the first that are wanted, and every position
    from start on is reported once, wherever chunks and cached pages end."""
    bench = Bench(chunk_tokens=chunk, page_size=4, pipeline_depth=0)
    prompt = list(range(100, 114))
    bench.submit("a", [*prompt[:shared], *range(14 - shared)], route=Discard())
    bench.compute(1)
    before = bench.metric("cached_tokens_total")
    bench.submit("b", prompt, route=Discard(), prompt_logprobs=1, prompt_logprobs_start=start)
    reported: list[int] = []
    starts: list[int] = []
    while not bench.ended("b"):
        forward = bench.plan()
        assert forward is not None
        (row,) = forward.rows
        starts.append(row.start)
        found: tuple[PromptLogprobs, ...] = ()
        if row.prompt_logprobs is not None:
            first, targets = row.prompt_targets()
            reported += range(first, first + len(targets))
            assert targets == prompt[first : first + len(targets)]
            found = (PromptLogprobs(row.request, pack_runs(first, list(map(scored, targets)), most=3)),)
        samples = () if row.sample is None else (SampledToken(row.request, 1),)
        bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.1, samples=samples, prompt_logprobs=found))
    assert reported == list(range(max(1, start), 14))
    cached = min(shared, 13, max(0, start - 1)) // 4 * 4
    assert bench.metric("cached_tokens_total") - before == cached == starts[0]
    entries = [scored(token) if at >= max(1, start) else None for at, token in enumerate(prompt)]
    assert reported_logprobs(bench, "b", 14) == (tuple(entries) if reported else ())


def test_progress_only_where_asked_for() -> None:
    bench = Bench()
    bench.submit("a", 20, route=Discard(), progress=True)
    bench.submit("b", 20, route=Discard(), cache_salt="b")
    bench.compute(1, 1)
    assert [(p.rid, p.phase, p.done, p.total) for p in bench.all(Progress)] == [
        ("a", "computing", 16, 20),
        ("a", "computing", 20, 20),
    ]


def test_phases_sum_to_the_total() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 4, max_tokens=2)
    bench.now += 1
    first = bench.plan()
    bench.now += 2
    assert first is not None
    bench.done(first, 5)
    second = bench.plan()
    bench.now += 4
    assert second is not None
    bench.done(second, 6)
    timing = bench.finished().timing
    assert (timing.queue_s, timing.forward_s, timing.decode_s, timing.total_s) == (1, 2, 4, 7)


def test_an_abort_waits_for_its_plans_before_pages_come_back() -> None:
    bench = Bench(kv_pages=4)
    bench.submit("a", 16)
    forward = bench.plan()
    assert forward is not None
    bench.abort("a")
    assert (bench.error().code, bench.error().status) == ("cancelled", 499)
    bench.submit("b", 4, route=Discard(), cache_salt="b")
    assert bench.plan() is None, "its pages are still being written"
    bench.done(forward, 1)
    assert planned(bench.plan()) == [(0, 4, True)]
    assert bench.ended("a") == 1


def test_an_abort_that_finishes_reports_what_was_generated() -> None:
    bench = Bench()
    bench.submit("a", 4, max_tokens=10)
    forward = bench.plan()
    assert forward is not None
    bench.done(forward, 5)
    finished = only(bench.abort("a", finish=True), RequestFinished)
    assert (finished.reason, finished.usage.completion_tokens) == ("stop", 1)
    bench.assert_empty()


def test_an_unknown_abort_is_counted() -> None:
    bench = Bench()
    bench.abort("unknown")
    assert bench.metric("dropped_messages_total", "unknown_rid") == 1


def test_with_several_stages_decoding_requests_take_turns() -> None:
    bench = Bench(stages=2, pipeline_depth=0, max_running=8)
    for rid in "abcd":
        bench.submit(rid, 2, max_tokens=20, cache_salt=rid)
    prefill = bench.plan()
    assert prefill is not None
    bench.done(prefill, 1, 1, 1, 1)
    turns = [bench.plan(), bench.plan()]
    rows = [[row.request for row in forward.rows] for forward in turns if forward is not None]
    assert [len(row) for row in rows] == [2, 2]
    assert len({request for row in rows for request in row}) == 4


def test_a_missing_sample_fails_the_request_and_no_other() -> None:
    bench = Bench()
    bench.submit("a", 4)
    bench.submit("b", 4, cache_salt="b", route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.1, samples=(SampledToken(forward.rows[1].request, 3),)))
    assert bench.error("a").code == "stage_failed"
    assert bench.finished("b").reason == "discarded"
