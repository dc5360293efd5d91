"""Tickets whose prompt a router posts: a side that gives up tells the other at once."""

import pytest

from headrace.core.messages.frontend import RefuseTicket, ReleaseTicket
from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import AskCancel, AskRenew, AskReserve, PeerReleased, PeerReserved, TellFailed
from headrace.core.messages.replies import RequestFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.requests.request import FetchFrom, PromptPosting
from headrace.core.types.requests.reservation import Reservation
from tests.scheduler.bench import Bench, none, only
from tests.scheduler.prefill.test_rendezvous import send_to

REFUSED = ErrorInfo(code="invalid_value", message="temperature is 9", status=400, field="temperature")


def releases(bench: Bench, ticket: str = "t") -> None:
    bench.do(PeerReleased(session="s", ticket=ticket, reason="the client left"))


def fetch(
    bench: Bench, rid: str = "a", tokens: int = 10, ticket: str = "t", posting: PromptPosting = "external"
) -> None:
    bench.submit(rid, tokens, route=FetchFrom("p", ticket, posting), max_tokens=4)


@pytest.mark.parametrize("peer_first", [True, False])
def test_a_peer_is_told_why_the_front_end_refused_its_prompt(peer_first: bool) -> None:
    bench = Bench()
    bench.join()
    refuse = RefuseTicket(ticket="t", error=REFUSED)
    if peer_first:
        bench.reserve()
        told = only(bench.do(refuse), TellFailed)
    else:
        bench.do(refuse)
        told = only(bench.reserve(), TellFailed)
    assert (told.error.code, told.error.message, told.error.status) == ("invalid_value", "temperature is 9", 400)
    assert bench.metric("reservations_waiting") == 0
    send_to(bench)
    bench.reserve(generation=2)
    assert bench.plan() is not None, "the next use of the ticket is another one"


def test_refusals_are_remembered_up_to_a_bound() -> None:
    bench = Bench(max_queued_requests=2)
    bench.join()
    for ticket in ("t", "u", "v"):
        bench.do(RefuseTicket(ticket=ticket, error=REFUSED))
    assert none(bench.reserve("t"), TellFailed)
    assert only(bench.reserve("v"), TellFailed).error.status == 400


def test_a_refusal_does_not_touch_another_request_with_the_ticket() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    bench.do(RefuseTicket(ticket="t", error=REFUSED))
    bench.reserve()
    assert bench.plan() is not None


def test_a_released_ticket_fails_the_request_that_waits_for_a_peer() -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    releases(bench)
    assert (bench.error().code, bench.error().status) == ("cancelled", 499)
    assert "the client left" in bench.error().message
    bench.assert_empty()


def test_a_peer_may_release_a_ticket_before_the_prompt_comes() -> None:
    bench = Bench(bootstrap_timeout_s=10.0)
    bench.join()
    releases(bench)
    send_to(bench)
    assert bench.error().status == 499
    send_to(bench, "b")
    assert bench.ended("b") == 0, "said once, of one prompt"
    releases(bench, "u")
    bench.wait(10.1)
    send_to(bench, "c", ticket="u")
    assert bench.ended("c") == 0, "that is long ago"


def test_a_reservation_overrides_an_earlier_release() -> None:
    bench = Bench()
    bench.join()
    releases(bench)
    bench.reserve()
    send_to(bench)
    assert bench.plan() is not None


def test_a_peer_cannot_release_what_another_has_reserved() -> None:
    bench = Bench()
    bench.join()
    bench.join("other")
    bench.reserve(session="other")
    releases(bench)
    send_to(bench)
    assert bench.plan() is not None


@pytest.mark.parametrize("same", [True, False])
def test_a_reservation_with_another_prompt_hash_fails(same: bool) -> None:
    bench = Bench()
    bench.join()
    send_to(bench)
    prompt = list(range(10)) if same else [*range(9), 99]
    reservation = Reservation(
        ticket="t", generation=1, prompt_tokens=10, cached_tokens=0, pages=pack([1, 2, 3]), row=1,
        prompt_hash=prompt_hash(pack(prompt)),
    )  # fmt: skip
    bench.do(PeerReserved(session="s", reservation=reservation))
    assert (bench.plan() is not None) == same
    if not same:
        assert bench.error().code == bench.one(TellFailed).error.code == "bad_reservation"
        assert prompt_hash(pack(prompt)) in bench.error().message


def test_externally_posted_prompts_are_reserved_with_their_hash() -> None:
    bench = Bench()
    bench.prefill_up()
    fetch(bench, posting="done")
    assert bench.one(AskRenew) == AskRenew(session="p1", ticket="t")
    bench.expecting(bench.one(PrepareReceive).request)
    ask = bench.one(AskReserve).reservation
    assert (ask.wait, ask.prompt_hash) == (False, prompt_hash(pack(range(10))))


def test_a_ticket_that_a_router_posts_is_renewed_while_it_waits_for_pages() -> None:
    bench = Bench(kv_pages=4)
    bench.prefill_up()
    fetch(bench, ticket="t")
    fetch(bench, "b", ticket="u")
    assert [ask.ticket for ask in bench.all(AskRenew)] == ["t", "u"]
    bench.expecting(bench.one(PrepareReceive).request)
    ask = bench.one(AskReserve).reservation
    assert (ask.ticket, ask.wait) == ("t", True)


def test_tickets_whose_prompt_this_server_posts_are_not_renewed() -> None:
    bench = Bench()
    bench.prefill_up()
    fetch(bench, posting="local")
    bench.expecting(bench.one(PrepareReceive).request)
    assert bench.one(AskReserve).reservation.wait
    assert bench.all(AskRenew) == []


@pytest.mark.parametrize("expected", [True, False])
def test_a_request_that_ends_before_it_has_reserved_releases_its_ticket(expected: bool) -> None:
    bench = Bench(kv_pages=3)
    bench.prefill_up()
    if not expected:
        fetch(bench, "other", ticket="other")
    fetch(bench)
    effects = bench.abort()
    cancel = only(effects, AskCancel)
    assert (cancel.session, cancel.ticket, cancel.generation) == ("p1", "t", 0)


def test_a_refused_request_releases_its_ticket() -> None:
    bench = Bench()
    bench.prefill_up()
    fetch(bench, tokens=500)
    assert bench.one(RequestFailed).error.status == 400
    assert bench.one(AskCancel).ticket == "t"
    bench.do(ReleaseTicket(prefill="p", ticket="u", reason="overloaded"))
    assert bench.last(AskCancel).ticket == "u"
    bench.do(ReleaseTicket(prefill="unknown", ticket="v", reason="overloaded"))
    assert bench.last(AskCancel).ticket == "u"


def test_locally_posted_prompts_are_not_released_before_they_are_posted() -> None:
    bench = Bench()
    bench.prefill_up()
    fetch(bench, posting="local")
    assert none(bench.abort(), AskCancel)
