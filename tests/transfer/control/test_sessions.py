"""The control endpoint's decisions about peers, without a socket and with time by hand: who is let in, and when a
session ends."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.peers import PeerGone, PeerJoined, PrefillUp, TellCancelled
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Counters
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.control.connection import ControlConnection
from headrace.transfer.control.session_table import RESTARTED, SessionTable
from headrace.transfer.protocol.matching import check_welcome
from headrace.transfer.protocol.messages import (
    MAX_RENEWALS,
    ControlMessage,
    Failed,
    Goodbye,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from tests.transfer.control.session_table import CONFIG, GEOMETRY, OFFER, book, hello, joined, reserve


def test_a_fitting_hello_is_welcomed_with_what_both_keep_to() -> None:
    made = book()
    outcome = made.receive(b"a", hello(window_bytes=1000), 0.0)
    [(route, welcome)] = outcome.replies
    assert isinstance(welcome, Welcome)
    assert (route, welcome.protocol, welcome.instance) == (b"a", 1, "p" * 32)
    assert (welcome.max_model_len, welcome.window_bytes, welcome.checksum) == (2048, 1000, "xxh3_64")
    assert (welcome.stages[0].data_port, welcome.stages[0].geometry) == (7001, GEOMETRY)
    assert check_welcome(hello(), welcome) is None
    [event] = outcome.events
    assert event == PeerJoined(
        name="decode",
        terms=PeerTerms(session=welcome.session, geometries=(replace(GEOMETRY, page_size=32),), window_bytes=1000),
        backend_reason="the first choice of this server",
    )


def test_the_peer_checks_the_welcome_in_the_same_way() -> None:
    made = book()
    welcome = made.receive(b"a", hello(), 0.0).replies[0][1]
    assert isinstance(welcome, Welcome)
    for wrong in (
        replace(welcome, protocol=2),
        replace(welcome, fingerprint="model-2"),
        replace(welcome, checksum="none"),
        replace(welcome, backend="shm"),
        replace(welcome, heartbeat_s=9.0),
        replace(welcome, stages=(replace(welcome.stages[0], geometry=replace(GEOMETRY, head_dim=1)),)),
    ):
        assert check_welcome(hello(), wrong) is not None


def test_before_the_stages_are_ready_peers_are_told_to_try_again() -> None:
    made = SessionTable(CONFIG, lambda: "s" * 32)
    [(_, refuse)] = made.receive(b"a", hello(), 0.0).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "not_ready"


def test_checksums_are_used_unless_both_sides_have_switched_them_off() -> None:
    off = replace(CONFIG, checksum=False)
    for config, offered, agreed in (
        (CONFIG, ("none", "xxh3_64"), "xxh3_64"),
        (off, ("xxh3_64",), "xxh3_64"),
        (off, ("none", "xxh3_64"), "none"),
    ):
        welcome = book(config).receive(b"a", hello(checksums=offered), 0.0).replies[0][1]
        assert isinstance(welcome, Welcome)
        assert welcome.checksum == agreed


def test_stages_on_other_machines_are_at_their_own_hosts_and_the_others_at_that_of_the_control_endpoint() -> None:
    geometries = tuple(replace(GEOMETRY, layers=1, layer_start=start) for start in range(4))
    offer = replace(
        OFFER, geometries=geometries, data_ports=(1, 2, 3, 4), data_hosts=("", "10.0.0.6", "fe80::7", "node-8")
    )
    made = SessionTable(CONFIG, lambda: "0" * 32)
    made.ready(offer)
    [(_, welcome)] = made.receive(b"a", hello(), 0.0).replies
    assert isinstance(welcome, Welcome)
    link = ControlConnection("p", "control endpoint.local", hello, CONFIG, Counters())
    link.tick(0.0)
    [up] = link.receive(welcome, 0.0).events
    assert isinstance(up, PrefillUp)
    assert up.terms.endpoints == (
        "tcp://control endpoint.local:1",
        "tcp://10.0.0.6:2",
        "tcp://[fe80::7]:3",
        "tcp://node-8:4",
    )


@pytest.mark.parametrize("host", ["a b", "x;tcp://y", "[::1]", "/tmp/x", "*", "-a", ".", "a\n", "a" * 254])
def test_a_data_host_that_is_none_is_refused(host: str) -> None:
    welcome = book().receive(b"a", hello(), 0.0).replies[0][1]
    assert isinstance(welcome, Welcome)
    codec: Codec[ControlMessage] = Codec(ControlMessage)
    stage = replace(welcome.stages[0], data_host=host)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(replace(welcome, stages=(stage,))))


def test_quotas() -> None:
    """G7"""
    made, session = joined()
    for number in range(3):
        assert made.receive(b"a", reserve(f"t{number}"), 0.0).events
    [(_, answer)] = made.receive(b"a", reserve("t3"), 0.0).replies
    assert isinstance(answer, Failed)
    assert (answer.code, answer.status) == ("too_many_tickets", 429)
    made.tell(TellCancelled(session=session, ticket="t0", generation=1), 0.0)
    assert made.receive(b"a", reserve("t3", generation=2), 0.0).events
    made.receive(b"b", hello(instance="e" * 32), 0.0)
    [(_, refuse)] = made.receive(b"c", hello(instance="f" * 32), 0.0).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "too_many_peers"
    assert made.receive(b"b", hello(instance="e" * 32, name="again"), 0.0).events  # its place is its own


def test_a_silent_peer_is_gone_and_a_pinging_one_stays() -> None:
    made, session = joined(now=10.0)
    assert made.next_deadline() == 13.0
    assert made.receive(b"a", Ping(number=4), 12.0).replies == [(b"a", Pong(number=4))]
    assert made.tick(14.9) == ([], [])
    assert made.tick(15.0).events == [PeerGone(session=session, reason="silent for 3 s", name="decode")]
    assert made.next_deadline() is None
    [(_, refuse)] = made.receive(b"a", Ping(number=5), 15.1).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "no_session"


def test_goodbye() -> None:
    made, session = joined()
    assert made.receive(b"a", Goodbye(reason="draining"), 0.0).events == [
        PeerGone(session=session, reason="goodbye: draining", name="decode")
    ]
    assert made.peers == 0


def test_sessions_end_when_the_stages_have_started_again_elsewhere() -> None:
    made, session = joined()
    made.ready(OFFER)
    assert made.next_deadline() == CONFIG.peer_timeout_s, "the same ports: connections find them again"
    made.ready(replace(OFFER, data_ports=(7002,)))
    assert made.next_deadline() == 0.0
    outcome = made.tick(1.0)
    assert [reply for _, reply in outcome.replies] == [Goodbye(reason=RESTARTED)]
    assert outcome.events == [PeerGone(session=session, reason=RESTARTED, name="decode")]
    [(_, welcome)] = made.receive(b"a", hello(), 1.0).replies
    assert isinstance(welcome, Welcome)
    assert welcome.stages[0].data_port == 7002
    assert made.next_deadline() == 1.0 + CONFIG.peer_timeout_s


def test_a_second_hello_of_an_instance_replaces_its_session_and_a_repeated_one_does_not() -> None:
    made, session = joined()
    assert made.receive(b"a", hello(), 0.0).events == []
    outcome = made.receive(b"b", hello(), 0.0)
    assert [type(event) for event in outcome.events] == [PeerGone, PeerJoined]
    assert outcome.events[0].session == session  # type: ignore[attr-defined]
    [(_, refuse)] = made.receive(b"a", Ping(number=1), 0.0).replies
    assert isinstance(refuse, Refuse)
    assert made.peers == 1


def test_closing_says_goodbye_to_everyone() -> None:
    made, session = joined()
    outcome = made.close("the server ends")
    assert outcome.replies == [(b"a", Goodbye(reason="the server ends"))]
    assert outcome.events == [PeerGone(session=session, reason="the server ends", name="decode")]


def test_pings_name_each_of_many_tickets_in_turn() -> None:
    link = ControlConnection("p", "control endpoint.local", hello, CONFIG, Counters())
    link.tick(0.0)
    welcome = book().receive(b"a", hello(), 0.0).replies[0][1]
    assert isinstance(welcome, Welcome)
    link.receive(welcome, 0.0)
    link.renewals.update(dict.fromkeys(str(number) for number in range(2 * MAX_RENEWALS + 5)))
    named: list[str] = []
    for second in (1.0, 2.0, 3.0):
        link.receive(Pong(number=1), second)
        [ping] = link.tick(second).sends
        assert isinstance(ping, Ping)
        named += ping.renew
    assert len(named) == 3 * MAX_RENEWALS
    assert set(named) == set(link.renewals)
