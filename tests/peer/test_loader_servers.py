"""Prefill servers of a KvLoader: lookup, sessions that end and begin again, tickets kept and released in them."""

import pytest

from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.orders import CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskRenew, ConnectPrefill, DisconnectPrefill, PrefillDown
from headrace.core.messages.replies import PrefillState
from headrace.core.types.peers.addresses import url
from headrace.peer.commands import (
    CancelLoad,
    ControlPortReply,
    LoadFailed,
    LookUpControlPort,
    RenewLease,
)
from headrace.peer.servers import IDLE_S, LOOKUP_S, MAX_SERVERS, RELOOKUP_S
from tests.peer.loader_bench import CONTROL, Bench, ticket

UNFIT = "dtype_mismatch: dtype: a at the prefill server, b at the decode server"


def test_a_later_session_renews_and_begins_what_waited() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    bench.down()
    assert bench.load("a") == []
    asked = bench.up()
    assert AskRenew(session="s2", ticket="k") in asked
    assert [(one.session, one.ticket) for one in asked if isinstance(one, PrepareReceive)] == [("s2", "a")]


def test_a_ticket_is_released_when_there_is_a_session_to_do_it_in() -> None:
    bench = Bench()
    bench.do(RenewLease(id="a", ticket=ticket("a")))
    bench.do(RenewLease(id="b", ticket=ticket("b")))
    assert bench.do(CancelLoad(id="a")) == []
    released = [one.ticket for one in bench.up() if isinstance(one, AskCancel)]
    assert released == ["a"]
    bench.down()
    bench.do(CancelLoad(id="b"))
    bench.wait(10)
    assert bench.empty()


def test_a_server_that_does_not_fit_fails_at_once_and_one_that_is_away_after_a_while() -> None:
    bench = Bench()
    bench.load("a")
    bench.down("not_ready: loading", session=None)
    assert bench.answers() == []
    bench.down(UNFIT, session=None, unfit=True)
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert (answer.code, answer.message) == ("unfit", UNFIT)
    bench.load("later")
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert (answer.id, answer.code) == ("later", "unfit"), "which is told of once only"
    bench.down("no answer to the hello", session=None)
    bench.load("b")
    bench.wait(9)
    assert bench.answers() == []
    bench.wait(1)
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert answer.code == "peer_gone"
    assert "no answer" in answer.message
    bench.down(UNFIT, session=None, unfit=True)
    bench.load("c")
    bench.up()
    assert bench.reserved("d").reservation.ticket == "d", "it was started again, as another one"


def test_a_control_endpoint_is_asked_for_at_an_http_port_until_it_is_found_and_again_after_a_restart() -> None:
    bench = Bench()
    name = "http://127.0.0.1:8000"
    assert bench.load("a", http=True, port=8000) == [LookUpControlPort(name=name, host="127.0.0.1", port=8000)]
    assert bench.hear(ControlPortReply(name=name, reason="refused")) == []
    assert bench.wait(LOOKUP_S / 2) == []
    assert [type(one) for one in bench.wait(LOOKUP_S / 2)] == [LookUpControlPort]
    assert bench.hear(ControlPortReply(name=name, control_port=7001)) == [
        ConnectPrefill(name=name, endpoint="tcp://127.0.0.1:7001")
    ]
    assert [type(one) for one in bench.up(name)] == [OpenSession, AskRenew, PrepareReceive]
    bench.load("b", http=True, port=8000)
    asked = bench.hear(PrefillDown(name=name, session="s1", reason="gone"))
    assert CloseSession(seq=0, session="s1") in asked
    assert DisconnectPrefill(name=name) in asked


def test_an_idle_session_is_closed() -> None:
    bench = Bench()
    bench.do(RenewLease(id="a", ticket=ticket("a")))
    bench.up()
    bench.wait(IDLE_S + 1)
    bench.do(CancelLoad(id="a"))
    assert bench.wait(IDLE_S - 1) == []
    assert bench.wait(2) == [DisconnectPrefill(name=CONTROL), CloseSession(seq=0, session="s1")]
    assert bench.loader.next_deadline() is None


def standing(name: str = "http://prefill:8000", host: str = "127.0.0.1", port: int = 7000) -> AddPrefill:
    return AddPrefill(name=name, endpoint=url("tcp", host, port))


