"""Held requests: computed before their peer comes, kept under a lease, sent when it does."""

import pytest

from headrace.core.messages.frontend import Abort, Drain
from headrace.core.messages.orders import CancelSend, SendChunk
from headrace.core.messages.peers import (
    PeerCancelled,
    PeerGone,
    PeerReleased,
    PeerRenewed,
    TellCancelled,
    TellFailed,
    TellFinished,
)
from headrace.core.messages.replies import Drained, Held, RequestFailed
from headrace.core.messages.stage_events import StageFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import Discard, SendTo
from tests.scheduler.bench import Bench, ids, none, only


def held(tokens: int = 10, *, bench: Bench | None = None, **fields: object) -> Bench:
    """A computed request "a" with ticket "t" that no peer has come for."""
    bench = bench or Bench()
    if not bench.metric("peers"):
        bench.join()
    hold(bench, "a", "t", tokens, **fields)
    bench.compute(42)
    return bench


def hold(bench: Bench, rid: str, ticket: str, tokens: int = 10, **fields: object) -> None:
    bench.submit(rid, tokens, route=SendTo(ticket, hold=True), **fields)


def renew(bench: Bench, ticket: str = "t", session: str = "s") -> None:
    bench.do(PeerRenewed(session=session, tickets=(ticket,)))


def test_the_answer_comes_with_the_prefill_and_the_bytes_with_the_reservation() -> None:
    bench = held(38, bench=Bench(chunk_tokens=15), progress=True)
    answer = bench.one(Held)
    assert (answer.lease_s, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30.0, 38, 1)
    assert answer.timing.bootstrap_s == 0
    assert bench.all(SendChunk) == []
    assert bench.ended() == 0
    assert bench.metric("queue_requests", "inflight") == 1
    assert bench.metric("metadata_rows_in_use") == 0
    assert (bench.metric("held_requests"), bench.metric("held_pages")) == (1, 10)
    bench.wait(20)
    bench.reserve(tokens=38)
    sends = bench.all(SendChunk)
    assert [(send.start, send.start + send.count) for send in sends] == [(0, 12), (12, 24), (24, 38)]
    assert [page for send in sends for page in ids(send.dst_pages)] == list(range(500, 510))
    assert [send.last is not None for send in sends] == [False, False, True]
    assert sends[-1].last is not None
    assert (sends[-1].last.token, sends[-1].last.prompt_tokens) == (42, 38)
    assert bench.metric("held_requests") == 0
    bench.wait(9)  # the lease would be over, and the peer is not silent yet
    for send in sends:
        bench.ack(send)
    assert bench.finished().handoff.chunks == 3
    assert bench.last(TellFinished).first is None
    bench.assert_empty()


def test_chunks_of_a_held_request_name_the_last_plan() -> None:
    bench = Bench(chunk_tokens=16)
    bench.join()
    hold(bench, "a", "t", 30)
    plans = []
    while (forward := bench.plan()) is not None:
        plans.append(forward.seq)
        bench.done(forward, *([42] if len(plans) == 2 else []))
    bench.reserve(tokens=30)
    assert {send.after for send in bench.all(SendChunk)} == {plans[-1]}


@pytest.mark.parametrize("cached", [0, 5, 8])
def test_tokens_that_the_peer_has_are_not_sent(cached: int) -> None:
    bench = held(30, bench=Bench(chunk_tokens=8))
    bench.reserve(tokens=30, cached=cached)
    sends = bench.all(SendChunk)
    covered = [position for send in sends for position in range(send.start, send.start + send.count)]
    assert covered == list(range(cached, 30))


def test_a_reservation_before_the_prompt() -> None:
    bench = Bench()
    bench.join()
    bench.reserve()
    hold(bench, "a", "t")
    assert bench.metric("held_requests") == 0
    bench.compute(42)
    assert bench.one(Held).lease_s == 0
    bench.ack(bench.one(SendChunk))
    assert bench.finished().reason == "handoff"
    bench.assert_empty()


def test_a_reservation_between_two_chunks() -> None:
    bench = Bench(chunk_tokens=16)
    bench.join()
    hold(bench, "a", "t", 40)
    forward = bench.plan()
    assert forward is not None
    bench.done(forward)
    bench.reserve(tokens=40)
    assert bench.metric("metadata_rows_in_use") == 1
    bench.compute(42)
    sends = bench.all(SendChunk)
    assert [(send.start, send.start + send.count) for send in sends] == [(0, 32), (32, 40)]
    assert sends[0].after > forward.seq
    for send in sends:
        bench.ack(send)
    assert bench.one(Held).lease_s == 0
    bench.assert_empty()


