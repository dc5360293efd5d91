"""Loads whose prefill server writes into the pages itself: they are used again when it has stopped, not earlier."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.messages.orders import CancelReceive, OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskCancel,
    AskReserve,
    DisconnectPrefill,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import KvReceived, ReceiveFailed, ReceivePrepared, SessionClosed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import NIXL, SHM
from headrace.peer.commands import CancelLoad, LoadCancelled, Loaded, LoadFailed, ReleaseLoad
from headrace.peer.servers import IDLE_S
from tests.peer.loader_bench import FIRST, PAGES, Bench

ERROR = ErrorInfo(code="stage_failed", message="m", status=500)


def writing(backend: str = SHM) -> tuple[Bench, AskReserve]:
    """A load for which the prefill server may write."""
    bench = Bench(backend)
    bench.load("first", tokens=1)
    [opened] = [one for one in bench.up() if isinstance(one, OpenSession)]
    assert opened.terms.backend == backend
    bench.do(CancelLoad(id="first"))
    bench.answers()
    ask = bench.reserved("a", tokens=3 * 64)
    return bench, ask


def begun(asked: list[Any]) -> list[str]:
    return [one.ticket for one in asked if isinstance(one, PrepareReceive)]


ENDS: dict[str, Callable[..., Any]] = {
    "cancelled": TicketCancelled,
    "failed": lambda **key: TicketFailed(**key, error=ERROR),
    "finished": lambda **key: TicketFinished(**key, first=FIRST),
}


@pytest.mark.parametrize("backend", [SHM, NIXL])
@pytest.mark.parametrize("end", ENDS)
def test_pages_of_a_cancelled_load_wait_for_the_word_of_the_prefill_server(end: str, backend: str) -> None:
    bench, ask = writing(backend)
    asked = bench.do(CancelLoad(id="a"))
    assert [type(one) for one in asked] == [CancelReceive, AskCancel]
    assert bench.answers() == [LoadCancelled(id="a")], "the owner does not wait"
    assert begun(bench.load("b", tokens=2 * 64)) == []
    key = {"session": ask.session, "ticket": ask.reservation.ticket, "generation": ask.reservation.generation}
    for other in ({"session": "s0"}, {"ticket": "b"}, {"generation": ask.reservation.generation + 1}):
        assert begun(bench.hear(ENDS[end](**(key | other)))) == []
    late = KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1)
    assert begun(bench.hear(late)) == begun(bench.wait(IDLE_S)) == begun(bench.do(CancelLoad(id="a"))) == []
    assert bench.answers() == []
    assert begun(bench.hear(ENDS[end](**key))) == ["b"]
    assert begun(bench.hear(ENDS[end](**key))) == []
    assert bench.answers() == []


@pytest.mark.parametrize("why", ["silence", "bad chunk"])
def test_pages_of_a_failed_load_wait_too(why: str) -> None:
    bench, ask = writing()
    if why == "silence":
        bench.wait(30)
    else:
        bench.hear(ReceiveFailed(stage=0, request=bench.serial, code="checksum_mismatch", message="m"))
    [failed] = bench.answers()
    assert isinstance(failed, LoadFailed)
    assert begun(bench.load("b", tokens=2 * 64)) == []
    ended = TicketCancelled(session=ask.session, ticket=ask.reservation.ticket, generation=ask.reservation.generation)
    assert begun(bench.hear(ended)) == ["b"]


def test_a_ticket_that_the_prefill_server_ends_leaves_no_pages_behind() -> None:
    bench, ask = writing()
    bench.hear(
        TicketFailed(
            session=ask.session, ticket=ask.reservation.ticket, generation=ask.reservation.generation, error=ERROR
        )
    )
    assert bench.empty()


def test_a_session_that_is_lost_may_be_written_through_until_its_access_is_revoked() -> None:
    bench, ask = writing()
    bench.down()
    [failed] = bench.answers()
    assert isinstance(failed, LoadFailed)
    assert failed.code == "peer_gone"
    bench.up()
    assert begun(bench.load("b", tokens=2 * 64)) == []
    late = TicketCancelled(session="s2", ticket=ask.reservation.ticket, generation=ask.reservation.generation)
    assert begun(bench.hear(late)) == begun(bench.hear(SessionClosed(stage=0, session="s2"))) == []
    assert begun(bench.hear(SessionClosed(stage=0, session=ask.session))) == ["b"]


def test_a_writer_that_is_stopped_holds_its_pages_and_not_the_connection() -> None:
    bench, ask = writing()
    bench.do(CancelLoad(id="a"))
    bench.down()
    asked = bench.wait(IDLE_S)
    assert [type(one) for one in asked] == [DisconnectPrefill], "nobody needs that server any more"
    bench.wait(3600)
    assert (bench.loader.staging_pages.free_pages, bench.loader.stopping_pages) == (PAGES - 3, 3)
    assert bench.loader.next_deadline() is None
    bench.hear(SessionClosed(stage=0, session=ask.session))
    assert bench.empty()


def test_a_server_that_was_told_no_pages_writes_into_none() -> None:
    bench = Bench(SHM)
    bench.load("first", tokens=1)
    bench.up()
    bench.do(CancelLoad(id="first"))
    assert bench.empty(), "the receiver was not ready yet"
    [expect] = [one for one in bench.load("a") if isinstance(one, PrepareReceive)]
    bench.hear(ReceiveFailed(stage=0, request=expect.request, code="peer_gone", message="m"))
    assert bench.empty()
    assert bench.hear(ReceivePrepared(stage=0, request=expect.request)) == []


def test_what_is_loaded_is_the_owners_alone() -> None:
    bench, ask = writing()
    bench.hear(KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1))
    [loaded] = bench.answers()
    assert isinstance(loaded, Loaded)
    bench.down()
    bench.hear(SessionClosed(stage=0, session=ask.session))
    assert bench.loader.staging_pages.free_pages == PAGES - 3
    bench.do(ReleaseLoad(id="a"))
    assert bench.empty()


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_pages_have_the_size_that_their_owner_wants(page_tokens: int) -> None:
    bench = Bench(page_tokens=page_tokens)
    bench.load("other", tokens=1)
    bench.up()
    start = page_tokens + page_tokens // 2
    ask = bench.reserved("a", tokens=start + page_tokens, start=start)
    pages = list(memoryview(ask.reservation.pages).cast("i"))
    assert pages == ([1, 2] if page_tokens > 1 else [1])
    bench.hear(KvReceived(stage=0, request=bench.serial, first=FIRST, bytes=1, chunks=1))
    [loaded] = bench.answers()
    assert isinstance(loaded, Loaded)
    assert (loaded.at // page_tokens, loaded.at % page_tokens) == (1, start % page_tokens)
    bench.load("long", tokens=PAGES * page_tokens + 1)
    [failed] = bench.answers()
    assert isinstance(failed, LoadFailed)
    assert f"{PAGES * page_tokens} fit" in failed.message