def test_a_session_is_kept_without_any_ticket_and_loads_go_through_it() -> None:
    bench = Bench()
    assert bench.do(standing()) == [ConnectPrefill(name=CONTROL, endpoint=CONTROL)]
    assert bench.answers() == [], "nothing is known yet"
    bench.down("no answer to the hello", session=None)
    assert bench.answers() == [PrefillState(name=standing().name, up=False, reason="no answer to the hello")]
    bench.down("no answer to the hello", session=None)
    assert bench.answers() == []
    bench.up()
    assert bench.answers() == [PrefillState(name=standing().name, up=True)]
    assert bench.wait(10 * IDLE_S) == []
    assert bench.loader.next_deadline() is None
    assert bench.reserved("a").session == "s1"
    bench.do(CancelLoad(id="a"))
    bench.answers()
    bench.down("silent for 3 s")
    assert bench.answers() == [PrefillState(name=standing().name, up=False, reason="silent for 3 s")]
    bench.down(UNFIT, session=None, unfit=True)
    assert bench.answers() == [PrefillState(name=standing().name, up=False, reason=UNFIT, unfit=True)]
    bench.up()
    assert bench.answers() == [PrefillState(name=standing().name, up=True)]
    assert bench.do(RemovePrefill(name=standing().name)) == [
        DisconnectPrefill(name=CONTROL),
        CloseSession(seq=0, session="s2"),
    ]
    assert bench.answers() == [PrefillState(name=standing().name, up=False, reason="disconnected")]
    assert bench.do(RemovePrefill(name=standing().name)) == bench.answers() == []


def test_names_of_one_server_share_its_session_which_is_kept_while_there_is_one() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    assert bench.do(standing("a")) == bench.do(standing("b")) == bench.do(standing("a")) == []
    assert bench.answers() == [PrefillState(name="a", up=True), PrefillState(name="b", up=True)]
    bench.do(CancelLoad(id="k"))
    bench.do(RemovePrefill(name="a"))
    assert bench.wait(2 * IDLE_S) == []
    bench.do(RenewLease(id="k2", ticket=ticket("k2")))
    bench.do(RemovePrefill(name="b"))
    assert bench.wait(2 * IDLE_S) == [], "a ticket needs it"
    bench.do(CancelLoad(id="k2"))
    assert [type(one) for one in bench.wait(IDLE_S)] == [DisconnectPrefill, CloseSession]


def test_a_server_that_the_owner_names_need_not_be_among_the_rules() -> None:
    bench = Bench()
    bench.load("a", host="10.0.0.1")
    [denied] = bench.answers()
    assert isinstance(denied, LoadFailed)
    assert denied.code == "prefill_not_allowed"
    bench.do(standing(host="10.0.0.1"))
    bench.up("tcp://10.0.0.1:7000")
    assert [one.ticket for one in bench.load("b", host="10.0.0.1") if isinstance(one, PrepareReceive)] == ["b"]
    bench.do(CancelLoad(id="b"))
    bench.do(RemovePrefill(name=standing().name))
    bench.answers()
    bench.load("c", host="10.0.0.1")
    [denied] = bench.answers()
    assert isinstance(denied, LoadFailed)
    assert denied.code == "prefill_not_allowed"


@pytest.mark.parametrize("host", ["PREFILL.", "[fd00::5]", "fd00:0::5", "::ffff:10.0.0.5"])
def test_a_server_is_the_same_however_its_address_is_spelled(host: str) -> None:
    bench = Bench()
    bench.do(standing(host={"PREFILL.": "prefill", "::ffff:10.0.0.5": "10.0.0.5"}.get(host, "fd00::5")))
    assert bench.load("a", host=host) == []
    assert bench.answers() == []


def test_a_name_that_moves_to_another_address_leaves_the_earlier_one() -> None:
    bench = Bench()
    bench.do(standing())
    bench.up()
    bench.answers()
    moved = bench.do(standing(port=7001))
    assert [type(one) for one in moved] == [DisconnectPrefill, CloseSession, ConnectPrefill]
    assert [one.up for one in bench.answers() if isinstance(one, PrefillState)] == [False]


def test_a_server_with_a_lease_is_looked_for_at_its_http_port_until_its_control_endpoint_answers() -> None:
    """A lookup may have been answered by a server that was about to end."""
    bench = Bench()
    name = "http://127.0.0.1:8000"
    bench.do(RenewLease(id="a", ticket=ticket("a", http=True, port=8000)))
    bench.hear(ControlPortReply(name=name, reason="refused"))
    assert [type(one) for one in bench.wait(LOOKUP_S)] == [LookUpControlPort]
    bench.hear(ControlPortReply(name=name, control_port=7001))
    assert bench.wait(RELOOKUP_S - 0.1) == []
    assert [type(one) for one in bench.wait(0.1)] == [LookUpControlPort]
    assert bench.hear(ControlPortReply(name=name, control_port=7002)) == [
        ConnectPrefill(name=name, endpoint="tcp://127.0.0.1:7002")
    ]
    bench.up(name)
    assert bench.wait(10 * RELOOKUP_S) == []
    assert bench.hear(ControlPortReply(name=name, control_port=7001)) == [], "a late answer"


def test_there_are_no_more_servers_than_may_be() -> None:
    bench = Bench()
    for number in range(MAX_SERVERS):
        bench.do(standing(str(number), port=7000 + number))
    assert bench.do(standing("more", port=6000)) == []
    assert bench.answers() == [PrefillState(name="more", up=False, reason="64 prefill servers")]
    bench.do(RemovePrefill(name="7"))
    assert [type(one) for one in bench.do(standing("more", port=6000))] == [ConnectPrefill]
