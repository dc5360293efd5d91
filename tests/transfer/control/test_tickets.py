"""The control endpoint's decisions about tickets: who may use one, when, and how each use ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.messages.peers import (
    PeerCancelled,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    TellCancelled,
    TellFailed,
    TellFinished,
)
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import TokenLogprob
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.protocol import messages, metadata
from headrace.transfer.protocol.messages import MAX_RENEWALS, Cancel, Cancelled, Failed, Finished, Ping, Pong, Refuse
from tests.transfer.control.session_table import FIRST, joined, reserve


def test_a_reservation_passes_and_a_repeated_or_older_one_is_dropped() -> None:
    made, session = joined()
    outcome = made.receive(b"a", reserve(generation=5), 0.0)
    assert outcome.events == [
        PeerReserved(
            session=session,
            reservation=Reservation(
                ticket="t", generation=5, prompt_tokens=40, cached_tokens=0, pages=pack([8, 9]), row=0
            ),
        )
    ]
    for generation in (5, 4):
        assert made.receive(b"a", reserve(generation=generation), 0.0) == ([], [])
    made.tell(TellFinished(session=session, ticket="t", generation=5), 0.0)
    assert made.receive(b"a", reserve(generation=5), 0.0) == ([], [])
    assert made.counters.value("stale_messages_total", ("reserve",)) == 3
    assert len(made.receive(b"a", reserve(generation=6), 0.0).events) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pages": pack([8])}, ["1 pages", "need 2"]),
        ({"pages": pack([8, 9, 10])}, ["3 pages", "need 2"]),
        ({"pages": pack([8, 9])[:-1]}, ["7 bytes"]),
        ({"pages": pack([8, 100])}, ["8 to 100", "100 pages"]),
        ({"pages": pack([-1, 8])}, ["-1 to 8"]),
        ({"pages": pack([8, 8])}, ["twice"]),
        ({"row": 8}, ["row 8", "8 rows"]),
        ({"cached_tokens": 40}, ["40 cached tokens of 40"]),
        ({"cached_tokens": 32}, ["2 pages", "need 1"]),
        ({"prompt_tokens": 2049}, ["2049", "2048"]),
    ],
)
def test_a_reservation_outside_of_what_the_hello_said_fails_alone(changes: dict[str, Any], words: list[str]) -> None:
    made, _ = joined()
    made.receive(b"a", reserve("good"), 0.0)
    [(_, answer)] = made.receive(b"a", reserve(**changes), 0.0).replies
    assert isinstance(answer, Failed)
    assert (answer.ticket, answer.code, answer.status) == ("t", "bad_reservation", 400)
    assert all(word in answer.message for word in words), answer.message
    assert made.open_tickets == 1


def test_a_ticket_that_has_not_ended_cannot_be_used_again() -> None:
    made, session = joined()
    made.receive(b"a", reserve(generation=1), 0.0)
    [(_, answer)] = made.receive(b"a", reserve(generation=2), 0.0).replies
    assert isinstance(answer, Failed)
    assert (answer.code, answer.status, answer.generation) == ("ticket_in_use", 409, 2)
    made.receive(b"a", Cancel(ticket="t", generation=1), 0.0)
    made.tell(TellCancelled(session=session, ticket="t", generation=1), 0.0)
    assert made.receive(b"a", reserve(generation=2), 0.0) == ([], []), "a late copy of what was refused"
    assert made.receive(b"a", reserve(generation=3), 0.0).events


def test_cancelling_is_always_answered_once_per_question() -> None:
    made, session = joined()
    cancel = Cancel(ticket="t", generation=1, reason="client left")
    answer = [(b"a", Cancelled(ticket="t", generation=1))]
    released = PeerReleased(session=session, ticket="t", reason="client left")  # if it is held; the scheduler knows
    assert made.receive(b"a", cancel, 0.0) == (answer, [released])
    assert made.receive(b"a", cancel, 0.0) == (answer, [])  # a late one releases nothing of a later use
    made.receive(b"a", reserve(generation=2), 0.0)
    cancel = replace(cancel, generation=2)
    assert made.receive(b"a", cancel, 0.0).events == [
        PeerCancelled(session=session, ticket="t", generation=2, reason="client left")
    ]
    assert made.receive(b"a", cancel, 0.0) == ([], [])
    told = made.tell(TellCancelled(session=session, ticket="t", generation=2), 0.0)
    assert told.replies == [(b"a", Cancelled(ticket="t", generation=2))]
    assert made.receive(b"a", reserve(generation=2), 0.0).events == []  # a late one revives nothing


def test_pings_carry_renewals_of_those_who_have_a_session() -> None:
    made, session = joined()
    outcome = made.receive(b"a", Ping(number=1, renew=("t", "u")), 0.0)
    assert outcome == ([(b"a", Pong(number=1))], [PeerRenewed(session=session, tickets=("t", "u"))])
    assert made.receive(b"a", Ping(number=2), 0.0).events == []
    stranger = made.receive(b"b", Ping(number=1, renew=("t",)), 0.0)
    assert stranger.events == []
    assert isinstance(stranger.replies[0][1], Refuse)


def test_a_peer_that_renews_more_than_it_can_have_is_not_listened_to() -> None:
    made, _ = joined(b"a")
    tickets = tuple(f"t{number}" for number in range(MAX_RENEWALS))
    renewed = [made.receive(b"a", Ping(number=1, renew=tickets), 0.0).events for _ in range(20)]
    assert [bool(events) for events in renewed] == [True] * 8 + [False] * 12
    assert made.receive(b"a", reserve("t"), 0.0).events, "its session stands"
    assert made.receive(b"a", Ping(number=2, renew=tickets), 1.0).events, "as many as fit between heartbeats"


def test_a_reservation_says_whether_it_waits_for_its_prompt() -> None:
    made, _ = joined()
    for wait in (True, False):
        [event] = made.receive(b"a", reserve(f"t-{wait}", wait=wait), 0.0).events
        assert isinstance(event, PeerReserved)
        assert event.reservation.wait is wait


def test_failures_and_early_ends_reach_the_peer() -> None:
    made, session = joined()
    error = ErrorInfo(code="stage_failed", message="x" * 5000, status=503, retry_after_s=2.0, stage=1)
    [(_, answer)] = made.tell(TellFailed(session=session, ticket="t", generation=1, error=error), 0.0).replies
    assert isinstance(answer, Failed)
    assert (answer.code, answer.status, answer.retry_after_s, answer.stage) == ("stage_failed", 503, 2.0, 1)
    assert len(answer.message) == messages.MAX_TEXT_CHARS
    [(_, done)] = made.tell(TellFinished(session=session, ticket="t", generation=1, first=FIRST), 0.0).replies
    assert isinstance(done, Finished)
    row = metadata.decode(done.metadata)
    assert row.first == FIRST
    assert row.belongs_to("t", 1)
    assert made.tell(TellFinished(session="nobody", ticket="t", generation=1), 0.0) == ([], [])
    many = TokenLogprob(7, -1.0, tuple(range(21)), (-1.0,) * 21)
    told = made.tell(TellFinished(session=session, ticket="t", generation=1, first=replace(FIRST, logprob=many)), 0.0)
    assert isinstance(told.replies[0][1], Failed)


TICKETS = st.sampled_from(["x", "y"])
GENERATIONS = st.integers(1, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), TICKETS, GENERATIONS),
        st.tuples(st.just("cancel"), TICKETS, GENERATIONS),
        st.tuples(st.sampled_from(["fail", "finish"]), TICKETS, GENERATIONS),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_ticket_use_that_was_reserved_is_reported_once_and_ends_once(steps: list[tuple[str, str, int]]) -> None:
    """G1, G5: whatever is repeated or reordered, no (ticket, generation) is reserved twice, or again after its end."""
    made, session = joined()
    reserved: set[tuple[str, int]] = set()
    ended: set[tuple[str, int]] = set()
    for kind, ticket, generation in steps:
        use = ticket, generation
        if kind == "reserve":
            outcome = made.receive(b"a", reserve(ticket, generation), 0.0)
            if outcome.events:
                assert use not in reserved | ended
                reserved.add(use)
        elif kind == "cancel":
            outcome = made.receive(b"a", Cancel(ticket=ticket, generation=generation), 0.0)
            if any(isinstance(event, PeerCancelled) for event in outcome.events):
                assert use in reserved - ended
            elif outcome.replies:
                assert not outcome.events or use not in reserved | ended
                ended.add(use)
        elif use in reserved - ended:
            error = ErrorInfo(code="x", message="y", status=500)
            tell = TellFailed(session=session, ticket=ticket, generation=generation, error=error)
            done = TellFinished(session=session, ticket=ticket, generation=generation)
            assert len(made.tell(tell if kind == "fail" else done, 0.0).replies) == 1
            ended.add(use)
    assert made.open_tickets == len(reserved - ended)
