"""BOOTSTRAP: prompts and reservations are matched, or the side that waits is told why not."""

import pytest

from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer, Forward, SendChunk
from headrace.core.messages.peers import PeerCancelled, PeerGone, PeerRenewed, TellCancelled, TellFailed
from headrace.core.messages.replies import Progress, RequestFailed
from headrace.core.types.requests.request import SendTo
from tests.scheduler.bench import Bench, none, only


def send_to(
    bench: Bench, rid: str = "a", tokens: int = 10, ticket: str = "t", hold: bool = False, **fields: object
) -> None:
    """Submit a prompt whose KV goes to the peer that reserves the ticket."""
    bench.submit(rid, tokens, route=SendTo(ticket, hold), **fields)


@pytest.mark.parametrize("prompt_first", [True, False])
def test_either_half_may_come_first(prompt_first: bool) -> None:
    bench = Bench()
    bench.join()
    if prompt_first:
        send_to(bench, progress=True)
        assert bench.plan() is None
        bench.reserve()
    else:
        bench.reserve()
        assert bench.metric("reservations_waiting") == 1
        send_to(bench, progress=True)
    assert bench.one(Progress).phase == "bootstrapped"
    assert bench.metric("reservations_waiting") == 0
    assert bench.plan() is not None


def test_no_peer_in_time() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.wait(29.9)
    assert bench.ended() == 0
    bench.wait(0.2)
    assert (bench.error().code, bench.error().status) == ("no_peer", 504)
    bench.assert_empty()


def test_a_prompt_waits_for_a_peer_that_names_its_ticket() -> None:
    bench = Bench()
    bench.join()
    send_to(bench, "a", ticket="t")
    send_to(bench, "b", ticket="u")
    for _ in range(10):
        bench.wait(20)
        bench.do(PeerRenewed(session="s", tickets=("t",)))
    assert (bench.ended("a"), bench.error("b").code) == (0, "no_peer")
    bench.wait(29.9)
    assert bench.ended("a") == 0
    bench.wait(0.2)
    assert bench.error("a").code == "no_peer"
    bench.assert_empty()


def test_a_prompt_whose_ticket_is_renewed_waits_up_to_a_limit() -> None:
    bench = Bench(hold_limit_s=50.0)
    bench.join()
    send_to(bench)
    for _ in range(4):
        bench.wait(12)
        bench.do(PeerRenewed(session="s", tickets=("t",)))
    bench.wait(2.1)
    assert "limit of 50 s" in bench.error().message
    bench.assert_empty()


def test_a_ticket_that_is_reserved_is_not_renewed() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.reserve()
    bench.do(PeerRenewed(session="s", tickets=("t",)))
    assert bench.metric("dropped_messages_total", "unknown_lease") == 1
    bench.wait(31)
    assert bench.ended() == 0, "the peer has reserved: it waits to be computed"


def test_a_late_reservation_fails_at_once_with_the_reason_and_revives_nothing() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.wait(31)
    told = only(bench.reserve(generation=1), TellFailed)
    assert (told.error.code, told.generation) == ("no_peer", 1)
    assert bench.reserve(generation=1) == []
    assert bench.metric("dropped_messages_total", "stale_generation") == 1
    send_to(bench, "b")
    assert bench.reserve(generation=1) == [], "that generation has failed for good"
    bench.reserve(generation=2)
    assert bench.plan() is not None


def test_the_peer_of_a_refused_prompt_is_told_if_it_came_before_or_after() -> None:
    bench = Bench()
    bench.join()
    bench.reserve("early", 500)
    send_to(bench, "a", 500, "early")
    assert bench.one(TellFailed).error.code == "prompt_too_long"
    send_to(bench, "b", 500, "late")
    assert only(bench.reserve("late", 500), TellFailed).error.code == "prompt_too_long"


def test_no_request_in_time() -> None:
    bench = Bench()
    bench.join()
    bench.reserve()
    bench.wait(30.1)
    told = bench.one(TellFailed)
    assert (told.error.code, told.error.status) == ("no_request", 404)
    assert bench.metric("reservations_waiting") == 0
    bench.reserve(generation=2)
    assert bench.metric("reservations_waiting") == 1, "a later use is a new one"


@pytest.mark.parametrize("tokens", [9, 11])
def test_a_reservation_for_another_prompt_length_fails_both(tokens: int) -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.reserve(tokens=tokens)
    assert (bench.error().code, bench.error().status) == ("bad_reservation", 502)
    assert bench.one(TellFailed).error.code == "bad_reservation"
    bench.assert_empty()


