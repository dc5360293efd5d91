"""Decoding here, and preemption when pages run out."""

from headrace.core.messages.orders import Forward, ReleaseRequest
from tests.scheduler.bench import Bench, ids, only


def forward_of(bench: Bench) -> Forward:
    forward = bench.plan()
    assert forward is not None
    return forward


def test_pages_grow_one_at_a_time() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 7, max_tokens=8)
    held = []
    for token in range(8):
        forward = forward_of(bench)
        held.append(len(ids(forward.rows[0].pages)))
        bench.done(forward, token)
    assert held == [2, 2, 3, 3, 3, 3, 4, 4]
    bench.assert_empty()


def test_the_latest_arrival_is_preempted_and_continues_where_it_was() -> None:
    bench = Bench(kv_pages=4, pipeline_depth=0, prefix_cache=False)
    bench.submit("old", 7, max_tokens=6)
    bench.submit("young", 7, max_tokens=6)
    bench.done(forward_of(bench), 1, 101)
    bench.done(forward_of(bench), 2, 102)  # position 7: both hold two pages
    forward = forward_of(bench)  # position 8: one of them has to give way
    serials = {row.request for row in forward.rows}
    assert len(serials) == 1
    assert bench.metric("preemptions_total") == 1
    assert bench.metric("queue_requests", "waiting") == 1
    released = bench.one(ReleaseRequest).request
    assert released not in serials
    bench.done(forward, 3)
    for token in (4, 5, 6):
        bench.done(forward_of(bench), token)
    assert bench.tokens("old") == [1, 2, 3, 4, 5, 6]
    again = forward_of(bench)
    row = again.rows[0]
    assert (row.start, ids(row.tokens), row.generated) == (0, [*range(7), 101, 102], 2)
    assert row.request not in (released, *serials), "a new serial: nothing late can land on it"
    bench.done(again, 103)
    for token in (104, 105, 106):
        bench.done(forward_of(bench), token)
    finished = bench.finished("young")
    assert bench.tokens("young") == [101, 102, 103, 104, 105, 106]
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (7, 6)
    assert finished.timing.total_s == 0.0
    bench.assert_empty()


def test_a_preempted_request_keeps_its_pages_until_its_plans_are_done() -> None:
    bench = Bench(kv_pages=4, pipeline_depth=1, prefix_cache=False)
    bench.submit("old", 7, max_tokens=6)
    bench.submit("young", 7, max_tokens=6)
    first = forward_of(bench)
    second = forward_of(bench)
    bench.done(first, 1, 101)
    assert bench.plan() is None, "young is in a plan in flight"
    assert bench.metric("preemptions_total") == 1
    assert bench.metric("kv_pages", "leased") == 4
    only(bench.done(second, 2, 102), ReleaseRequest)
    assert bench.tokens("young") == [101, 102]
    assert len(forward_of(bench).rows) == 1


def test_a_request_that_fills_the_pool_alone_ends() -> None:
    bench = Bench(kv_pages=2, pipeline_depth=1)
    bench.submit("a", 6, max_tokens=50)
    bench.compute(1, 2, 3)
    bench.plan()
    finished = bench.finished()
    assert (finished.reason, bench.tokens()) == ("length", [1, 2, 3])
    bench.assert_empty()


def test_a_page_held_twice_does_not_end_a_request_early() -> None:
    bench = Bench(kv_pages=6, pipeline_depth=0, chunk_tokens=64)
    bench.submit("a", 9, max_tokens=20)
    bench.submit("b", 9, max_tokens=1)
    bench.done(forward_of(bench), 1, 1)  # equal prompts, computed side by side: one keeps its own copy
    token = 2
    while bench.ended("a") == 0:
        forward = bench.plan()
        if forward is not None:
            bench.done(forward, token)
            token += 1
    assert bench.tokens("a") == list(range(1, 17)), "24 positions hold KV, and the last token needs none"
    assert bench.finished("a").reason == "length"
    bench.assert_empty()


def test_an_abort_of_a_preempted_request() -> None:
    bench = Bench(kv_pages=4, pipeline_depth=1, prefix_cache=False)
    bench.submit("old", 7, max_tokens=6)
    bench.submit("young", 7, max_tokens=6)
    first, second = forward_of(bench), forward_of(bench)
    bench.done(first, 1, 101)
    bench.plan()
    bench.abort("young")
    bench.done(second, 2, 102)
    assert bench.tokens("young") == [101]
    assert len(forward_of(bench).rows) == 1
