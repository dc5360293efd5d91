"""Loads of a KvLoader: pages, reservations, cancels and failures, without sockets or a clock."""

from typing import Any

import msgspec
import pytest

from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskRenew, ConnectPrefill, TicketFailed, TicketFinished
from headrace.core.messages.stage_events import ChunkReceived, KvReceived, ReceiveFailed, ReceivePrepared
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.draft import Draft, DraftTerms, DraftTokens
from headrace.peer.commands import (
    CancelLoad,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    RejectTicket,
    ReleaseLoad,
    RenewLease,
)
from headrace.peer.loader import METADATA_ROWS, KvLoader
from headrace.peer.records import PeerLimits
from headrace.peer.staging import PAGE_TOKENS
from tests.peer.loader_bench import CONTROL, FIRST, PAGES, Bench, ticket


def test_the_way_of_a_load() -> None:
    bench = Bench()
    assert bench.do(RenewLease(id="a", ticket=ticket("a"))) == [ConnectPrefill(name=CONTROL, endpoint=CONTROL)]
    opened, renew = bench.up()
    assert isinstance(opened, OpenSession)
    assert renew == AskRenew(session="s1", ticket="a")
    ask = bench.reserved("a", tokens=PAGE_TOKENS + 10, start=PAGE_TOKENS - 1)
    wanted = ask.reservation
    assert (ask.session, wanted.ticket, wanted.prompt_tokens, wanted.cached_tokens) == ("s1", "a", 74, 63)
    assert (len(wanted.pages), wanted.wait, wanted.prompt_hash) == (2 * 4, True, "h")
    bench.hear(ChunkReceived(stage=0, request=bench.serial))
    bench.hear(KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1))
    assert bench.answers() == [Loaded(id="a", at=63, start=63, count=11, first=FIRST, seconds=0.0)]
    assert not bench.empty(), "the owner has not copied it yet"
    assert bench.do(CancelLoad(id="a")) == []
    assert bench.do(ReleaseLoad(id="a")) == []
    assert bench.empty()
    assert bench.answers() == []


@pytest.mark.parametrize("event", ["ticket", "fetch", "first token", "session", "silence"])
def test_whatever_goes_wrong_is_answered_once_and_nothing_stays(event: str) -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    ask = bench.reserved()
    key = {"session": ask.session, "ticket": ask.reservation.ticket, "generation": ask.reservation.generation}
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
    assert (cancel.ticket, cancel.generation) == ("open", ask.reservation.generation)
    assert bench.answers() == [LoadCancelled(id="open")]
    bench.do(RenewLease(id="kept", ticket=ticket("kept")))
    [cancel] = bench.do(CancelLoad(id="kept"))
    assert isinstance(cancel, AskCancel)
    assert bench.answers() == [], "it was never to be loaded"
    assert bench.empty()


def test_every_use_of_a_ticket_has_a_higher_generation() -> None:
    bench = Bench()
    bench.do(RenewLease(id="k", ticket=ticket("k")))
    bench.up()
    generations = []
    for _ in range(3):
        generations.append(bench.reserved("a").reservation.generation)
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
    assert (first.reservation.ticket, begun) == ("first", ["second", "third"])


def test_no_more_reservations_than_metadata_rows() -> None:
    bench = Bench()
    bench.loader = KvLoader(PeerLimits(fingerprint="f", rules=bench.limits.rules, pages=METADATA_ROWS + 2))
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
    if code == "fingerprint_mismatch":
        assert answer.message == "fingerprint: g at the prefill server, f at the decode server"
    assert not [one for one in asked if isinstance(one, PrepareReceive)]
    if code == "prefill_not_allowed":
        assert asked == [], "that server is not even connected to"
    bench.wait(10)
    assert bench.empty()


def test_a_refused_load_releases_what_was_kept() -> None:
    bench = Bench()
    bench.do(RenewLease(id="a", ticket=ticket("a")))
    bench.up()
    [cancel] = bench.do(RejectTicket(id="a", code="c", message="m"))
    assert isinstance(cancel, AskCancel)
    assert bench.answers() == [LoadFailed(id="a", code="c", message="m")]
    assert bench.empty()


def test_draft_data_is_asked_for_and_comes_with_the_load() -> None:
    bench = Bench()
    terms = DraftTerms(hidden=True, top_k=4)
    bench.do(RenewLease(id="a", ticket=ticket("a")))
    bench.up()
    [expect] = bench.do(LoadKv(id="a", ticket=ticket("a"), start=0, tokens=10, draft=terms))
    [ask] = bench.hear(ReceivePrepared(stage=0, request=expect.request))
    assert (expect.draft, ask.reservation.draft) == (terms, terms)
    first = msgspec.structs.replace(FIRST, draft=Draft(None, DraftTokens((5,), (0.5,))))
    bench.hear(KvReceived(stage=0, request=expect.request, first=first, bytes=1, chunks=1))
    [loaded] = bench.answers()
    assert isinstance(loaded, Loaded)
    assert loaded.first == first
