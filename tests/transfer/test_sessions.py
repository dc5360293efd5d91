"""The desk's decisions, without a socket and with time by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.arrays import pack
from core.codec import Codec, DecodeError
from core.config import TransferConfig
from core.errors import ErrorInfo
from core.geometry import Geometry
from core.peers import (
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    PrefillUp,
    TellCancelled,
    TellFailed,
    TellFinished,
)
from core.request import FirstToken, TokenLogprob
from core.stats import Counters
from transfer import messages, metadata
from transfer.link import DeskLink
from transfer.matching import Offer, check_welcome, make_hello
from transfer.messages import (
    Cancel,
    Cancelled,
    DeskMessage,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refuse,
    Reserve,
    Welcome,
)
from transfer.sessions import RESTARTED, PeerBook

CONFIG = TransferConfig(max_peers=2, max_tickets_per_peer=3, peer_timeout_s=3.0)
GEOMETRY = Geometry("float32", layers=4, kv_heads=2, head_dim=8, page_size=16)
OFFER = Offer(
    instance="p" * 32,
    fingerprint="model-1",
    geometries=(GEOMETRY,),
    data_ports=(7001,),
    max_model_len=4096,
)
FIRST = FirstToken(token=7, prompt_tokens=40, cached_tokens=0, finish_reason="stop")


def hello(**changes: Any) -> Hello:
    made = make_hello(
        CONFIG, instance="d" * 32, name="decode", role="decode", fingerprint="model-1",
        geometries=(replace(GEOMETRY, page_size=32),), kv_pages=100, max_model_len=2048, metadata_rows=8,
    )  # fmt: skip
    return replace(made, **changes)


def book(config: TransferConfig = CONFIG, offer: Offer = OFFER) -> PeerBook:
    sessions = iter(range(100))
    made = PeerBook(config, lambda: f"{next(sessions):032x}")
    made.ready(offer)
    return made


def joined(route: bytes = b"a", now: float = 0.0, **changes: Any) -> tuple[PeerBook, str]:
    made = book()
    outcome = made.receive(route, hello(**changes), now)
    [(_, welcome)] = outcome.replies
    assert isinstance(welcome, Welcome)
    return made, welcome.session


def reserve(ticket: str = "t", generation: int = 1, **changes: Any) -> Reserve:
    made = Reserve(ticket=ticket, generation=generation, prompt_tokens=40, cached_tokens=0, pages=pack([8, 9]), row=0)
    return replace(made, **changes)


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
        session=welcome.session, name="decode", geometry=replace(GEOMETRY, page_size=32), window_bytes=1000,
        geometries=(replace(GEOMETRY, page_size=32),), backend_reason="the first choice of this server",
    )  # fmt: skip


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
    made = PeerBook(CONFIG, lambda: "s" * 32)
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


def test_a_reservation_passes_and_a_repeated_or_older_one_is_dropped() -> None:
    made, session = joined()
    outcome = made.receive(b"a", reserve(generation=5), 0.0)
    assert outcome.events == [
        PeerReserved(
            session=session, ticket="t", generation=5, prompt_tokens=40, cached_tokens=0, pages=pack([8, 9]), row=0
        )
    ]
    for generation in (5, 4):
        assert made.receive(b"a", reserve(generation=generation), 0.0) == ([], [])
    made.tell(TellFinished(session=session, ticket="t", generation=5))
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


def test_stages_on_other_machines_are_dialled_there_and_the_others_at_the_desk() -> None:
    geometries = tuple(replace(GEOMETRY, layers=1, layer_start=start) for start in range(4))
    offer = replace(
        OFFER, geometries=geometries, data_ports=(1, 2, 3, 4), data_hosts=("", "10.0.0.6", "fe80::7", "node-8")
    )
    made = PeerBook(CONFIG, lambda: "0" * 32)
    made.ready(offer)
    [(_, welcome)] = made.receive(b"a", hello(), 0.0).replies
    assert isinstance(welcome, Welcome)
    link = DeskLink("p", "desk.local", hello, CONFIG, Counters())
    link.tick(0.0)
    [up] = link.receive(welcome, 0.0).events
    assert isinstance(up, PrefillUp)
    assert up.endpoints == ("tcp://desk.local:1", "tcp://10.0.0.6:2", "tcp://[fe80::7]:3", "tcp://node-8:4")


@pytest.mark.parametrize("host", ["a b", "x;tcp://y", "[::1]", "/tmp/x", "*", "-a", ".", "a\n", "a" * 254])
def test_a_data_host_that_is_none_is_refused(host: str) -> None:
    welcome = book().receive(b"a", hello(), 0.0).replies[0][1]
    assert isinstance(welcome, Welcome)
    codec: Codec[DeskMessage] = Codec(DeskMessage)
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
    made.tell(TellCancelled(session=session, ticket="t0", generation=1))
    assert made.receive(b"a", reserve("t3", generation=2), 0.0).events
    made.receive(b"b", hello(instance="e" * 32), 0.0)
    [(_, refuse)] = made.receive(b"c", hello(instance="f" * 32), 0.0).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "too_many_peers"
    assert made.receive(b"b", hello(instance="e" * 32, name="again"), 0.0).events  # its place is its own


def test_a_ticket_that_has_not_ended_cannot_be_used_again() -> None:
    made, session = joined()
    made.receive(b"a", reserve(generation=1), 0.0)
    [(_, answer)] = made.receive(b"a", reserve(generation=2), 0.0).replies
    assert isinstance(answer, Failed)
    assert (answer.code, answer.status, answer.generation) == ("ticket_in_use", 409, 2)
    made.receive(b"a", Cancel(ticket="t", generation=1), 0.0)
    made.tell(TellCancelled(session=session, ticket="t", generation=1))
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
    told = made.tell(TellCancelled(session=session, ticket="t", generation=2))
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


def test_a_reservation_says_whether_it_waits_for_its_prompt() -> None:
    made, _ = joined()
    for wait in (True, False):
        [event] = made.receive(b"a", reserve(f"t-{wait}", wait=wait), 0.0).events
        assert isinstance(event, PeerReserved)
        assert event.wait is wait


def test_failures_and_early_ends_reach_the_peer() -> None:
    made, session = joined()
    error = ErrorInfo(code="stage_failed", message="x" * 5000, status=503, retry_after_s=2.0, stage=1)
    [(_, answer)] = made.tell(TellFailed(session=session, ticket="t", generation=1, error=error)).replies
    assert isinstance(answer, Failed)
    assert (answer.code, answer.status, answer.retry_after_s, answer.stage) == ("stage_failed", 503, 2.0, 1)
    assert len(answer.message) == messages.MAX_TEXT_CHARS
    [(_, done)] = made.tell(TellFinished(session=session, ticket="t", generation=1, first=FIRST)).replies
    assert isinstance(done, Finished)
    row = metadata.decode(done.metadata)
    assert row.first == FIRST
    assert row.belongs_to("t", 1)
    assert made.tell(TellFinished(session="nobody", ticket="t", generation=1)) == ([], [])
    many = TokenLogprob(7, -1.0, tuple(range(21)), (-1.0,) * 21)
    told = made.tell(TellFinished(session=session, ticket="t", generation=1, first=replace(FIRST, logprob=many)))
    assert isinstance(told.replies[0][1], Failed)


def test_a_silent_peer_is_gone_and_a_pinging_one_stays() -> None:
    made, session = joined(now=10.0)
    assert made.next_deadline() == 13.0
    assert made.receive(b"a", Ping(number=4), 12.0).replies == [(b"a", Pong(number=4))]
    assert made.tick(14.9) == ([], [])
    assert made.tick(15.0).events == [PeerGone(session=session, reason="silent for 3 s")]
    assert made.next_deadline() is None
    [(_, refuse)] = made.receive(b"a", Ping(number=5), 15.1).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "no_session"


def test_goodbye() -> None:
    made, session = joined()
    assert made.receive(b"a", Goodbye(reason="draining"), 0.0).events == [
        PeerGone(session=session, reason="goodbye: draining")
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
    assert outcome.events == [PeerGone(session=session, reason=RESTARTED)]
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
    assert outcome.events == [PeerGone(session=session, reason="the server ends")]


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
            assert len(made.tell(tell if kind == "fail" else done).replies) == 1
            ended.add(use)
    assert made.open_tickets == len(reserved - ended)
