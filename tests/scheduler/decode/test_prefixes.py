"""Prefixes that are fetched into the prefix cache, or handed over from one: nothing is computed, nothing decoded."""

from msgspec.structs import replace

from headrace.core.messages.frontend import Drain, QueryPrefix
from headrace.core.messages.orders import Forward, PrepareReceive, ReleaseRequest, SendChunk
from headrace.core.messages.peers import (
    AskCancel,
    AskReserve,
    PeerGone,
    PeerJoined,
    PeerReserved,
    PrefillDown,
    TellFailed,
    TellFinished,
)
from headrace.core.messages.replies import PrefixReply
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.kv_hints import Retain
from headrace.core.types.requests.request import PREFIX, DecodeHere, Discard, FetchFrom, FirstToken, SendTo
from headrace.core.types.requests.reservation import Reservation
from tests.scheduler.bench import Bench, geometry, ids, none, only

PREFIX_ROUTE = FetchFrom("p", "t", prefix=True)
CACHED = SendTo("t", cached=True)


def connected(**changes: object) -> Bench:
    bench = Bench(True, **changes)
    bench.prefill_up()
    return bench


def fetching(bench: Bench, tokens: int) -> PrepareReceive:
    bench.submit(tokens=tokens, route=PREFIX_ROUTE)
    prepare = bench.last(PrepareReceive)
    bench.expecting(prepare.request)
    return prepare


def fetched(bench: Bench, tokens: int = 8, first: FirstToken | None = None) -> PrepareReceive:
    prepare = fetching(bench, tokens)
    row = first or FirstToken(0, tokens, tokens, finish_reason=PREFIX)
    bench.do(KvReceived(stage=0, request=prepare.request, first=row, bytes=100, chunks=1))
    return prepare


def cached(bench: Bench, tokens: int = 13) -> None:
    """The pages of a prompt are in the prefix cache."""
    bench.submit("before", tokens, route=Discard())
    bench.compute(5)


def test_a_prefix_that_has_come_is_cached_and_nothing_is_decoded() -> None:
    bench = connected()
    fetched(bench)
    assert bench.finished().reason == "fetched"
    assert bench.tokens() == []
    assert bench.plan() is None
    bench.assert_empty()
    bench.submit("b", 10, route=DecodeHere(), max_tokens=1)
    assert bench.plan() is not None
    assert bench.one(Forward).rows[0].start == 8


def test_only_what_is_not_cached_is_fetched() -> None:
    bench = connected()
    cached(bench, 5)
    prepare = fetched(bench, 12)
    assert (prepare.start, prepare.count) == (4, 8)
    assert bench.one(AskReserve).reservation.cached_tokens == 4


def test_a_prefix_that_is_cached_is_not_fetched() -> None:
    bench = connected()
    cached(bench, 13)
    bench.submit(tokens=12, route=PREFIX_ROUTE)
    assert bench.finished().reason == "fetched"
    assert bench.all(PrepareReceive) == []
    bench.assert_empty()


def test_a_server_that_has_computed_is_not_believed() -> None:
    bench = connected()
    fetched(bench, first=FirstToken(7, 8, 8))
    assert bench.error().code == "bad_metadata"
    assert bench.scheduler.cached_tokens(pack(range(9))) == 0


def test_a_request_with_a_first_token_takes_no_row_without() -> None:
    bench = connected()
    bench.submit(tokens=8, route=FetchFrom("p", "t"))
    prepare = bench.last(PrepareReceive)
    bench.expecting(prepare.request)
    row = FirstToken(0, 8, 8, finish_reason=PREFIX)
    bench.do(KvReceived(stage=0, request=prepare.request, first=row, bytes=100, chunks=1))
    assert bench.error().code == "bad_metadata"