def test_a_reserved_ticket_waits_for_a_metadata_row_without_a_lease() -> None:
    bench = Bench(metadata_rows=1)
    bench.join()
    bench.submit("b", 5, route=SendTo("u"))
    bench.reserve("u", tokens=5)
    bench.compute(41)
    held(bench=bench)
    sent = bench.one(SendChunk)
    bench.reserve()
    assert len(bench.all(SendChunk)) == 1
    bench.wait(5)
    bench.ack(sent)
    bench.ack(bench.last(SendChunk))
    assert (bench.finished("a").reason, bench.finished("b").reason) == ("handoff", "handoff")
    bench.assert_empty()


def test_a_request_that_waits_for_pages_holds_no_metadata_row() -> None:
    """One waits for the pages of the other, which waits for a row: so the row must be free."""
    bench = held(40, bench=Bench(metadata_rows=1, kv_pages=16, hold_percent=100))
    bench.submit("b", list(range(100, 139)), route=SendTo("u"))
    bench.reserve("u", tokens=39)
    assert bench.plan() is None
    assert bench.metric("metadata_rows_in_use") == 0
    bench.reserve(tokens=40)
    for send in bench.all(SendChunk):
        bench.ack(send)
    assert bench.finished("a").reason == "handoff"
    bench.compute(43)
    for send in bench.all(SendChunk)[3:]:
        bench.ack(send)
    assert bench.finished("b").reason == "handoff"
    bench.assert_empty()


def test_an_expired_lease_fails_the_request_and_a_late_reservation() -> None:
    bench = held()
    bench.wait(29.9)
    assert bench.ended() == 0
    bench.wait(0.2)
    assert (bench.error().code, bench.error().status) == ("lease_expired", 504)
    assert bench.metric("leases_expired_total") == 1
    bench.assert_empty()
    assert bench.all(TellFailed) == []
    told = only(bench.reserve(), TellFailed)
    assert told.error.code == "lease_expired"


def test_heartbeats_renew_up_to_the_limit() -> None:
    bench = held(bench=Bench(hold_lease_s=10.0, hold_limit_s=35.0))
    for _ in range(4):
        bench.wait(8)
        renew(bench)
    assert bench.ended() == 0
    bench.wait(2.9)
    assert bench.ended() == 0
    renew(bench)
    bench.wait(0.2)
    assert "limit of 35 s" in bench.error().message
    bench.assert_empty()


def test_renewals_of_others_and_of_what_has_no_lease_do_nothing() -> None:
    bench = Bench()
    bench.join()
    hold(bench, "a", "t")
    renew(bench)
    renew(bench, "unknown")
    assert bench.metric("dropped_messages_total", "unknown_lease") == 2
    bench.compute(42)
    bench.wait(20)
    renew(bench, session="other")
    assert bench.metric("dropped_messages_total", "unknown_session") == 1
    bench.wait(11)
    assert bench.error().code == "lease_expired"
    renew(bench)
    assert bench.ended() == 1


def test_any_peer_that_knows_the_ticket_may_release_it() -> None:
    bench = held()
    bench.do(PeerReleased(session="s", ticket="t", reason="not needed"))
    assert (bench.error().code, bench.error().status) == ("cancelled", 499)
    bench.assert_empty()
    assert only(bench.reserve(), TellFailed).error.code == "cancelled"


def test_a_reserved_ticket_is_released_by_its_peer_alone() -> None:
    bench = held()
    bench.join("other")
    bench.reserve(generation=3)
    send = bench.one(SendChunk)
    bench.do(PeerReleased(session="other", ticket="t", reason="not theirs"))
    assert bench.ended() == 0
    bench.do(PeerCancelled(session="s", ticket="t", generation=3, reason="not needed"))
    assert bench.error().code == "cancelled"
    assert bench.all(TellCancelled) == [], "bytes may still follow"
    assert bench.one(CancelSend).request == send.request
    bench.quiet(send.request)
    assert bench.last(TellCancelled).generation == 3
    bench.assert_empty()


@pytest.mark.parametrize("computed", [False, True])
def test_the_client_may_release_it(computed: bool) -> None:
    bench = Bench()
    bench.join()
    hold(bench, "a", "t")
    if computed:
        bench.compute(42)
    gone = ErrorInfo(code="cancelled", message="request a was cancelled", status=499)
    bench.do(Abort(rid="a", error=gone))
    assert bench.error() == gone
    bench.assert_empty()


