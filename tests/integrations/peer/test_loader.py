"""KvLoader: commands and events in, effects and results out, without sockets or a clock."""

import random
from typing import Any

import pytest

from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    AskReserve,
    ConnectPrefill,
    DisconnectPrefill,
    PrefillDown,
    PrefillUp,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import ChunkReceived, KvReceived, ReceiveFailed, ReceivePrepared
from headrace.core.types.allow_list import allowed_prefills
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.geometry import Geometry
from headrace.core.types.request import FirstToken
from headrace.integrations.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    ControlPortReply,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    LookUpControlPort,
    RejectTicket,
    ReleaseLoad,
    RenewLease,
    TicketRef,
)
from headrace.integrations.peer.loader import IDLE_S, LOOKUP_S, METADATA_ROWS, KvLoader
from headrace.integrations.peer.records import Limits, server_name
from headrace.integrations.peer.staging import PAGE_TOKENS

FIRST = FirstToken(token=5, prompt_tokens=10, cached_tokens=0)
CONTROL = "tcp://127.0.0.1:7000"
PAGES = 4


def ticket(name: str = "t", **changes: Any) -> TicketRef:
    return TicketRef(**{"name": name, "host": "127.0.0.1", "port": 7000, **changes})


class Bench:
    """A KvLoader and its time; every step returns the effects that it asked for."""

    def __init__(self) -> None:
        rules = allowed_prefills((), ("127.0.0.0/8",))
        self.limits = Limits(fingerprint="f", rules=rules, pages=PAGES, connect_timeout_s=10, load_timeout_s=30)
        self.loader, self.now, self.sessions = KvLoader(self.limits), 100.0, 0
        self.dialled = False

    def do(self, command: AnyCommand) -> list[Any]:
        self.loader.apply(command, self.now)
        return self.asked()

    def hear(self, event: Any) -> list[Any]:
        self.loader.handle(event, self.now)
        return self.asked()

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.loader.tick(self.now)
        return self.asked()

    def asked(self) -> list[Any]:
        asked = list(self.loader.effects)
        self.loader.effects.clear()
        for one in asked:
            if isinstance(one, ConnectPrefill | DisconnectPrefill):
                self.dialled = isinstance(one, ConnectPrefill)
        return asked

    def answers(self) -> list[AnyResult]:
        answers = list(self.loader.results)
        self.loader.results.clear()
        return answers

    def up(self, name: str = CONTROL) -> list[Any]:
        self.sessions += 1
        geometry = Geometry("float32", 1, 1, 1, 16)
        event = PrefillUp(
            name=name, session=f"s{self.sessions}", endpoints=("tcp://x:1",), geometries=(geometry,), window_bytes=1
        )
        return self.hear(event)

    def down(self, reason: str = "silent", session: str | None = "", unfit: bool = False) -> list[Any]:
        session = f"s{self.sessions}" if session == "" else session
        return self.hear(PrefillDown(name=CONTROL, session=session, reason=reason, unfit=unfit))

    def load(self, name: str = "a", tokens: int = 10, start: int = 0, **changes: Any) -> list[Any]:
        command = LoadKv(id=name, ticket=ticket(name, **changes), start=start, tokens=tokens, prompt_hash="h")
        return self.do(command)

    def reserved(self, name: str = "a", tokens: int = 10, start: int = 0) -> AskReserve:
        """Load a ticket as far as its reservation."""
        [expect] = [one for one in self.load(name, tokens, start) if isinstance(one, PrepareReceive)]
        [ask] = self.hear(ReceivePrepared(stage=0, request=expect.request))
        assert isinstance(ask, AskReserve)
        self.serial = expect.request
        return ask

    def empty(self) -> bool:
        return len(self.loader) == 0 and self.loader.staging_pages.free_pages == PAGES


def test_the_way_of_a_load() -> None:
    bench = Bench()
    assert bench.do(RenewLease(id="a", ticket=ticket("a"))) == [ConnectPrefill(name=CONTROL, endpoint=CONTROL)]
    dial, renew = bench.up()
    assert isinstance(dial, OpenSession)
    assert renew == AskRenew(session="s1", ticket="a")
    ask = bench.reserved("a", tokens=PAGE_TOKENS + 10, start=PAGE_TOKENS - 1)
    assert (ask.session, ask.ticket, ask.prompt_tokens, ask.cached_tokens) == ("s1", "a", 74, 63)
    assert (len(ask.pages), ask.wait, ask.prompt_hash) == (2 * 4, True, "h")
    bench.hear(ChunkReceived(stage=0, request=bench.serial))
    bench.hear(KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1))
    assert bench.answers() == [Loaded(id="a", at=63, start=63, count=11, first=FIRST, seconds=0.0)]
    assert not bench.empty(), "the owner has not copied it yet"
    assert bench.do(CancelLoad(id="a")) == []
    assert bench.do(ReleaseLoad(id="a")) == []
    assert bench.empty()
    assert bench.answers() == []