def test_cached_pages_are_handed_over_without_a_plan() -> None:
    bench = Bench(True)
    cached(bench)
    bench.join()
    bench.reserve(tokens=12)
    bench.submit(tokens=12, route=CACHED)
    assert bench.plan() is None
    send = bench.one(SendChunk)
    assert send.last == FirstToken(0, 12, 12, finish_reason=PREFIX)
    assert len(ids(send.pages)) == 3
    effects = bench.ack(send)
    only(effects, TellFinished)
    only(effects, ReleaseRequest)
    assert bench.finished().usage.cached_tokens == 12
    bench.assert_empty()


def test_cached_pages_wait_for_their_peer_and_not_longer_than_prompts() -> None:
    bench = Bench(True, bootstrap_timeout_s=5.0)
    cached(bench)
    bench.submit(tokens=12, route=CACHED)
    assert bench.metric("kv_pages", "leased") == 3
    bench.join()
    bench.reserve(tokens=12, cached=4)
    assert bench.one(SendChunk).start == 4
    bench.ack(bench.one(SendChunk))
    bench.submit("late", tokens=12, route=replace(CACHED, ticket="u"))
    bench.wait(5.1)
    assert bench.error("late").code == "no_peer"
    bench.assert_empty()


def test_what_is_not_wholly_cached_is_refused_with_how_much_is() -> None:
    bench = Bench(True)
    cached(bench)
    bench.join()
    bench.reserve(tokens=16)
    effects = bench.submit(tokens=16, route=CACHED)
    assert bench.error().code == "not_cached"
    assert bench.error().message == "the prefix cache has 12 of the 16 tokens"
    assert only(effects, TellFailed).error.code == "not_cached"
    assert none(bench.seen, SendChunk)
    bench.assert_empty()


def test_a_lost_peer_gives_the_pages_back() -> None:
    bench = Bench(True)
    cached(bench)
    bench.join()
    bench.submit(tokens=12, route=CACHED)
    bench.reserve(tokens=12)
    send = bench.one(SendChunk)
    bench.do(PeerGone(session="s", reason="lost"))
    assert bench.error().code == "peer_gone"
    bench.quiet(send.request)
    bench.assert_empty()


def test_what_is_handed_over_gives_way_to_a_request_that_needs_its_pages() -> None:
    bench = Bench(True, kv_pages=8, hold_percent=100)
    cached(bench, 21)
    bench.join()
    bench.submit(tokens=20, route=CACHED)
    bench.submit("b", tokens=list(range(500, 520)), route=Discard())
    assert bench.plan() is not None
    assert bench.error().code == "pages_needed"
    assert bench.metric("kv_pages", "leased") == 5


def test_a_prefix_on_its_way_gives_way_to_a_request_that_decodes() -> None:
    bench = connected(kv_pages=8)
    bench.submit("b", tokens=list(range(500, 512)), route=DecodeHere(), max_tokens=20)
    bench.compute(1)
    prepare = fetching(bench, 20)
    for token in range(2, 7):
        forward = bench.plan()
        if forward is None:
            break
        bench.done(forward, token)
    assert bench.error().code == "pages_needed"
    assert bench.metric("preemptions_total") == 0
    bench.forgotten(prepare.request)
    bench.compute(*range(10, 40))
    assert bench.finished("b").reason == "length"
    bench.assert_empty()


def test_a_prefix_without_pages_waits_for_none() -> None:
    bench = connected(kv_pages=8)
    bench.submit("b", tokens=30, route=DecodeHere(), max_tokens=2)
    assert bench.plan() is not None
    bench.submit(tokens=8, route=PREFIX_ROUTE)
    assert bench.error().code == "pages_needed"


def test_a_prefix_gives_its_metadata_row_to_a_request() -> None:
    bench = connected(metadata_rows=1)
    prepare = fetching(bench, 8)
    bench.submit("b", tokens=list(range(500, 508)), route=FetchFrom("p", "u"))
    assert bench.error().code == "pages_needed"
    assert bench.last(PrepareReceive) == prepare
    bench.forgotten(prepare.request)
    assert bench.last(PrepareReceive).request != prepare.request