def test_the_client_s_deadline_ends_with_its_answer() -> None:
    bench = held(deadline_s=5.0)
    bench.wait(6)
    assert bench.ended() == 0


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"stop_token_ids": (42,)}])
def test_a_first_token_that_ends_the_request_holds_nothing(sampling: dict[str, object]) -> None:
    bench = held(**sampling)
    assert bench.all(Held) == []
    assert bench.finished().reason in ("length", "stop")
    bench.assert_empty()
    bench.wait(29)
    told = only(bench.reserve(), TellFinished)
    assert told.first is not None
    assert (told.first.token, told.first.finish_reason, told.generation) == (42, bench.finished().reason, 1)
    assert bench.reserve() == [], "once"
    bench.assert_empty()


def test_the_first_token_is_kept_no_longer_than_a_lease() -> None:
    bench = held(max_tokens=1)
    bench.wait(31)
    assert only(bench.reserve(), TellFailed).error.code == "lease_expired"


def test_a_failed_stage_fails_held_requests() -> None:
    bench = held()
    bench.do(StageFailed(stage=0, message="gone"))
    assert bench.error().code == "stage_failed"
    bench.assert_empty()
    bench.up()
    assert only(bench.reserve(), TellFailed).error.code == "stage_failed"


def test_a_peer_that_leaves_fails_only_what_it_has_reserved() -> None:
    bench = held()
    hold(bench, "b", "u")
    bench.compute(43)
    bench.reserve()
    bench.do(PeerGone(session="s", reason="silent"))
    assert bench.error("a").code == "peer_gone"
    assert bench.ended("b") == 0


def test_a_drain_waits_for_held_prompts_while_their_leases_last() -> None:
    """Their clients were answered: a router is about to send a peer for them."""
    bench = held()
    hold(bench, "b", "u")
    bench.compute(43)
    assert none(bench.do(Drain()), RequestFailed)
    bench.reserve("u")
    bench.ack(bench.one(SendChunk))
    assert bench.finished("b").reason == "handoff"
    assert not bench.all(Drained)
    bench.wait(31)
    assert bench.error("a").code == "lease_expired"
    assert len(bench.all(Drained)) == 1
    assert only(bench.reserve("v"), TellFailed).error.code == "draining"


def test_a_drain_waits_for_peers_that_come_for_a_first_token() -> None:
    bench = Bench()
    bench.join()
    for rid, ticket in (("a", "t"), ("b", "u"), ("c", "v")):
        hold(bench, rid, ticket, max_tokens=1)
    bench.compute(7, 7, 7)
    assert bench.scheduler.idle
    assert none(bench.do(Drain()), Drained)
    assert only(bench.reserve("t"), TellFinished).first is not None
    assert not bench.all(Drained)
    assert only(bench.reserve("u"), TellFinished).first is not None
    assert not bench.all(Drained)
    bench.wait(31)
    assert len(bench.all(Drained)) == 1


def test_held_pages_are_limited_to_their_share() -> None:
    bench = Bench(kv_pages=16)  # 8 of which may be held
    bench.join()
    hold(bench, "a", "t", 20)
    hold(bench, "b", "u", 13)
    refused = bench.error("b")
    assert (refused.code, refused.status, refused.retry_after_s) == ("queue_full", 429, 1.0)
    bench.submit("c", 13, route=Discard())
    hold(bench, "d", "v", 12)
    assert (bench.ended("c"), bench.ended("d")) == (0, 0)
    assert bench.metric("held_pages") == 8
    bench.reserve("t", tokens=20)
    hold(bench, "e", "w", 20)
    assert bench.ended("e") == 0, "a ticket that is reserved counts no more"
    hold(bench, "f", "x", 40)
    assert (bench.error("f").status, bench.error("f").field) == (400, "prompt")


def test_a_reserved_ticket_is_not_held_to_the_share() -> None:
    bench = Bench(kv_pages=16)
    bench.join()
    hold(bench, "a", "t", 30)
    bench.reserve("u", tokens=20)
    hold(bench, "b", "u", 20)
    assert bench.ended("b") == 0


def test_a_reservation_that_does_not_wait() -> None:
    bench = Bench()
    bench.join()
    told = only(bench.reserve(wait=False), TellFailed)
    assert (told.error.code, told.error.status) == ("unknown_ticket", 404)
    assert bench.metric("reservations_waiting") == 0
    held(bench=bench)
    bench.reserve(generation=2, wait=False)
    assert len(bench.all(SendChunk)) == 1