def test_a_later_session_renews_and_begins_what_waited() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    bench.down()
    assert bench.load("a") == []
    asked = bench.up()
    assert AskRenew(session="s2", ticket="k") in asked
    assert [(one.session, one.ticket) for one in asked if isinstance(one, PrepareReceive)] == [("s2", "a")]


@pytest.mark.parametrize("event", ["ticket", "fetch", "first token", "session", "silence"])
def test_whatever_goes_wrong_is_answered_once_and_nothing_stays(event: str) -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    ask = bench.reserved()
    key = {"session": ask.session, "ticket": ask.ticket, "generation": ask.generation}
    cancel = AskCancel(**key, reason="not needed")
    forget = CancelReceive(seq=0, request=bench.serial)
    if event == "ticket":
        error = ErrorInfo(code="lease_expired", message="m", status=504)
        code, asked = "lease_expired", bench.hear(TicketFailed(**key, error=error))
        assert asked == [forget]
    elif event == "fetch":
        failed = ReceiveFailed(stage=0, request=bench.serial, code="checksum_mismatch", message="m")
        code, asked = "checksum_mismatch", bench.hear(failed)
        assert asked == [forget, cancel]
    elif event == "first token":
        code, asked = "no_kv", bench.hear(TicketFinished(**key, first=FIRST))
        assert asked == [forget]
    elif event == "session":
        code, asked = "peer_gone", bench.down()
        assert asked == [CloseSession(seq=0, session="s1"), forget]
    else:
        bench.wait(29)
        bench.hear(ChunkReceived(stage=0, request=bench.serial))
        bench.wait(29)
        assert bench.answers() == []
        code, asked = "timeout", bench.wait(2)
        assert asked == [forget, cancel]
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert (answer.id, answer.code) == ("a", code)
    late = KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1)
    assert bench.hear(late) == bench.do(CancelLoad(id="a")) == bench.answers() == []
    bench.do(CancelLoad(id="k"))
    bench.wait(60)
    assert bench.empty()


def test_a_cancel_is_answered_at_once_and_nothing_is_written_after_it() -> None:
    bench = Bench()
    bench.load("queued")
    bench.do(CancelLoad(id="queued"))
    assert bench.answers() == [LoadCancelled(id="queued")]
    bench.up()
    ask = bench.reserved("open")
    forget, cancel = bench.do(CancelLoad(id="open"))
    assert forget == CancelReceive(seq=0, request=bench.serial)
    assert (cancel.ticket, cancel.generation) == ("open", ask.generation)
    assert bench.answers() == [LoadCancelled(id="open")]
    bench.do(RenewLease(id="kept", ticket=ticket("kept")))
    [cancel] = bench.do(CancelLoad(id="kept"))
    assert isinstance(cancel, AskCancel)
    assert bench.answers() == [], "it was never to be loaded"
    assert bench.empty()


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


def test_every_use_of_a_ticket_has_a_higher_generation() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    generations = []
    for _ in range(3):
        generations.append(bench.reserved("a").generation)
        bench.do(CancelLoad(id="a"))
    assert generations == sorted(set(generations))


def test_loads_wait_for_space_in_their_order() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    first = bench.reserved("first", tokens=3 * PAGE_TOKENS)
    serial = bench.serial
    assert bench.load("second", tokens=2 * PAGE_TOKENS) == [AskRenew(session="s1", ticket="second")]
    assert bench.load("third", tokens=1) == [AskRenew(session="s1", ticket="third")], "not before the second"
    bench.wait(29)  # which is no silence of theirs
    bench.hear(KvReceived(stage=0, request=serial, first=FIRST, bytes=1, chunks=1))
    begun = [one.ticket for one in bench.do(ReleaseLoad(id="first")) if isinstance(one, PrepareReceive)]
    assert (first.ticket, begun) == ("first", ["second", "third"])


