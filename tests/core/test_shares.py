"""Shares of what is limited, between owners of peers and between tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.orders import SendChunk
from headrace.core.messages.peers import PeerGone, TellFailed
from headrace.core.messages.replies import RequestFailed
from headrace.core.shares import Shares
from headrace.core.types.requests.request import Discard, SendTo
from tests.scheduler.bench import Bench, none, only

Takes = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), max_size=200)


@given(Takes)
def test_beyond_the_limit_everybody_has_no_more_than_an_equal_share(takes: list[tuple[str, int]]) -> None:
    shares, limit = Shares(), 60
    for owner, more in takes:
        if shares.admits(owner, more, limit):
            shares.add(owner, more)
        else:
            owners = len(shares._used.keys() | {owner})
            assert shares.used(owner) + more > limit // owners, "only those beyond their share are refused"
    harmonic = sum(1 / number for number in range(1, 7))
    assert shares.total <= limit * harmonic + 6 * 9


@given(Takes)
def test_something_is_left_for_those_that_come(takes: list[tuple[str, int]]) -> None:
    shares, limit = Shares(), 200
    for owner, more in takes:
        if shares.leaves_as_much(owner, more, limit):
            shares.add(owner, more)
    assert shares.total <= limit * 6 // 7 + 6 * 9


def early(bench: Bench, session: str, count: int, name: str = "") -> int:
    """Reserve tickets whose prompts do not come; returns how many were refused."""
    effects = [bench.reserve(f"{session}{name}{number}", session=session) for number in range(count)]
    return sum(not none(each, TellFailed) for each in effects)


@pytest.mark.parametrize("key", ["", "greedy"])
def test_early_reservations_of_four_sessions_leave_room_for_another_peer(key: str) -> None:
    bench = Bench(max_queued_requests=40)
    for number in range(4):
        bench.join(f"g{number}", key=key)
        assert early(bench, f"g{number}", 10) == 0, "while it is alone it may have all"
    bench.join("honest")
    assert early(bench, "honest", 8) == 0
    told = only(bench.reserve("one more", session="g0"), TellFailed)
    assert told.error.status == 429
    assert early(bench, "honest", 40, "-") > 0, "nor has the other peer more than its share"
    if key:
        bench.join("g5", key=key)
        assert early(bench, "g5", 1) == 1, "another session of the key has the same share"


def test_a_tenant_that_has_filled_the_queue_leaves_room_for_another() -> None:
    bench = Bench(max_queued_requests=8, max_queued_tokens=1000)
    for number in range(9):
        bench.submit(f"g{number}", route=Discard(), tenant="greedy", cache_salt=f"s{number}")
    assert bench.error("g8").code == "queue_full"
    for number in range(4):
        bench.submit(f"h{number}", route=Discard(), tenant="honest")
    bench.submit("h4", route=Discard(), tenant="honest")
    bench.submit("g9", route=Discard(), tenant="greedy")
    failed = [effect.rid for effect in bench.all(RequestFailed)]
    assert failed == ["g8", "h4", "g9"], "each has its share: four of eight"
    bench.submit("third", route=Discard(), tenant="third")
    assert bench.ended("third") == 0


def test_a_tenant_that_has_queued_many_tokens_leaves_room_for_another() -> None:
    bench = Bench(max_queued_tokens=100)
    for number in range(3):
        bench.submit(f"g{number}", 40, route=Discard(), tenant="greedy")
    assert bench.error("g2").code == "queue_full"
    bench.submit("h0", 120, route=Discard(), tenant="honest")
    assert bench.ended("h0") == 0, "the first prompt of a tenant, however long"
    bench.submit("h1", 1, route=Discard(), tenant="honest")
    assert bench.error("h1").code == "queue_full"


def test_without_names_of_keys_the_queue_is_one() -> None:
    bench = Bench(max_queued_requests=2)
    for number in range(3):
        bench.submit(f"r{number}", route=Discard(), cache_salt=f"salt {number}")
    assert bench.error("r2").code == "queue_full"


def test_pages_held_by_a_tenant_leave_room_for_another() -> None:
    bench = Bench(hold_percent=50, max_model_len=400)  # 32 of 64 pages, and 16 beyond
    for number in range(5):
        bench.submit(f"g{number}", 32, route=SendTo(f"g{number}", hold=True), tenant="greedy")
    assert bench.error("g4").status == 429
    for number in range(3):
        bench.submit(f"h{number}", 32, route=SendTo(f"h{number}", hold=True), tenant="honest")
    assert (bench.ended("h0"), bench.ended("h1"), bench.ended("h2")) == (0, 0, 1), "half of 32 pages"
    bench.submit("g5", 32, route=SendTo("g5", hold=True), tenant="greedy")
    assert bench.error("g5").status == 429


def sent(bench: Bench, rid: str, session: str, tokens: int = 16) -> None:
    """A prompt whose peer has reserved."""
    bench.reserve(rid, tokens, session=session)
    bench.submit(rid, tokens, route=SendTo(rid), max_tokens=4)


def test_a_peer_that_does_not_acknowledge_leaves_pages_for_another() -> None:
    bench = Bench(kv_pages=32)
    bench.join("slow")
    bench.join("other")
    for number in range(8):
        sent(bench, f"s{number}", "slow")
        bench.compute(7)
    computed = {send.ticket for send in bench.all(SendChunk)}
    assert computed == {"s0", "s1", "s2", "s3"}, "half of 32 pages, of four each"
    for number in range(2):
        sent(bench, f"o{number}", "other")
        bench.compute(7)
    assert {"o0", "o1"} <= {send.ticket for send in bench.all(SendChunk)}
    for send in bench.all(SendChunk):
        bench.ack(send)
    bench.compute(7, 7, 7, 7)
    assert "s4" in {send.ticket for send in bench.all(SendChunk)}, "what it has acknowledged, it may have again"


def test_a_peer_that_is_alone_may_have_all_pages_unacknowledged() -> None:
    bench = Bench(kv_pages=32)
    for session in ("one", "two"):
        bench.join(session, key="decode")
    for number in range(8):
        sent(bench, f"s{number}", ("one", "two")[number % 2])
        bench.compute(7)
    assert len({send.ticket for send in bench.all(SendChunk)}) == 8


def test_prompts_that_wait_for_acknowledgements_end_with_their_peer() -> None:
    bench = Bench(kv_pages=32)
    bench.join("slow")
    bench.join("other")
    for number in range(6):
        sent(bench, f"s{number}", "slow")
        bench.compute(7)
    bench.abort("s5")
    assert bench.error("s5").code == "cancelled"
    bench.do(PeerGone(session="slow", reason="lost"))
    assert bench.error("s4").code == "peer_gone"
    sent(bench, "o", "other")
    assert bench.plan() is not None
