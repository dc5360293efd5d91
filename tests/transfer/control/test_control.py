"""ControlServer and ControlClient over real sockets: sessions, tickets, and the messages that end them."""

import socket as sockets
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ConnectPrefill,
    DisconnectPrefill,
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    PrefillDown,
    PrefillUp,
    TellCancelled,
    TellFailed,
    TellFinished,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.runtime import process
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.control.client import ControlClient
from tests.transfer.control.harness import CONFIG, PATIENT, PEER, Both, Stranger
from tests.transfer.control.session_table import FIRST, OFFER, hello
from tests.transfer.harness import CLOCK, Loop, value


def test_hello_reserve_and_the_three_ends_of_a_ticket(both: Both) -> None:
    up = both.up
    joined = both.loop.wait_for(both.control_server, PeerJoined)
    assert (up.name, up.session, up.terms.geometries) == ("p", joined.session, OFFER.geometries)
    assert up.terms.endpoints == ("tcp://127.0.0.1:7001",)
    session = up.session

    assert both.reserve("a").reservation.pages == pack([8, 9])
    error = ErrorInfo(code="stage_failed", message="stage 0 died", status=503, stage=0)
    both.loop.apply(both.control_server, TellFailed(session=session, ticket="a", generation=1, error=error))
    failed = both.loop.wait_for(both.control_client, TicketFailed)
    assert failed == TicketFailed(session=session, ticket="a", generation=1, error=error)

    both.reserve("b", 2)
    both.loop.apply(both.control_client, AskCancel(session=session, ticket="b", generation=2, reason="client left"))
    assert both.loop.wait_for(both.control_server, PeerCancelled).reason == "client left"
    both.loop.apply(both.control_server, TellCancelled(session=session, ticket="b", generation=2))
    assert both.loop.wait_for(both.control_client, TicketCancelled).ticket == "b"

    both.reserve("c", 3)
    both.loop.apply(both.control_server, TellFinished(session=session, ticket="c", generation=3, first=FIRST))
    assert both.loop.wait_for(both.control_client, TicketFinished).first == FIRST


def test_two_names_of_one_control_endpoint_are_two_sessions_that_both_stand(both: Both) -> None:
    """Else each hello would end the other's session, for ever."""
    first = both.up.session
    both.loop.apply(
        both.control_client, ConnectPrefill(name="q", endpoint=both.endpoint.replace("127.0.0.1", "localhost"))
    )
    both.loop.until(lambda: len(both.loop.of(both.control_client, PrefillUp)) == 2)
    end = CLOCK.now() + 2 * CONFIG.peer_timeout_s
    both.loop.until(lambda: CLOCK.now() >= end)
    assert not both.loop.of(both.control_client, PrefillDown)
    assert [up.session != first for up in both.loop.of(both.control_client, PrefillUp)] == [False, True]


def test_pings_renew_a_held_ticket_until_it_is_reserved_or_given_up(lasting: Both) -> None:
    both, session, heartbeat_s = lasting, lasting.up.session, PATIENT.peer_timeout_s / 3
    for ticket in ("a", "b"):
        both.loop.apply(both.control_client, AskRenew(session=session, ticket=ticket))
    both.control_client.tick(CLOCK.now() + heartbeat_s)
    assert set(both.loop.wait_for(both.control_server, PeerRenewed).tickets) == {"a", "b"}
    both.reserve("a")
    both.loop.apply(both.control_client, AskCancel(session=session, ticket="b", generation=0, reason="too late"))
    released = both.loop.wait_for(both.control_server, PeerReleased)
    assert (released.ticket, released.reason) == ("b", "too late")
    both.control_client.tick(CLOCK.now() + 2 * heartbeat_s)
    both.reserve("c")  # comes after the ping
    assert len(both.loop.of(both.control_server, PeerRenewed)) == 1, "pings go on, and renew nothing"
    assert not both.loop.of(both.control_server, PeerGone)


def test_what_a_reservation_says_of_its_prompt_gets_to_the_scheduler(both: Both) -> None:
    for wait, digest in ((True, ""), (False, "f" * 64)):
        ask = AskReserve(
            session=both.up.session,
            reservation=Reservation(
                ticket=f"t{wait}",
                generation=1,
                prompt_tokens=40,
                cached_tokens=0,
                pages=pack([8, 9]),
                row=0,
                wait=wait,
                prompt_hash=digest,
            ),
        )
        both.loop.apply(both.control_client, ask)
        assert both.loop.wait_for(both.control_server, PeerReserved, 2 - wait).reservation == ask.reservation


