"""Prefixes that are handed over from tiers: loaded as for a prompt, and never at the cost of requests."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.frontend import Drain, QueryPrefix
from headrace.core.messages.orders import Forward, LoadPages, SendChunk
from headrace.core.messages.peers import PeerGone, TellFailed, TellFinished
from headrace.core.messages.replies import PrefixReply
from headrace.core.messages.stage_events import StageFailed
from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import PREFIX, DecodeHere, Discard, FirstToken, SendTo
from tests.scheduler.bench import ids, none, only
from tests.scheduler.tier_bench import FIRST, SECOND, TierBench

CACHED = SendTo("t", cached=True)


def displaced(**changes: object) -> TierBench:
    """One page of FIRST is in the pool and two in the host tier."""
    bench = TierBench(**changes)  # type: ignore[arg-type]
    bench.displace()
    bench.join()
    return bench


def asked(bench: TierBench, tokens: list[int] = FIRST, reserve: bool = True) -> LoadPages:
    """A peer asks for a prefix, whose pages are being loaded."""
    if reserve:
        bench.reserve(tokens=len(tokens))
    bench.submit(tokens=tokens, route=CACHED)
    return bench.loading()


def reply(bench: TierBench, tokens: list[int]) -> PrefixReply:
    return only(bench.do(QueryPrefix(token=1, prompt=pack(tokens))), PrefixReply)


def test_what_is_in_the_host_tier_is_loaded_and_sent() -> None:
    bench = displaced(stages=2)
    plans = len(bench.all(Forward))
    load = asked(bench)
    bench.loaded(load, stage=0)
    assert none(bench.seen, SendChunk)
    bench.loaded(load, stage=1)
    send = bench.one(SendChunk)
    row = FirstToken(0, 12, 12, finish_reason=PREFIX, from_tiers=TierTokens(host=8))
    assert (send.last, len(ids(send.pages))) == (row, 3)
    assert set(ids(load.pages)) < set(ids(send.pages))
    bench.ack(send, stage=0)
    only(bench.ack(send, stage=1), TellFinished)
    usage = bench.finished().usage
    assert (usage.cached_tokens, usage.from_tiers) == (12, TierTokens(host=8))
    assert len(bench.all(Forward)) == plans
    bench.assert_empty()


def test_a_peer_may_reserve_after_the_pages_were_loaded() -> None:
    bench = displaced()
    bench.loaded(asked(bench, reserve=False))
    assert none(bench.seen, SendChunk)
    bench.reserve(tokens=12)
    bench.ack(bench.one(SendChunk))
    assert bench.finished().usage.cached_tokens == 12
    bench.assert_empty()


def test_a_prefix_that_another_request_is_loading_waits_for_that() -> None:
    bench = displaced()
    load = bench.load_first()
    bench.reserve(tokens=12)
    bench.submit(tokens=FIRST, route=CACHED)
    assert none(bench.seen, SendChunk)
    bench.loaded(load)
    bench.ack(bench.one(SendChunk))
    assert bench.finished().usage.from_tiers == TierTokens(host=8)


def test_the_answer_counts_what_tiers_hold_and_predicts_the_loading() -> None:
    bench = displaced()
    found = reply(bench, [*FIRST, 1])
    assert (found.pool.cached, found.pool.in_tiers, found.pool.held) == (4, TierTokens(host=8), 12)
    assert found.load_s == 0.0, "nothing was loaded yet"
    load = bench.load_first()
    bench.wait(0.5)
    bench.loaded(load)
    assert reply(bench, FIRST).pool.in_tiers == TierTokens()
    gone = reply(bench, SECOND)
    pages = gone.pool.in_tiers.host // 4
    assert pages > 0
    assert gone.load_s == pytest.approx(pages * 0.25), "two pages took half a second"


def test_no_more_is_counted_than_may_be_loaded_at_a_time() -> None:
    bench = TierBench(hold_percent=100)
    bench.run("long", SECOND)  # seven pages
    for number in range(3):
        bench.submit(f"{number}", [500 + 40 * number + index for index in range(28)], max_tokens=1)
        bench.done(bench.planned(), 1)
    found = reply(bench, SECOND).pool
    assert (found.cached, found.in_tiers) == (0, TierTokens(host=16))
    bench.submit(tokens=SECOND, route=CACHED)
    assert bench.error().message == "the prefix cache has 16 of the 28 tokens"


def test_a_page_that_cannot_be_loaded_shortens_what_is_there() -> None:
    bench = displaced()
    load = asked(bench)
    effects = bench.loaded(load, failed=(0,))
    assert (bench.error().code, bench.error().status) == ("not_cached", 412)
    assert bench.error().message == "the prefix cache has 4 of the 12 tokens"
    assert only(effects, TellFailed).error.code == "not_cached"
    assert none(bench.seen, SendChunk)
    assert reply(bench, FIRST).pool.held == 4
    bench.reserve("u", tokens=4)
    bench.submit("again", tokens=FIRST[:4], route=replace(CACHED, ticket="u"))
    bench.ack(bench.one(SendChunk))
    assert bench.finished("again").usage.cached_tokens == 4
    bench.assert_empty()


def test_without_room_it_is_refused_at_once() -> None:
    bench = displaced()
    bench.submit("busy", [*SECOND, 7], route=DecodeHere(), max_tokens=4)
    bench.done(bench.planned(), 1)
    bench.reserve(tokens=12)
    bench.submit(tokens=FIRST, route=CACHED)
    while not bench.ended():
        bench.store_all()
    assert (bench.error().code, bench.error().status) == ("pages_needed", 503)
    assert bench.one(TellFailed).error.code == "pages_needed"
    bench.compute(2, 3, 4)
    assert bench.tokens("busy") == [1, 2, 3, 4]


def test_pages_that_the_oldest_prompt_waits_for_are_not_taken() -> None:
    bench = displaced(policy="slo")
    bench.submit("busy", list(range(400, 416)), route=DecodeHere(), max_tokens=2)
    forward = bench.planned()
    bench.submit("waits", list(range(600, 619)), route=Discard())
    bench.submit(tokens=FIRST, route=CACHED)
    assert bench.error().code == "pages_needed"
    bench.done(forward, 1)


def test_while_it_is_loaded_it_gives_way_to_a_request_that_decodes() -> None:
    bench = displaced()
    bench.submit("busy", list(range(400, 420)), route=DecodeHere(), max_tokens=8)
    bench.done(bench.planned(), 1)
    load = asked(bench)
    held = bench.metric("kv_pages", "leased")
    assert held == 5 + 3, "all of the pool"
    assert bench.plan() is None, "it waits for the pages to be loaded, and preempts nothing"
    assert bench.error().code == "pages_needed"
    bench.loaded(load)
    bench.compute(*range(2, 9))
    assert bench.tokens("busy") == list(range(1, 9))
    assert bench.metric("preemptions_total") == 0
    bench.assert_empty()


def test_while_it_is_loaded_it_gives_way_before_a_prompt_whose_peer_has_not_come() -> None:
    bench = displaced(optimistic_start=True, hold_percent=100)
    bench.submit("early", list(range(400, 410)), route=SendTo("early"), max_tokens=2)
    bench.done(bench.planned(), 1)
    load = asked(bench)
    bench.submit("needs", list(range(600, 619)), route=Discard())
    assert bench.plan() is None
    assert bench.error().code == "pages_needed"
    bench.loaded(load)
    bench.done(bench.planned(), 1)
    assert bench.finished("needs").reason == "discarded"
    assert bench.metric("preemptions_total") == 0


@pytest.mark.parametrize("waiting", [True, False])
def test_a_peer_that_is_lost_or_a_client_that_goes_gives_the_pages_back(waiting: bool) -> None:
    for leave in ("cancel", "lost"):
        bench = displaced()
        bench.reserve(tokens=12)
        bench.submit(tokens=FIRST, route=CACHED)
        load = None if waiting else bench.loading()
        if leave == "cancel":
            bench.abort()
        else:
            bench.do(PeerGone(session="s", reason="lost"))
        assert bench.error().code == ("cancelled" if leave == "cancel" else "peer_gone")
        if load is not None:
            bench.loaded(load)
        else:
            bench.store_all()
        assert none(bench.seen, SendChunk)
        bench.assert_empty()


def test_a_drain_and_a_stage_that_fails_end_it() -> None:
    bench = displaced()
    asked(bench)
    bench.do(Drain())
    assert bench.error().code == "draining"
    bench = displaced()
    asked(bench)
    bench.do(StageFailed(stage=0, message="died"))
    assert bench.error().code == "stage_failed"
    assert bench.scheduler.idle