def test_a_prefix_without_a_metadata_row_waits_for_none() -> None:
    bench = connected(metadata_rows=1)
    bench.submit("b", tokens=8, route=FetchFrom("p", "u"))
    bench.submit(tokens=list(range(500, 508)), route=PREFIX_ROUTE)
    assert bench.error().code == "pages_needed"


AHEAD = replace(PREFIX_ROUTE, spare=True)  # before it is needed


def test_a_prefix_ahead_of_its_turn_takes_what_its_tenant_may_retain() -> None:
    bench = connected(retain_percent=10)  # six pages
    bench.submit("a", tokens=28, route=AHEAD)
    assert bench.error("a").code == "pages_needed"
    bench.submit("b", tokens=16, route=AHEAD, tenant="t")
    bench.submit("c", tokens=list(range(500, 512)), route=replace(AHEAD, ticket="c"), tenant="t")
    assert bench.error("c").code == "pages_needed"
    bench.submit("d", tokens=list(range(600, 624)), route=replace(AHEAD, ticket="d"), tenant="u")
    assert bench.metric("kv_pages", "leased") == 10
    bench.do(PrefillDown(name="p", session="p1", reason="lost"))
    for rid in ("b", "d"):
        assert bench.error(rid).status == 502
    for prepare in bench.all(PrepareReceive):
        bench.forgotten(prepare.request)
    bench.assert_empty()
    bench.prefill_up("p2")
    bench.submit("e", tokens=24, route=replace(AHEAD, ticket="e"), tenant="t")
    assert bench.metric("kv_pages", "leased") == 6, "what had not come has left its room"


def test_a_prefix_ahead_of_its_turn_takes_no_page_that_is_retained() -> None:
    for route, granted in ((AHEAD, False), (PREFIX_ROUTE, True)):
        bench = connected(kv_pages=8, retain_percent=50)
        bench.submit("before", 16, route=Discard(), retain=Retain(seconds=60.0), tenant="other")
        bench.compute(5)
        bench.submit("b", tokens=list(range(500, 512)), route=DecodeHere(), max_tokens=2)
        bench.plan()
        bench.submit(tokens=list(range(600, 608)), route=route)
        assert bool(bench.all(PrepareReceive)) == granted
        assert bench.metric("retained_pages") == (3 if granted else 4)


def test_a_drain_ends_what_only_moves() -> None:
    bench = Bench(True)
    cached(bench)
    bench.submit(tokens=12, route=CACHED)
    bench.do(Drain())
    assert bench.error().code == "draining"
    bench.assert_empty()


def test_a_ticket_is_given_back_when_the_prefix_has_come_otherwise() -> None:
    bench = connected()
    cached(bench)
    bench.submit(tokens=12, route=replace(PREFIX_ROUTE, posting="external"))
    assert bench.finished().reason == "fetched"
    assert bench.one(AskCancel).ticket == "t"


def test_tokens_that_are_not_those_that_were_offered() -> None:
    bench = Bench(True)
    cached(bench)
    bench.join()
    bench.submit(tokens=12, route=CACHED)
    other = Reservation(
        ticket="t",
        generation=1,
        prompt_tokens=12,
        cached_tokens=0,
        pages=pack(range(500, 503)),
        row=7,
        prompt_hash=prompt_hash(pack(range(1, 13))),
    )
    bench.do(PeerReserved(session="s", reservation=other))
    assert none(bench.seen, SendChunk)
    assert bench.one(TellFailed).error.code == bench.error().code == "bad_reservation"


def test_hosts_of_open_sessions_are_known() -> None:
    bench = Bench(True)
    terms = PeerTerms(session="s", geometries=(geometry(),), window_bytes=1 << 20)
    bench.do(PeerJoined(name="d", terms=terms, host="127.0.0.1"))

    def known(host: str) -> bool:
        return only(bench.do(QueryPrefix(token=1, prompt=pack(range(8)), host=host)), PrefixReply).has_peer

    assert (known("127.0.0.1"), known("127.0.0.2"), known("")) == (True, False, False)
    bench.do(PeerGone(session="s", reason="lost"))
    assert not known("127.0.0.1")
