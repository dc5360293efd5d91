"""Which requests are admitted, and the errors of those that are refused."""

import pytest

from headrace.core.messages.frontend import Drain, QueryStats, Shutdown
from headrace.core.messages.orders import ShutdownStage
from headrace.core.messages.peers import TellFailed
from headrace.core.messages.replies import Drained, EngineState, RequestFailed, StatsReply
from headrace.core.types.requests.request import AnyRoute, FetchFrom, SendTo
from tests.scheduler.bench import Bench, none, only


def test_not_ready_until_every_stage_is() -> None:
    bench = Bench(up=False, stages=2)
    bench.submit("early")
    assert (bench.error("early").code, bench.error("early").status) == ("not_ready", 503)
    bench.up()
    assert bench.one(EngineState) == EngineState(ready=True)
    assert none(bench.submit("a"), RequestFailed)


def test_a_stage_with_another_page_size_is_refused() -> None:
    bench = Bench(up=False)
    other = Bench(up=False, page_size=8)
    other.config = bench.config
    other.up()
    state = other.one(EngineState)
    assert not state.ready
    assert "4" in state.reason
    assert "8" in state.reason


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        ([], "invalid_value", ["at least one token"]),
        (128, "prompt_too_long", ["128"]),
        (127, None, []),
        ([1, 1000], "invalid_token", ["1000"]),
        ([1, -1], "invalid_token", ["-1"]),
        ([999], None, []),
    ],
)
def test_prompt_limits(tokens: int | list[int], code: str | None, words: list[str]) -> None:
    bench = Bench()
    bench.submit("a", tokens)
    if code is None:
        assert bench.ended() == 0
        return
    error = bench.error()
    assert (error.code, error.status, error.field) == (code, 400, "prompt")
    assert all(word in error.message for word in words)
    bench.assert_empty()


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    bench = Bench(kv_pages=4)
    bench.submit("a", 17)
    error = bench.error()
    assert error.status == 400
    assert "5 KV pages" in error.message
    assert "4" in error.message


def test_max_tokens_is_clipped_by_the_room() -> None:
    bench = Bench(max_model_len=12)
    bench.submit("a", 10, max_tokens=50)
    bench.compute(1, 2)
    assert bench.finished().reason == "length"
    assert bench.tokens() == [1, 2]


def test_max_tokens_below_one_is_refused() -> None:
    bench = Bench()
    bench.submit("a", 3, max_tokens=0)
    assert bench.error().field == "max_tokens"


def test_a_full_queue_says_when_to_come_back() -> None:
    bench = Bench(max_queued_tokens=20)
    bench.submit("huge", 100)
    assert bench.ended("huge") == 0, "alone it gets in"
    bench.submit("b", 1)
    error = bench.error("b")
    assert (error.code, error.status, error.retry_after_s) == ("queue_full", 429, 1.0)
    forward = bench.plan()
    assert forward is not None
    bench.done(forward, seconds=0.1)  # 16 tokens
    bench.submit("c", 1)
    assert bench.error("c").retry_after_s == pytest.approx((84 + 1 - 20) / 160, abs=0.001)


def test_planned_tokens_are_not_queued() -> None:
    bench = Bench(max_queued_tokens=20)
    bench.submit("a", 16)
    bench.plan()
    assert bench.metric("unplanned_tokens") == 0
    bench.submit("b", 20)
    assert bench.ended("b") == 0


def test_the_queue_is_bounded_in_requests() -> None:
    bench = Bench(max_queued_requests=2)
    for rid in "abc":
        bench.submit(rid, 3)
    assert bench.error("c").code == "queue_full"


def test_an_active_rid_or_ticket_is_a_conflict() -> None:
    bench = Bench()
    bench.submit("a", route=SendTo("t"))
    bench.submit("b", route=SendTo("t"))
    assert (bench.error("b").code, bench.error("b").status) == ("ticket_in_use", 409)
    effects = bench.submit("a", route=SendTo("u"))
    assert only(effects, RequestFailed).error.status == 409
    bench.join()
    bench.reserve("t")
    assert bench.metric("queue_requests", "waiting") == 1, "the first use of the ticket is untouched"


@pytest.mark.parametrize("route", [SendTo(""), FetchFrom("p", "")])
def test_a_handoff_without_a_ticket_is_refused(route: AnyRoute) -> None:
    bench = Bench()
    bench.prefill_up()
    bench.submit("a", 10, route=route)
    assert (bench.error().status, bench.error().field) == (400, "ticket")


def test_drain_refuses_finishes_and_says_so_once() -> None:
    bench = Bench()
    bench.join()
    bench.submit("a", 3, max_tokens=1)
    bench.reserve("early", 3)
    effects = bench.do(Drain())
    assert only(effects, EngineState) == EngineState(ready=False, reason="draining")
    assert only(effects, TellFailed).error.code == "draining"
    bench.submit("b")
    assert (bench.error("b").code, bench.error("b").status) == ("draining", 503)
    assert bench.all(Drained) == []
    bench.compute(5)
    assert bench.finished().reason == "length"
    bench.one(Drained)
    bench.assert_empty()


def test_shutdown_fails_every_request_and_ends_the_stages() -> None:
    bench = Bench()
    bench.join()
    bench.submit("a", route=SendTo("t"))
    bench.reserve("t")
    bench.plan()
    effects = bench.do(Shutdown())
    assert only(effects, RequestFailed).error.status == 503
    assert only(effects, TellFailed).ticket == "t"
    only(effects, ShutdownStage)
    bench.assert_empty()


def test_the_deadline_of_the_client_holds_in_any_phase() -> None:
    bench = Bench()
    bench.submit("a", 3, deadline_s=2.0)
    forward = bench.plan()
    assert forward is not None
    bench.wait(1.9)
    assert bench.ended() == 0
    bench.wait(0.2)
    assert (bench.error().code, bench.error().status) == ("deadline_exceeded", 504)
    assert not bench.scheduler.idle, "its plan is in flight"
    bench.done(forward, 5)
    bench.assert_empty()


def test_stats_are_answered() -> None:
    bench = Bench()
    reply = only(bench.do(QueryStats(token=9)), StatsReply)
    assert reply.token == 9
    assert any(sample.name == "kv_pages" for sample in reply.stats.samples)


@pytest.mark.parametrize(
    ("cached", "limit", "refused"),
    [(False, 10, True), (False, 11, False), (True, 2, True), (True, 3, False), (True, None, False)],
)
def test_a_client_may_want_only_what_is_cached(cached: bool, limit: int | None, refused: bool) -> None:
    """Ten tokens in pages of four: of a prompt that was there before, two are not cached. From the limit on it is 412,
    as with llm-d's nonCachedTokens."""
    bench = Bench(page_size=4)
    if cached:
        bench.submit("before", 10, max_tokens=1)
        bench.compute(1)
    bench.submit("a", 10, uncached_limit=limit)
    if refused:
        error = bench.error("a")
        assert (error.code, error.status) == ("prefill_needed", 412)
        assert f"less than {limit}" in error.message
    assert (bench.ended("a"), bench.plan() is None) == (refused, refused)
