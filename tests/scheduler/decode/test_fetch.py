"""Requests whose KV is fetched from a prefill server."""

import math

import pytest
from msgspec.structs import replace

from headrace.core.messages.frontend import RemovePrefill
from headrace.core.messages.orders import (
    CancelReceive,
    CloseSession,
    Forward,
    OpenSession,
    PrepareReceive,
    ReleaseRequest,
)
from headrace.core.messages.peers import (
    AskCancel,
    AskReserve,
    ConnectPrefill,
    DisconnectPrefill,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.replies import PrefillState, RequestFailed, RequestFinished, Reserved, Tokens
from headrace.core.messages.stage_events import ChunkReceived, KvReceived, ReceiveCancelled, ReceiveFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import FetchFrom, FirstToken, TokenLogprob
from tests.scheduler.bench import Bench, geometry, ids, none, only


def connected(**changes: float) -> Bench:
    bench = Bench(True, **changes)
    bench.prefill_up()
    return bench


def fetch(bench: Bench, rid: str = "a", tokens: int = 10, ticket: str = "t", **fields: object) -> None:
    bench.submit(rid, tokens, route=FetchFrom("p", ticket), **fields)


def reserved(bench: Bench, **fields: object) -> PrepareReceive:
    fetch(bench, **fields)  # type: ignore[arg-type]
    expect = bench.last(PrepareReceive)
    for stage in range(bench.config.stages):
        bench.expecting(expect.request, stage)
    return expect


def arrive(bench: Bench, expect: PrepareReceive, token: int = 42, stage: int = 0) -> None:
    first = FirstToken(token, 10, 0, TokenLogprob(token, -0.5))
    bench.do(KvReceived(stage=stage, request=expect.request, first=first, bytes=100, chunks=2))


def test_every_stage_is_prepared_before_pages_are_reserved() -> None:
    bench = connected(stages=2)
    fetch(bench)
    expect = bench.one(PrepareReceive)
    assert (expect.session, expect.ticket, expect.start, expect.count) == ("p1", "t", 0, 10)
    assert len(ids(expect.pages)) == 3
    assert none(bench.expecting(expect.request, 0), AskReserve)
    assert none(bench.expecting(expect.request, 0), AskReserve)
    effects = bench.expecting(expect.request, 1)
    ask = only(effects, AskReserve).reservation
    assert (ask.generation, ask.pages, ask.row) == (expect.generation, expect.pages, expect.row)
    assert (ask.prompt_tokens, ask.cached_tokens) == (10, 0)
    assert only(effects, Reserved).rid == "a"


def test_decoding_goes_on_from_the_first_token() -> None:
    bench = connected(stages=2)
    expect = reserved(bench, max_tokens=3)
    bench.do(ChunkReceived(stage=0, request=expect.request))
    arrive(bench, expect, stage=0)
    assert bench.tokens() == []
    bench.now += 3
    arrive(bench, expect, stage=1)
    assert bench.tokens() == [42]
    forward = bench.plan()
    assert forward is not None
    row = forward.rows[0]
    assert (row.start, row.count, ids(row.tokens), row.generated) == (10, 1, [42], 1)
    assert ids(row.pages)[:3] == ids(expect.pages)
    bench.done(forward, 43)
    bench.compute(44)
    finished = bench.finished()
    assert bench.tokens() == [42, 43, 44]
    assert finished.timing.transfer_s == 3
    assert finished.timing.forward_s == 0
    assert (finished.handoff.bytes, finished.handoff.chunks, finished.handoff.pages) == (200, 4, 3)
    assert none(bench.seen, CancelReceive)
    bench.assert_empty()


@pytest.mark.parametrize("prepared", [1, 2])
def test_a_cancel_that_nobody_has_asked_for_fails_the_request_and_what_comes_after_it_changes_nothing(
    prepared: int,
) -> None:
    bench = connected(stages=2)
    fetch(bench)
    expect = bench.last(PrepareReceive)
    for stage in range(prepared):
        bench.expecting(expect.request, stage)
    bench.do(TicketCancelled(session="p1", ticket="t", generation=expect.generation))
    assert (bench.error().code, bench.error().status) == ("prefill_failed", 502)
    for stage in range(2):
        bench.expecting(expect.request, stage)
        arrive(bench, expect, stage)
    for stage in range(2):
        bench.do(ReceiveCancelled(stage=stage, request=expect.request))
    bench.assert_empty()


def test_cached_pages_are_not_fetched() -> None:
    bench = connected()
    arrive(bench, reserved(bench))
    bench.compute(43)
    bench.abort("a")
    expect = reserved(bench, rid="b", ticket="u")
    ask = bench.last(AskReserve).reservation
    assert (ask.cached_tokens, expect.start, expect.count, len(ids(expect.pages))) == (8, 8, 2, 1)


@pytest.mark.parametrize("cached_there", [0, 4, 9])
def test_usage_counts_tokens_that_were_computed_nowhere(cached_there: int) -> None:
    """Whatever is cached here: 8 tokens, for the second prompt."""
    bench = connected()
    arrive(bench, reserved(bench))
    bench.compute(43)
    bench.abort("a")
    expect = reserved(bench, rid="b", ticket="u", max_tokens=1)
    assert bench.last(AskReserve).reservation.cached_tokens == 8
    first = FirstToken(42, 10, cached_there, None)
    bench.do(KvReceived(stage=0, request=expect.request, first=first, bytes=100, chunks=1))
    assert bench.finished("b").usage.cached_tokens == cached_there


def test_generations_rise() -> None:
    bench = connected()
    generations = [reserved(bench, rid=f"r{n}", ticket=f"t{n}").generation for n in range(3)]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("up", [True, False])
def test_an_unknown_or_lost_prefill_server_is_a_503(up: bool) -> None:
    bench = Bench()
    if up:
        bench.prefill_up()
        bench.do(PrefillDown(name="p", session="p1", reason="silent"))
    fetch(bench)
    assert (bench.error().code, bench.error().status) == ("no_prefill", 503)


def test_fetches_wait_for_pages_and_rows() -> None:
    bench = connected(kv_pages=3, metadata_rows=1)
    first = reserved(bench)
    fetch(bench, "b", 10, "u")
    assert len(bench.all(PrepareReceive)) == 1
    bench.abort("a")
    assert len(bench.all(PrepareReceive)) == 1, "stages may still write"
    bench.forgotten(first.request)
    assert len(bench.all(PrepareReceive)) == 2


def test_an_abort_cancels_at_stages_and_prefill_server_and_waits_for_the_stages() -> None:
    bench = connected(stages=2)
    expect = reserved(bench)
    effects = bench.abort("a")
    only(effects, RequestFailed)
    only(effects, CancelReceive)
    assert only(effects, AskCancel).generation == expect.generation
    assert none(bench.forgotten(expect.request, 0), ReleaseRequest)
    only(bench.forgotten(expect.request, 1), ReleaseRequest)
    bench.do(TicketCancelled(session="p1", ticket="t", generation=expect.generation))
    bench.assert_empty()


def test_an_abort_before_the_reservation_sends_the_prefill_server_nothing() -> None:
    bench = connected()
    fetch(bench)
    expect = bench.one(PrepareReceive)
    effects = bench.abort("a")
    assert none(effects, AskCancel)
    assert none(bench.expecting(expect.request), AskReserve)
    bench.forgotten(expect.request)
    bench.assert_empty()


def test_a_failed_ticket_fails_with_its_own_error() -> None:
    bench = connected()
    expect = reserved(bench)
    error = ErrorInfo(code="prompt_too_long", message="m", status=400)
    stale = TicketFailed(session="p1", ticket="t", generation=expect.generation + 1, error=error)
    assert bench.do(stale) == []
    assert bench.metric("dropped_messages_total", "unknown_ticket") == 1
    effects = bench.do(TicketFailed(session="p1", ticket="t", generation=expect.generation, error=error))
    assert only(effects, RequestFailed).error == replace(error, at_prefill=True)
    assert none(effects, AskCancel), "it has ended there"
    bench.forgotten(expect.request)
    bench.assert_empty()


def test_a_finished_ticket_ends_the_request_with_its_token() -> None:
    bench = connected()
    expect = reserved(bench)
    first = FirstToken(9, 10, 4, None, "stop")
    effects = bench.do(TicketFinished(session="p1", ticket="t", generation=expect.generation, first=first))
    finished = only(effects, RequestFinished)
    assert (finished.reason, finished.usage.completion_tokens, finished.usage.cached_tokens) == ("stop", 1, 4)
    assert bench.tokens() == [9]
    bench.forgotten(expect.request)
    bench.assert_empty()


@pytest.mark.parametrize(
    "first",
    [
        FirstToken(1000, 10, 0),
        FirstToken(7, 10, 0, TokenLogprob(7, -0.5, (7, 1000), (-0.5, -1.0))),
        FirstToken(-1, 10, 0),
        FirstToken(7, 10, 0, TokenLogprob(7, -0.5, (7, -2), (-0.5, -1.0))),
        FirstToken(7, 10, 11),
        FirstToken(7, 10, -1),
        FirstToken(7, 11, 0),
        FirstToken(7, 9, 0),
        FirstToken(7, 10, 0, TokenLogprob(7, math.nan)),
        FirstToken(7, 10, 0, TokenLogprob(7, -0.5, (7, 8), (-0.5, -math.inf))),
        FirstToken(7, 10, 0, None, "tired"),
    ],
)
def test_metadata_that_cannot_be_of_the_request_fails_it(first: FirstToken) -> None:
    bench = connected()
    expect = reserved(bench)
    effects = bench.do(KvReceived(stage=0, request=expect.request, first=first, bytes=1, chunks=1))
    assert only(effects, RequestFailed).error.code == "bad_metadata"
    bench.forgotten(expect.request)
    other = reserved(bench, rid="b", ticket="u")
    first = replace(first, finish_reason=first.finish_reason or "stop")
    effects = bench.do(TicketFinished(session="p1", ticket="u", generation=other.generation, first=first))
    assert (only(effects, RequestFailed).error.code, only(effects, RequestFailed).error.status) == ("bad_metadata", 502)
    bench.forgotten(other.request)
    assert bench.tokens() == bench.tokens("b") == []
    bench.assert_empty()


def test_a_finished_ticket_whose_request_goes_on_fails_it() -> None:
    """No KV has come: tokens would be decoded from pages that were never written."""
    bench = connected()
    expect = reserved(bench, max_tokens=8)
    first = FirstToken(9, 10, 4)
    effects = bench.do(TicketFinished(session="p1", ticket="t", generation=expect.generation, first=first))
    assert (only(effects, RequestFailed).error.code, only(effects, RequestFailed).error.status) == ("bad_metadata", 502)
    assert none(effects, AskCancel), "the ticket has ended there"
    assert bench.plan() is None
    assert bench.tokens() == []
    bench.forgotten(expect.request)
    bench.assert_empty()


def test_logprobs_are_those_that_were_asked_for() -> None:
    bench = connected()
    first = FirstToken(7, 10, 0, TokenLogprob(7, -0.5, (7,), (-0.5,)))
    for rid, asked, sent, shown in (
        ("a", None, first, ()),
        ("b", 1, first, (first.logprob,)),
        ("c", 1, replace(first, logprob=None), None),
    ):
        expect = reserved(bench, rid=rid, ticket=rid, logprobs=asked, max_tokens=1)
        bench.do(KvReceived(stage=0, request=expect.request, first=sent, bytes=1, chunks=1))
        if shown is None:
            assert (bench.error(rid).code, "logprob" in bench.error(rid).message) == ("bad_metadata", True)
        else:
            assert bench.last(Tokens).logprobs == shown


@pytest.mark.parametrize(("silent", "status"), [(False, 502), (True, 504)])
def test_a_lost_prefill_server_fails_the_requests_it_has_not_delivered(silent: bool, status: int) -> None:
    bench = connected(metadata_rows=2)
    for number in range(3):
        reserved(bench, rid=f"r{number}", ticket=f"t{number}")
    arrive(bench, bench.all(PrepareReceive)[0])
    effects = bench.do(PrefillDown(name="p", session="p1", reason="silent", silent=silent))
    assert bench.ended("r0") == 0, "its KV is here"
    assert (bench.error("r1").code, bench.error("r1").status) == ("peer_gone", status)
    assert (bench.error("r2").code, bench.error("r2").status) == ("no_prefill", 503)
    only(effects, CloseSession)
    assert only(effects, PrefillState) == PrefillState(name="p", up=False, reason="silent")
    assert none(effects, AskCancel)


def test_a_fetch_does_not_time_out_while_the_prompt_is_queued() -> None:
    bench = connected(transfer_timeout_s=1.0, bootstrap_timeout_s=1.0)
    reserved(bench)
    bench.wait(1000)
    assert bench.ended() == 0


def test_the_deadline_of_the_client_ends_a_fetch() -> None:
    bench = connected()
    expect = reserved(bench, deadline_s=5.0)
    effects = bench.wait(6)
    assert only(effects, RequestFailed).error.code == "deadline_exceeded"
    only(effects, AskCancel)
    bench.forgotten(expect.request)
    bench.assert_empty()


def test_bad_kv_fails_before_a_token_is_used() -> None:
    bench = connected()
    expect = reserved(bench)
    effects = bench.do(ReceiveFailed(stage=0, request=expect.request, code="checksum_mismatch", message="m"))
    assert (bench.error().code, bench.error().status) == ("checksum_mismatch", 502)
    only(effects, AskCancel)
    arrive(bench, expect)
    assert bench.tokens() == []
    bench.forgotten(expect.request)
    bench.assert_empty()


def test_sessions_are_opened_replaced_and_closed() -> None:
    bench = Bench()
    effects = bench.prefill_up()
    bench.one(ConnectPrefill)
    assert only(effects, OpenSession).terms.endpoints == ("tcp://x:2",)
    assert only(effects, PrefillState).up
    reserved(bench)
    up = PrefillUp(
        name="p", terms=PrefillTerms(session="p2", endpoints=("e",), geometries=(geometry(),), window_bytes=1)
    )
    effects = bench.do(up)
    assert only(effects, CloseSession).session == "p1"
    assert bench.error().code == "peer_gone", "the session it was promised under is over"
    assert bench.do(PrefillDown(name="p", session="p1", reason="")) == [], "that one has ended already"
    effects = bench.do(RemovePrefill(name="p"))
    only(effects, DisconnectPrefill)
    assert only(effects, CloseSession).session == "p2"
    assert bench.metric("prefill_servers") == 0


def test_a_fetch_goes_through_while_a_plan_is_full() -> None:
    bench = connected(pipeline_depth=0)
    bench.submit("busy", 100)
    assert isinstance(bench.plan(), Forward)
    fetch(bench)
    bench.one(PrepareReceive)