def test_no_more_reservations_than_metadata_rows() -> None:
    bench = Bench()
    bench.loader = KvLoader(Limits(fingerprint="f", rules=bench.limits.rules, pages=METADATA_ROWS + 2))
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    expects = [one for n in range(METADATA_ROWS + 1) for one in bench.load(str(n)) if isinstance(one, PrepareReceive)]
    assert len({one.row for one in expects}) == len(expects) == METADATA_ROWS
    assert [type(one) for one in bench.do(CancelLoad(id="7"))] == [CancelReceive, AskCancel, PrepareReceive]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"host": "10.0.0.1"}, "prefill_not_allowed"),
        ({"fingerprint": "g"}, "fingerprint_mismatch"),
        ({"tokens": PAGES * PAGE_TOKENS + 1}, "prompt_too_long"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_refused_before_a_page_is_reserved(changes: dict[str, Any], code: str) -> None:
    bench = Bench()
    asked = bench.load(**changes)
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert answer.code == code
    assert not [one for one in asked if isinstance(one, PrepareReceive)]
    if code == "prefill_not_allowed":
        assert asked == [], "that server is not even dialled"
    bench.wait(10)
    assert bench.empty()


def test_a_server_that_does_not_fit_fails_at_once_and_one_that_is_away_after_a_while() -> None:
    bench = Bench()
    bench.load("a")
    bench.down("not_ready: loading", session=None)
    assert bench.answers() == []
    bench.down("dtype_mismatch: dtype: a here, b there", session=None, unfit=True)
    [answer] = bench.answers()
    assert isinstance(answer, LoadFailed)
    assert (answer.code, answer.message) == ("unfit", "dtype_mismatch: dtype: a here, b there")
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
    bench.down("dtype_mismatch: dtype: a here, b there", session=None, unfit=True)
    bench.load("c")
    bench.up()
    assert bench.reserved("d").ticket == "d", "it was started again, as another one"


def test_a_refused_load_releases_what_was_kept() -> None:
    bench = Bench()
    bench.do(RenewLease(id="a", ticket=ticket("a")))
    bench.up()
    [cancel] = bench.do(RejectTicket(id="a", code="c", message="m"))
    assert isinstance(cancel, AskCancel)
    assert bench.answers() == [LoadFailed(id="a", code="c", message="m")]
    assert bench.empty()


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


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_answer_every_load_once_and_end_empty(seed: int) -> None:
    """The other side does anything at any time. Pages that are expected never overlap, and the owner hears of each load
    once."""
    rng, bench = random.Random(seed), Bench()
    open_names: dict[str, bool] = {}  # whether a load was asked for
    answered: dict[str, AnyResult] = {}
    expects: dict[int, PrepareReceive] = {}
    asks: list[AskReserve] = []
    up, number = False, 0

    def note(asked: list[Any]) -> None:
        for one in asked:
            if isinstance(one, PrepareReceive):
                taken = [page for other in expects.values() for page in memoryview(other.pages).cast("i")]
                assert not set(taken) & set(memoryview(one.pages).cast("i"))
                assert one.row not in {other.row for other in expects.values()}
                expects[one.request] = one
                note(bench.hear(ReceivePrepared(stage=0, request=one.request)))
            elif isinstance(one, CancelReceive):
                del expects[one.request]
            elif isinstance(one, AskReserve):
                asks.append(one)
        for answer in bench.answers():
            assert answer.id not in answered
            answered[answer.id] = answer

    for _ in range(300):
        step = rng.randrange(9)
        names = list(open_names)
        if step == 0:
            number += 1
            open_names[str(number)] = False
            note(bench.do(RenewLease(id=str(number), ticket=ticket(str(number)))))
        elif step in (1, 2) and names:
            name = rng.choice(names)
            if not open_names[name]:
                open_names[name] = True
                note(bench.load(name, tokens=rng.randint(2, 200), start=rng.randint(0, 1)))
        elif step == 3 and names:
            name = rng.choice(names)
            if isinstance(answered.get(name), Loaded):
                note(bench.do(ReleaseLoad(id=name)))
                del open_names[name]
            elif rng.random() < 0.3:
                note(bench.do(CancelLoad(id=name)))
                del open_names[name]
        elif step == 4:
            if up and rng.random() < 0.5:
                up = False
                note(bench.down())
            elif not up and bench.dialled:
                up = True
                note(bench.up())
        elif step == 5 and expects:
            serial = rng.choice(list(expects))
            del expects[serial]
            note(bench.hear(KvReceived(stage=0, request=serial, first=FIRST, bytes=1, chunks=1)))
        elif step == 6 and asks:
            ask = rng.choice(asks)
            error = ErrorInfo(code="x", message="m", status=500)
            key = {"session": ask.session, "ticket": ask.ticket, "generation": ask.generation}
            note(bench.hear(TicketFailed(**key, error=error)))
        else:
            note(bench.wait(rng.choice((0.0, 1.0, 12.0))))
        up = up and bench.dialled
    for name, loading in list(open_names.items()):
        note(bench.do(ReleaseLoad(id=name) if isinstance(answered.get(name), Loaded) else CancelLoad(id=name)))
        assert not loading or name in answered
    note(bench.wait(60))
    for name in [name for name, answer in answered.items() if isinstance(answer, Loaded)]:
        note(bench.do(ReleaseLoad(id=name)))
    assert bench.empty()
    assert sorted(bench.loader._rows) == list(range(METADATA_ROWS))
