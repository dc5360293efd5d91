"""Prefill servers of a KvLoader: lookup, sessions that end and begin again, tickets kept and released in them."""

from headrace.core.messages.orders import CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskRenew, ConnectPrefill, DisconnectPrefill, PrefillDown
from headrace.integrations.peer.commands import CancelLoad, ControlPortReply, LoadFailed, LookUpControlPort, RenewLease
from headrace.integrations.peer.loader import IDLE_S, LOOKUP_S
from headrace.integrations.peer.records import server_name
from tests.integrations.peer.loader_bench import CONTROL, Bench, ticket

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
    assert bench.reserved("d").ticket == "d", "it was started again, as another one"


def test_a_control_endpoint_is_asked_for_at_an_http_port_until_it_is_found_and_again_after_a_restart() -> None:
    bench = Bench()
    name = server_name(ticket(http=True, port=8000))
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
