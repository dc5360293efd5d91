"""What a failed fetch leaves, and attempts that go on from it."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.frontend import Abort, AddPrefill
from headrace.core.messages.orders import PrepareReceive, ReleaseRequest
from headrace.core.messages.peers import AskReserve, PrefillDown, PrefillUp, TicketFailed
from headrace.core.messages.replies import RequestFailed, Reserved
from headrace.core.messages.stage_events import (
    ChunkReceived,
    KvReceived,
    PlanDone,
    ReceiveFailed,
    SessionClosed,
    StageFailed,
)
from headrace.core.types.errors import DEADLINE, ErrorInfo
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import DecodeHere, FetchFrom, FirstToken, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.lifecycle.leftovers import KEEP_S, LONGEST_S
from tests.scheduler.bench import PAGE, Bench, geometry, ids, none, only
from tests.scheduler.decode.test_quarantine import direct

LOST = ErrorInfo(code="prefill_lost", message="reset", status=502, at_prefill=True)
TOKENS = 10  # two full pages, and one more
OTHER, ANOTHER = list(range(500, 508)), list(range(600, 608))  # two pages each


def connected(**changes: object) -> Bench:
    bench = Bench(True, **changes)
    bench.prefill_up()
    bench.do(AddPrefill(name="q", endpoint="tcp://y:1"))
    terms = PrefillTerms(session="q1", endpoints=("tcp://y:2",), geometries=(geometry(),), window_bytes=1 << 20)
    bench.do(PrefillUp(name="q", terms=terms))
    return bench


def reserved(bench: Bench, prefill: str = "p", rid: str = "a", **fields: object) -> PrepareReceive:
    bench.submit(rid, TOKENS, route=FetchFrom(prefill, f"{prefill}-{rid}"), **fields)
    order = bench.last(PrepareReceive)
    for stage in range(bench.config.stages):
        bench.expecting(order.request, stage)
    return order


def moved(bench: Bench, prefill: str = "q", **fields: object) -> Reservation:
    """What is reserved for the next attempt."""
    reserved(bench, prefill, moved=True, **fields)
    return bench.last(AskReserve).reservation


def came(bench: Bench, order: PrepareReceive, until: int, stage: int = 0) -> None:
    bench.do(ChunkReceived(stage=stage, request=order.request, until=until))


def failed(bench: Bench, order: PrepareReceive, error: ErrorInfo = LOST, rid: str = "a") -> None:
    """Its prefill server fails the request, and nothing writes into its pages any more."""
    bench.do(Abort(rid=rid, error=error))
    for stage in range(bench.config.stages):
        bench.forgotten(order.request, stage)


def finish(bench: Bench, order: PrepareReceive) -> None:
    first = FirstToken(42, TOKENS, 0, None)
    bench.do(KvReceived(stage=0, request=order.request, first=first, bytes=100, chunks=1))
    bench.compute(43)
    bench.abort("a", finish=True)


def test_the_next_attempt_goes_on_from_the_full_pages_that_have_come() -> None:
    bench = connected()
    first = reserved(bench)
    came(bench, first, 9)
    failed(bench, first)
    assert bench.error() == LOST
    wanted = moved(bench)
    assert (wanted.cached_tokens, len(ids(wanted.pages))) == (8, 1)
    assert bench.last(Reserved).cached == 8
    assert (bench.metric("resumed_prompts_total"), bench.metric("resumed_tokens_total")) == (1, 8)
    order = bench.last(PrepareReceive)
    assert (order.start, order.count) == (8, 2)
    finish(bench, order)
    assert bench.finished().usage.prompt_tokens == TOKENS
    row = next(forward.rows[0] for forward in bench.seen if hasattr(forward, "rows"))
    assert ids(row.pages)[:2] == ids(first.pages)[:2], "they are the pages of the first attempt"
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 2


@pytest.mark.parametrize(("there", "kept"), [((8, 8), 8), ((8, 4), 4), ((8, 0), 0), ((7, 8), 4), ((3, 8), 0)])
def test_only_what_every_stage_has_counts(there: tuple[int, int], kept: int) -> None:
    bench = connected(stages=2)
    order = reserved(bench)
    for stage, until in enumerate(there):
        came(bench, order, until, stage)
    failed(bench, order)
    assert moved(bench).cached_tokens == kept


def test_the_front_end_is_told_when_nothing_writes_any_more_and_the_rest_of_the_pages_is_free() -> None:
    bench = connected(stages=2)
    order = reserved(bench)
    came(bench, order, 8, 0)
    came(bench, order, 8, 1)
    assert none(bench.do(Abort(rid="a", error=LOST)), RequestFailed)
    assert none(bench.forgotten(order.request, 0), RequestFailed)
    effects = bench.forgotten(order.request, 1)
    assert only(effects, RequestFailed).error == LOST
    assert only(effects, ReleaseRequest).request == order.request
    assert (bench.metric("kv_pages", "leased"), bench.metric("metadata_rows_in_use")) == (2, 0)


def test_pages_that_no_attempt_goes_on_from_are_free_and_not_cached() -> None:
    """Nothing has shown that they are finite."""
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    bench.wait(KEEP_S + 0.01)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 0
    assert moved(bench).cached_tokens == 0


def test_pages_are_kept_for_longer_for_an_attempt_that_waits() -> None:
    """The second attempt lacks pages that another request has."""
    bench = connected(kv_pages=5)
    order = reserved(bench)
    came(bench, order, 4)
    bench.submit("b", OTHER, route=FetchFrom("p", "b"))  # takes the two pages that are free
    failed(bench, order)
    bench.submit("c", ANOTHER, route=FetchFrom("p", "c"))  # and those that the first attempt has left
    waiting = len(bench.all(PrepareReceive))
    bench.submit("a", TOKENS, route=FetchFrom("q", "q-a"), moved=True)
    assert len(bench.all(PrepareReceive)) == waiting
    bench.wait(3 * KEEP_S)
    other = next(order for order in bench.all(PrepareReceive) if order.ticket == "c")
    bench.do(Abort(rid="c"))
    bench.forgotten(other.request)
    assert bench.last(PrepareReceive).start == 4


def test_but_not_for_ever() -> None:
    bench = connected(kv_pages=5)
    order = reserved(bench)
    came(bench, order, 4)
    bench.submit("b", OTHER, route=FetchFrom("p", "b"))
    failed(bench, order)
    bench.submit("c", ANOTHER, route=FetchFrom("p", "c"))
    bench.submit("a", TOKENS, route=FetchFrom("q", "q-a"), moved=True)
    assert bench.metric("kv_pages", "leased") == 5
    bench.wait(LONGEST_S + 2 * KEEP_S)
    assert bench.metric("kv_pages", "leased") == 4


def test_a_third_attempt_goes_on_from_what_the_first_two_have_brought() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 4)
    failed(bench, order)
    assert moved(bench).cached_tokens == 4
    order = bench.last(PrepareReceive)
    came(bench, order, 8)
    failed(bench, order)
    assert moved(bench, "p").cached_tokens == 8
    assert bench.metric("resumed_tokens_total") == 8


def test_a_second_attempt_that_has_brought_nothing_leaves_what_the_first_has() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    moved(bench)
    failed(bench, bench.last(PrepareReceive))
    assert moved(bench, "p").cached_tokens == 8


@pytest.mark.parametrize("code", ["checksum_mismatch", "bad_chunk", "bad_metadata", "nonfinite_values"])
def test_nothing_is_kept_of_a_server_that_sends_damage(code: str) -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    bench.do(ReceiveFailed(stage=0, request=order.request, code=code, message="x"))
    assert bench.error().code == code
    bench.forgotten(order.request)
    bench.assert_empty()
    assert moved(bench).cached_tokens == 0


@pytest.mark.parametrize("error", [None, ErrorInfo(code=DEADLINE, message="late", status=504)])
def test_nothing_is_kept_for_a_client_that_has_gone(error: ErrorInfo | None) -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    only(bench.do(Abort(rid="a", error=error)), RequestFailed)
    bench.forgotten(order.request)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 0


def test_a_client_that_goes_while_the_pages_settle_is_answered_at_once() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    assert none(bench.do(Abort(rid="a", error=LOST)), RequestFailed)
    assert none(bench.do(Abort(rid="a", error=LOST)), RequestFailed), "its prompt has failed, too"
    only(bench.abort(), RequestFailed)
    bench.forgotten(order.request)
    bench.assert_empty()
    assert bench.ended() == 1


def test_kv_that_makes_results_nan_leaves_the_cache_with_the_attempt_that_shows_it() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    assert moved(bench).cached_tokens == 8
    order = bench.last(PrepareReceive)
    first = FirstToken(42, TOKENS, 0, None)
    bench.do(KvReceived(stage=0, request=order.request, first=first, bytes=100, chunks=1))
    forward = bench.plan()
    assert forward is not None
    bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.003, nonfinite=(order.request,)))
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 0


def test_pages_that_were_cached_before_stay_when_what_came_behind_them_is_not_proven() -> None:
    bench = connected()
    bench.submit("b", 5, max_tokens=1)  # the first page of the same tokens
    bench.compute(1)
    order = reserved(bench)
    assert order.start == 4
    came(bench, order, 8)
    failed(bench, order)
    bench.wait(KEEP_S + 0.01)
    assert bench.metric("kv_pages", "cached") == 1


def test_another_request_that_has_computed_from_the_pages_proves_them() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    bench.submit("b", TOKENS, max_tokens=1)
    forward = bench.plan()
    assert forward is not None
    assert forward.rows[0].start == 8
    bench.done(forward, 1)
    bench.wait(KEEP_S + 0.01)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 2


def test_the_prompt_goes_on_here_too() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    bench.submit("a-local", TOKENS, route=DecodeHere(), follows="a", max_tokens=1)
    forward = bench.plan()
    assert forward is not None
    assert (forward.rows[0].start, forward.rows[0].count) == (8, 2)
    assert bench.metric("resumed_tokens_total") == 8
    bench.done(forward, 1)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 2


def test_what_has_come_can_be_handed_to_the_next_prefill_server() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    moved(bench)
    bench.join()
    bench.reserve("k", 8)
    bench.submit("k", 8, route=SendTo("k", cached=True))
    assert bench.ended("k") == 0
    assert bench.metric("kv_pages", "leased") == 3


def test_a_stage_that_fails_ends_what_settles() -> None:
    bench = connected()
    order = reserved(bench)
    came(bench, order, 8)
    bench.do(Abort(rid="a", error=LOST))
    bench.do(StageFailed(stage=0, message="x"))
    assert bench.error() == LOST
    assert bench.ended() == 1
    assert bench.scheduler.idle


def test_pages_that_the_prefill_server_writes_itself_wait_for_its_word() -> None:
    bench, order = direct()
    came(bench, order, 8)
    error = replace(LOST, code="stage_failed", status=503)
    effects = bench.do(TicketFailed(session="p2", ticket="t", generation=order.generation, error=error))
    assert none(effects, RequestFailed), "our own stage has to forget it"
    only(bench.forgotten(order.request), RequestFailed)
    assert moved(bench, "p").cached_tokens == 8


def test_pages_that_may_be_written_for_ever_hold_nobody_up_and_are_never_kept() -> None:
    bench, order = direct()
    came(bench, order, 8)
    assert none(bench.do(PrefillDown(name="p", session="p2", reason="silent")), RequestFailed)
    bench.forgotten(order.request)
    only(bench.wait(KEEP_S + 0.01), RequestFailed)
    assert bench.metric("kv_pages", "leased") == 3, "in quarantine"
    bench.do(SessionClosed(stage=0, session="p2"))
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 0


def test_pages_are_kept_once_the_right_to_write_was_taken_back() -> None:
    bench, order = direct()
    came(bench, order, 8)
    bench.do(PrefillDown(name="p", session="p2", reason="gone"))
    bench.forgotten(order.request)
    only(bench.do(SessionClosed(stage=0, session="p2")), RequestFailed)
    assert bench.metric("kv_pages", "cached") + bench.metric("kv_pages", "leased") == 2


def test_a_second_server_goes_on_from_what_has_come_for_a_prompt_whose_first_one_goes_on() -> None:
    bench = connected()
    first = reserved(bench)
    came(bench, first, 8)
    reserved(bench, "q", "b", follows="a")
    second = bench.last(PrepareReceive)
    assert (second.start, second.count, bench.metric("resumed_tokens_total")) == (8, 2, 8)
    finish(bench, first)
    assert bench.ended("a") == 1
    bench.abort("b")
    bench.forgotten(second.request)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 2


def test_and_if_neither_has_a_first_token_nothing_stays() -> None:
    bench = connected()
    first = reserved(bench)
    came(bench, first, 8)
    second = reserved(bench, "q", "b", follows="a")
    for rid, order in (("b", second), ("a", first)):
        bench.abort(rid)
        bench.forgotten(order.request)
    bench.assert_empty()
    assert bench.metric("kv_pages", "cached") == 0


def test_pages_that_the_first_server_writes_itself_are_left_to_it() -> None:
    bench, order = direct()
    came(bench, order, 8)
    bench.submit("b", TOKENS, route=FetchFrom("p", "u"), follows="a")
    assert bench.last(PrepareReceive).start == 0


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    bench = connected(prefix_cache=False)
    order = reserved(bench)
    came(bench, order, 8)
    failed(bench, order)
    assert bench.ended() == 1
    bench.assert_empty()


def test_a_page_size_of_one_keeps_all_but_the_last_token() -> None:
    assert PAGE == 4
    bench = connected()
    order = reserved(bench)
    came(bench, order, TOKENS)
    failed(bench, order)
    assert moved(bench).cached_tokens == 8
