"""Computing before the peer has reserved, within bounds."""

from headrace.core.messages.frontend import Drain
from headrace.core.messages.orders import SendChunk
from headrace.core.messages.peers import TellFailed, TellFinished
from headrace.core.messages.replies import Held
from tests.scheduler.bench import Bench, none, only
from tests.scheduler.prefill.test_rendezvous import send_to


def optimist(**changes: object) -> Bench:
    bench = Bench(optimistic_start=True, **changes)
    bench.join()
    return bench


def test_a_prompt_is_computed_while_its_peer_gets_ready() -> None:
    bench = optimist()
    send_to(bench, tokens=40)
    bench.compute(7)
    assert bench.tokens() == [7]
    assert bench.all(SendChunk) == []
    assert bench.metric("held_pages") == 10
    bench.reserve(tokens=40)
    sends = bench.all(SendChunk)
    assert [(send.start, send.start + send.count) for send in sends] == [(0, 16), (16, 32), (32, 40)]
    assert bench.metric("held_pages") == 0
    for send in sends:
        bench.ack(send)
    assert bench.finished().reason == "handoff"
    assert bench.all(Held) == [], "the client did not ask for that"
    bench.assert_empty()


def test_a_peer_may_come_between_two_chunks() -> None:
    bench = optimist(pipeline_depth=0)
    send_to(bench, tokens=40)
    first = bench.plan()
    assert first is not None
    bench.done(first)
    bench.reserve(tokens=40)
    bench.compute(7)
    sends = bench.all(SendChunk)
    assert sum(send.count for send in sends) == 40
    for send in sends:
        bench.ack(send)
    assert bench.finished().reason == "handoff"
    bench.assert_empty()


def test_a_request_that_no_peer_reserves_is_failed_at_the_bootstrap_timeout() -> None:
    bench = optimist(bootstrap_timeout_s=10.0)
    send_to(bench)
    bench.compute(7)
    bench.wait(9.9)
    assert bench.ended() == 0
    bench.wait(0.2)
    assert (bench.error().code, bench.error().status) == ("no_peer", 504)
    bench.assert_empty()
    assert only(bench.reserve(), TellFailed).error.code == "no_peer"


def test_a_plan_in_flight_outlives_a_peer_that_does_not_come() -> None:
    bench = optimist(bootstrap_timeout_s=10.0)
    send_to(bench)
    forward = bench.plan()
    assert forward is not None
    bench.wait(11)
    assert bench.error().code == "no_peer"
    bench.done(forward, 7)
    bench.assert_empty()


def test_beyond_the_bound_prompts_wait_for_their_peers() -> None:
    bench = optimist(kv_pages=12, hold_percent=50)
    send_to(bench, "a", 16, "t")
    send_to(bench, "b", 16, "u")
    bench.compute(7)
    assert (bench.tokens("a"), bench.tokens("b")) == ([7], [])
    assert bench.metric("queue_requests", "bootstrap") == 1
    bench.reserve("u", 16)
    bench.compute(8)
    assert bench.tokens("b") == [8], "its peer is here"
    bench.reserve("t", 16)
    for send in bench.all(SendChunk):
        bench.ack(send)
    bench.assert_empty()


def test_held_prompts_take_from_the_same_share() -> None:
    bench = optimist(kv_pages=12, hold_percent=50)
    send_to(bench, "a", 16, "t", hold=True)
    send_to(bench, "b", 16, "u")
    bench.compute(7)
    assert bench.metric("queue_requests", "bootstrap") == 1


def test_a_first_token_that_ends_the_request_is_kept_for_the_peer() -> None:
    bench = optimist()
    send_to(bench, max_tokens=1)
    bench.compute(7)
    assert bench.finished().reason == "length"
    told = only(bench.reserve(), TellFinished)
    assert told.first is not None
    assert (told.first.token, told.first.finish_reason) == (7, "length")
    bench.assert_empty()


def test_a_drain_waits_for_the_peer() -> None:
    bench = optimist()
    send_to(bench)
    bench.compute(7)
    effects = bench.do(Drain())
    assert bench.ended() == 0
    assert none(effects, TellFailed)
    bench.reserve()
    for send in bench.all(SendChunk):
        bench.ack(send)
    assert bench.finished().reason == "handoff"
    bench.assert_empty()


def test_without_optimistic_start_nothing_is_computed_early() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    assert bench.plan() is None