def test_the_peers_page_size_counts() -> None:
    bench = Bench()
    bench.join(page_size=3)
    send_to(bench)
    bench.reserve(page_size=3, cached=4)
    assert bench.plan() is not None


def test_a_ticket_in_use_is_refused_and_stale_generations_are_dropped() -> None:
    bench = Bench()
    bench.join("s")
    bench.join("other")
    send_to(bench)
    bench.reserve(generation=5)
    for generation in (4, 5):
        assert bench.reserve(generation=generation) == []
    assert bench.metric("dropped_messages_total", "stale_generation") == 2
    assert only(bench.reserve(generation=6), TellFailed).error.code == "ticket_in_use"
    told = only(bench.reserve(session="other", generation=9), TellFailed)
    assert (told.session, told.error.status) == ("other", 409)
    assert bench.ended() == 0


def test_a_ticket_may_be_used_again_after_its_end() -> None:
    bench = Bench()
    bench.join()
    send_to(bench, "a")
    bench.reserve(generation=1)
    bench.abort("a")
    send_to(bench, "b")
    bench.reserve(generation=2)
    assert bench.plan() is not None


def test_early_reservations_are_bounded_and_unknown_sessions_ignored() -> None:
    bench = Bench(max_queued_requests=1)
    bench.join()
    bench.reserve("t1")
    assert only(bench.reserve("t2"), TellFailed).error.status == 429
    assert bench.reserve("t3", session="unknown") == []
    assert bench.metric("dropped_messages_total", "unknown_session") == 1


def test_without_a_metadata_row_requests_wait_in_order() -> None:
    bench = Bench(metadata_rows=1)
    bench.join()
    for number in range(3):
        send_to(bench, f"r{number}", 10, f"t{number}")
    for number in (2, 0, 1):
        bench.reserve(f"t{number}")
    assert bench.metric("queue_requests", "waiting") == 3
    bench.compute(42)
    assert bench.metric("queue_requests", "waiting") == 2
    assert bench.metric("metadata_rows_in_use") == 1
    bench.wait(5)
    assert bench.ended("r1") == 0, "its peer has come: it waits for us, and no deadline runs"
    bench.ack(bench.one(SendChunk))
    assert bench.finished("r0").reason == "handoff"
    bench.compute(43)
    bench.ack(bench.last(SendChunk))
    assert bench.finished("r1").reason == "handoff"


def test_peers_are_admitted_at_every_stage_and_dropped() -> None:
    bench = Bench()
    admit = only(bench.join(), AdmitPeer)
    assert admit.terms.session == "s"
    send_to(bench, "a", 10, "t1")
    send_to(bench, "b", 10, "t2")
    bench.reserve("t1")
    bench.reserve("t3")
    effects = bench.do(PeerGone(session="s", reason="silent"))
    failed = only(effects, RequestFailed)
    assert (failed.rid, failed.error.code, failed.error.status) == ("a", "peer_gone", 502)
    only(effects, DropPeer)
    assert none(effects, TellFailed), "the peer is gone"
    assert bench.metric("reservations_waiting") == 0
    assert bench.ended("b") == 0


def test_a_peer_that_joined_before_the_stages_is_admitted_when_they_are_up() -> None:
    bench = Bench(up=False)
    assert none(bench.join(), AdmitPeer)
    bench.up()
    assert bench.one(AdmitPeer).terms.session == "s"


def test_the_peer_cancels_before_anything_was_sent() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.reserve()
    forward = bench.plan()
    assert isinstance(forward, Forward)
    effects = bench.do(PeerCancelled(session="s", ticket="t", generation=1, reason="gone"))
    only(effects, TellCancelled)
    assert none(effects, TellFailed)
    assert none(effects, CancelSend)
    assert (bench.error().code, bench.error().status) == ("cancelled", 499)
    bench.done(forward, 1)
    bench.assert_empty()


def test_the_peer_cancels_an_early_reservation_or_an_unknown_one() -> None:
    bench = Bench()
    bench.join()
    bench.reserve()
    only(bench.do(PeerCancelled(session="s", ticket="t", generation=1, reason="")), TellCancelled)
    assert bench.metric("reservations_waiting") == 0
    only(bench.do(PeerCancelled(session="s", ticket="x", generation=1, reason="")), TellCancelled)
