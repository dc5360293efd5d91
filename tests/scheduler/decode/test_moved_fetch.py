"""Fetches that fail at their prefill server, and what is needed to move them to another one."""

from collections.abc import Callable

import pytest

from headrace.core.messages.frontend import Abort, Drain, RemovePrefill
from headrace.core.messages.orders import CancelReceive, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskReserve, PrefillDown, TicketFailed, TicketFinished
from headrace.core.messages.replies import Drained, RequestFailed
from headrace.core.messages.stage_events import KvReceived, ReceiveCancelled, ReceiveFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import FetchFrom, FirstToken, SendTo
from headrace.scheduler.scheduler import Event
from tests.scheduler.bench import Bench, ids, only

LOST = ErrorInfo(code="prefill_lost", message="reset", status=502, at_prefill=True)
FIRST = FirstToken(42, 10, 0, None)


def reserved(bench: Bench, rid: str = "a", ticket: str = "t", **fields: object) -> PrepareReceive:
    bench.submit(rid, 10, route=FetchFrom("p", ticket), **fields)
    order = bench.last(PrepareReceive)
    bench.expecting(order.request)
    return order


def connected(**changes: float) -> Bench:
    bench = Bench(True, **changes)
    bench.prefill_up()
    return bench


FAILURES: dict[str, Callable[[PrepareReceive], Event]] = {
    "ticket": lambda _order: TicketFailed(
        session="p1", ticket="t", generation=1, error=ErrorInfo(code="queue_full", message="full", status=429)
    ),
    "session": lambda _order: PrefillDown(name="p", session="p1", reason="silent"),
    "removed": lambda _order: RemovePrefill(name="p"),
    "checksum": lambda order: ReceiveFailed(
        stage=0, request=order.request, code="checksum_mismatch", message="differs"
    ),
    "metadata": lambda order: KvReceived(
        stage=0, request=order.request, first=FirstToken(42, 99, 0, None), bytes=1, chunks=1
    ),
    "end": lambda _order: TicketFinished(session="p1", ticket="t", generation=1, first=FIRST),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_errors_of_the_prefill_server_are_marked(failure: str) -> None:
    bench = connected()
    bench.do(FAILURES[failure](reserved(bench)))
    assert bench.error().at_prefill


def test_an_unknown_server_is_an_error_there_and_a_full_queue_is_one_here() -> None:
    bench = connected(max_queued_requests=1, metadata_rows=1)
    bench.submit("a", 10, route=FetchFrom("other", "t"))
    assert bench.error("a").at_prefill
    for rid in "bcd":
        bench.submit(rid, 10, route=FetchFrom("p", rid))
    assert (bench.error("d").code, bench.error("d").at_prefill) == ("queue_full", False)
    bench.submit("h", 10, route=SendTo("t"))
    assert (bench.error("h").code, bench.error("h").at_prefill) == ("queue_full", False)


def test_a_moved_request_is_refused_by_neither_a_full_queue_nor_a_drain() -> None:
    bench = connected(max_queued_requests=1, metadata_rows=1)
    order = reserved(bench)
    bench.submit("b", 10, route=FetchFrom("p", "tb"))
    bench.do(Drain())
    bench.do(Abort(rid="a", error=LOST))
    bench.submit("c", 10, route=FetchFrom("p", "tc"))
    assert bench.error("c").code == "draining"
    bench.submit("a", 10, route=FetchFrom("p", "t2"), moved=True, max_tokens=1)
    assert bench.ended("a") == 1, "the first attempt"
    bench.do(Abort(rid="b"))
    bench.do(ReceiveCancelled(stage=0, request=order.request))
    again = bench.last(PrepareReceive)
    assert again.ticket == "t2"
    bench.expecting(again.request)
    bench.do(KvReceived(stage=0, request=again.request, first=FIRST, bytes=1, chunks=1))
    assert bench.tokens("a") == [42]
    assert bench.all(Drained) == [Drained()]


def test_the_old_ticket_is_cancelled_and_its_pages_wait_for_the_stages() -> None:
    """The prompt's cached prefix counts for both, and nothing of the first attempt is published."""
    bench = connected()
    first = reserved(bench, rid="w", ticket="w", max_tokens=1)
    bench.do(KvReceived(stage=0, request=first.request, first=FIRST, bytes=1, chunks=1))
    cached = bench.metric("kv_pages", "cached")
    order = reserved(bench)
    effects = bench.do(Abort(rid="a", error=LOST))
    assert only(effects, AskCancel).ticket == "t"
    assert only(effects, CancelReceive).request == order.request
    again = reserved(bench, ticket="t2", moved=True)
    assert not set(ids(order.pages)) & set(ids(again.pages)), "a stage may still write to the old ones"
    assert (again.start, again.generation > order.generation) == (order.start, True)
    assert bench.last(AskReserve).reservation.cached_tokens == order.start
    bench.do(ReceiveCancelled(stage=0, request=order.request))
    bench.do(KvReceived(stage=0, request=again.request, first=FIRST, bytes=1, chunks=1))
    bench.abort("a", finish=True)
    assert bench.metric("kv_pages", "leased") == 0
    assert bench.metric("kv_pages", "cached") >= cached


def test_an_error_that_comes_after_the_kv_changes_nothing() -> None:
    """The prefill server died after its last byte and before its response."""
    bench = connected()
    order = reserved(bench, max_tokens=3)
    bench.do(KvReceived(stage=0, request=order.request, first=FIRST, bytes=1, chunks=1))
    bench.do(Abort(rid="a", error=LOST))
    assert bench.ended("a") == 0
    assert bench.metric("dropped_messages_total", "late_error") == 1
    bench.compute(43, 44)
    assert bench.tokens("a") == [42, 43, 44]


def test_an_error_that_comes_after_the_kv_fails_a_request_that_waits_for_prompt_logprobs() -> None:
    """They are in the response."""
    bench = connected()
    order = reserved(bench, max_tokens=3, prompt_logprobs=1)
    bench.do(KvReceived(stage=0, request=order.request, first=FIRST, bytes=1, chunks=1))
    assert only(bench.do(Abort(rid="a", error=LOST)), RequestFailed).error == LOST