def test_a_crowd_at_the_control_endpoint_ends_no_session_and_keeps_no_peer_out(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_SESSIONLESS", 8)
    both = Both(context, config=PATIENT)
    session = both.up.session
    crowd = []
    for _ in range(40):
        crowd.append(sockets.create_connection(("127.0.0.1", both.control_server.port), timeout=10))
        both.loop.turn()
    both.loop.until(
        lambda: value(both.control_server.statistics(), "connections_closed_total", ("control", "shed")) >= 32
    )
    assert Stranger(context, both).ask(PEER.encode(hello(instance="e" * 32))).session != session
    assert both.reserve().session == session
    assert not both.loop.of(both.control_server, PeerGone)
    assert value(both.control_server.statistics(), "connections", ("control",)) <= 8 + 2
    both.loop.close()
    for connection in crowd:
        connection.close()


def test_a_mismatch_is_reported_with_both_values(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    both = Both(context, ready=False)
    both.control_server.ready(replace(OFFER, fingerprint="model-2", model="two"))
    down = both.loop.wait_for(both.control_client, PrefillDown)
    both.loop.until(lambda: "fingerprint" in both.loop.of(both.control_client, PrefillDown)[-1].reason)
    down = both.loop.of(both.control_client, PrefillDown)[-1]
    assert down.session is None
    assert down.reason == (
        "fingerprint_mismatch: fingerprint: model-2 at the prefill server (model two), "
        "model-1 at the decode server (model one)"
    )
    [warning] = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert warning.endswith(f"127.0.0.1: {down.reason}"), "the prefill server's log has it, too, once"
    both.loop.close()


def test_goodbyes_end_the_session_on_the_other_side_at_once(both: Both, context: Any) -> None:
    session = both.up.session
    both.loop.apply(both.control_client, DisconnectPrefill(name="p"))
    assert both.loop.wait_for(both.control_server, PeerGone).reason == "goodbye: hung up"
    assert both.loop.of(both.control_client, PrefillDown)[-1].session == session
    assert both.control_client.sockets() == []

    other = Both(context)
    assert other.up
    other.control_server.close()
    loop = Loop(other.control_client)
    assert loop.wait_for(other.control_client, PrefillDown).reason == "goodbye: the server ends"
    loop.close()


def test_asking_on_a_session_that_has_ended_is_answered_here(both: Both) -> None:
    session = "x" * 32
    [failed] = both.control_client.apply(
        AskReserve(
            session=session,
            reservation=Reservation(ticket="t", generation=1, prompt_tokens=1, cached_tokens=0, pages=pack([1]), row=0),
        ),
        CLOCK.now(),
    )
    assert isinstance(failed, TicketFailed)
    assert failed.error.code == "peer_gone"
    cancel = AskCancel(session=session, ticket="t", generation=1, reason="")
    assert both.control_client.apply(cancel, CLOCK.now()) == []  # no answer is owed


def test_no_connection_is_made_before_the_control_client_has_its_hello(context: Any) -> None:
    control_client = ControlClient(CONFIG, context)
    control_client.apply(ConnectPrefill(name="p", endpoint="tcp://127.0.0.1:9"), CLOCK.now())
    assert (control_client.sockets(), control_client.next_deadline()) == ([], None)
    control_client.ready(hello())
    assert control_client.next_deadline() is not None
    control_client.tick(CLOCK.now())
    assert len(control_client.sockets()) == 2, "one that tells when it is closed, too"
    control_client.close()


def test_peers_that_go_are_warnings_with_their_names(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    both = Both(context, config=PATIENT)
    joined = both.loop.wait_for(both.control_server, PeerJoined)
    both.loop.apply(both.control_client, DisconnectPrefill(name="p"))
    gone = both.loop.wait_for(both.control_server, PeerGone)
    [warning] = [record for record in caplog.records if "is down" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert warning.getMessage() == f"decode server {joined.name} is down: {gone.reason}"
    both.loop.close()
