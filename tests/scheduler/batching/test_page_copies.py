"""Copies of pages between pool and tiers: the orders, their answers from several stages, and what requests wait for."""

from headrace.core.messages.kv_events import BlockRemoved, BlockStored
from headrace.core.messages.orders import DropPages, Forward, LoadPages, Order, SendChunk, StorePages
from headrace.core.messages.stage_events import (
    PagesLost,
    StageFailed,
)
from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.requests.request import SendTo
from tests.scheduler.bench import PAGE, ids, only
from tests.scheduler.tier_bench import FIRST, SECOND, TierBench


def test_pages_leave_for_the_host_tier_before_others_take_their_place() -> None:
    bench = TierBench()
    bench.run("first", FIRST)
    bench.submit("second", SECOND, max_tokens=1)
    assert bench.plan() is None
    store = bench.one(StorePages)
    assert (store.tier, len(ids(store.sources)), store.headers) == ("host", 2, ())
    bench.stored(store)
    forward = bench.plan()
    assert forward is not None
    assert set(ids(store.sources)) < set(ids(forward.rows[0].pages))


def test_a_prompt_is_planned_behind_pages_that_every_stage_has_loaded() -> None:
    bench = TierBench(stages=2)
    bench.displace()
    load = bench.load_first()
    assert bench.loaded(load, stage=1)[:0] == []
    assert bench.plan() is None, "stage 0 has not answered"
    bench.loaded(load, stage=0)
    forward = bench.plan()
    assert forward is not None
    assert forward.rows[0].start == 12
    assert bench.metric("kv_tier_hit_tokens_total", "host") == 4 * len(ids(load.slots))
    dropped = ids(bench.last(DropPages).slots)
    assert dropped == ids(load.slots), "a page is in the pool or in the host tier"
    bench.done(forward, 7)
    usage = bench.finished("again").usage
    assert (usage.cached_tokens, usage.from_tiers) == (12, TierTokens(host=8)), "a page had stayed in the pool"


def test_a_load_that_fails_on_one_stage_is_computed() -> None:
    bench = TierBench(stages=2)
    bench.displace()
    load = bench.load_first()
    bench.loaded(load, stage=0)
    bench.loaded(load, failed=(0,), stage=1)
    bench.compute(7)
    assert bench.tokens("again") == [7]
    start = next(row.start for row in bench.last(Forward).rows)
    assert start == 4, "the first page had stayed in the pool"
    usage = bench.finished("again").usage
    assert (usage.cached_tokens, usage.from_tiers) == (4, TierTokens())
    assert bench.metric("kv_tier_pages_total", "host", "load_failed") == 1


def test_a_load_that_fails_after_a_peer_has_reserved_leaves_one_metadata_row_to_take() -> None:
    """The only one is another request's until then."""
    bench = TierBench(optimistic_start=True, metadata_rows=1)
    bench.join()
    bench.submit("other", 3, route=SendTo("other"), max_tokens=2)
    bench.reserve("other", 3)
    bench.compute(7)
    (send,) = bench.all(SendChunk)
    bench.displace()
    load = bench.load_first(route=SendTo("again"), max_tokens=2)
    bench.reserve("again", len(FIRST) + 2)
    bench.loaded(load, failed=(0,))
    assert bench.plan() is None, "no row is free"
    bench.ack(send)
    bench.compute(8)
    for late in bench.all(SendChunk)[1:]:
        bench.ack(late)
    assert bench.finished("again").reason == "handoff"
    bench.assert_empty()


def test_a_request_that_is_cancelled_leaves_its_load_to_end() -> None:
    bench = TierBench()
    bench.displace()
    load = bench.load_first()
    bench.abort("again")
    assert bench.scheduler.idle
    assert bench.metric("kv_pages", "leased") == len(ids(load.pages)), "bytes may still be written there"
    bench.loaded(load)
    bench.assert_empty()


def test_slots_are_dropped_before_they_are_stored_to_again() -> None:
    bench = TierBench(host=2)
    for number in range(6):
        bench.submit(str(number), [1000 * number % 997 + index for index in range(28)], max_tokens=1)
        while bench.plan() is None:
            bench.stored(bench.last(StorePages))
        bench.done(bench.last(Forward), 1)
    taken: set[int] = set()
    for order in (effect for effect in bench.seen if isinstance(effect, Order)):
        if isinstance(order, StorePages):
            assert not taken & set(ids(order.slots))
            taken |= set(ids(order.slots))
        elif isinstance(order, DropPages):
            taken -= set(ids(order.slots))
    assert bench.all(DropPages)


def test_a_copy_that_no_stage_answers_fails_the_stage() -> None:
    bench = TierBench(stages=2)
    bench.run("first", FIRST)
    bench.submit("second", SECOND, max_tokens=1)
    bench.plan()
    bench.stored(bench.one(StorePages), stage=0)
    bench.wait(bench.config.stage_timeout_s + 1)
    assert bench.error("second").message.startswith("stage 1 failed: no copy of KV pages has ended in")


def test_after_a_crash_late_answers_are_dropped_and_the_host_tier_is_empty() -> None:
    bench = TierBench()
    bench.displace()
    load = bench.load_first()
    bench.do(StageFailed(stage=0, message="killed"))
    bench.loaded(load)
    assert bench.metric("dropped_messages_total", "unknown_copy") == 1
    bench.up()
    assert bench.metric("kv_tier_pages", "host", "used") == 0


def test_nothing_is_written_to_disk_before_every_stage_has_said_what_is_there() -> None:
    bench = TierBench(host=0, disk=32, stages=2)
    bench.run("first", FIRST)
    assert not bench.all(StorePages)
    bench.found({}, stage=0)
    bench.found({}, stage=1)
    bench.run("more", [*FIRST, *range(8)])
    store = bench.one(StorePages)
    assert [header.parent for header in store.headers[1:]] == [header.digest for header in store.headers[:-1]]
    assert store.headers[0].parent == store.headers[0].salt


def test_a_restart_uses_what_is_on_the_disk_of_every_stage_and_drops_the_rest() -> None:
    bench = TierBench(host=0, disk=32)
    bench.found({})
    bench.run("first", FIRST)
    store = bench.one(StorePages)
    names = dict(zip(ids(store.slots), store.headers, strict=True))
    again = TierBench(host=0, disk=32, stages=2)
    again.found(names, stage=0)
    some = dict(list(names.items())[:2])
    effects = again.found(some, stage=1)
    assert ids(only(effects, DropPages).slots) == list(names)[2:]
    again.submit("a", [*FIRST, 5], max_tokens=1)
    assert again.plan() is None
    load = again.one(LoadPages)
    assert (load.tier, ids(load.slots)) == ("disk", list(some))
    for stage in (0, 1):
        again.loaded(load, stage=stage)
    forward = again.plan()
    assert forward is not None
    assert forward.rows[0].start == 8
    again.done(forward, 3)
    usage = again.finished("a").usage
    assert (usage.cached_tokens, usage.from_tiers) == (8, TierTokens(disk=8))


def test_lost_slots_are_not_loaded() -> None:
    bench = TierBench(host=0, disk=32)
    bench.found({})
    bench.run("first", FIRST)
    store = bench.one(StorePages)
    bench.stored(store)
    effects = bench.do(PagesLost(stage=0, tier="disk", slots=store.slots))
    assert sorted(ids(only(effects, DropPages).slots)) == sorted(ids(store.slots))


def test_the_daily_budget_of_writes_is_kept_and_refilled() -> None:
    bench = TierBench(host=0, disk=64, disk_write_gib_per_day=1)
    bench.found({})
    bench.run("first", FIRST)
    bench.stored(bench.one(StorePages), size=2 << 30)
    bench.run("second", list(range(300, 308)))
    assert len(bench.all(StorePages)) == 1, "the budget is used up"
    bench.wait(2 * 86_400)
    bench.run("third", list(range(400, 408)))
    bench.run("fourth", list(range(500, 508)))
    assert len(bench.all(StorePages)) > 1


def test_routers_are_told_of_copies_by_tier() -> None:
    bench = TierBench(kv_events=True)
    bench.displace()
    stored = [event for event in bench.all(BlockStored) if event.medium == "CPU"]
    removed = {name for event in bench.all(BlockRemoved) if event.medium == "GPU" for name in event.block_hashes}
    assert {name for event in stored for name in event.block_hashes} == removed
    load = bench.load_first()
    before = len(bench.all(BlockStored))
    bench.loaded(load)
    back = [event for event in bench.all(BlockStored)[before:] if event.medium == "GPU"]
    assert sum(len(event.block_hashes) for event in back) == len(ids(load.pages))
    assert all(len(event.token_ids) == PAGE * len(event.block_hashes) for event in back)
    assert any(event.medium == "CPU" for event in bench.all(BlockRemoved))


def hinted(bench: TierBench, action: str) -> tuple[float, float]:
    """How often an action was granted, and was not."""
    counts = [bench.metric("kv_hints_total", action, result) for result in ("granted", "refused")]
    return counts[0], counts[1]


def test_a_request_that_demotes_leaves_for_the_host_tier_when_its_pages_are_free() -> None:
    bench = TierBench()
    bench.submit("first", FIRST, max_tokens=2, demote=True)
    bench.submit("same", FIRST, max_tokens=8)
    bench.compute(1, 1, 2, 2)
    assert bench.finished("first").demoted == 0, "the other one uses them"
    assert (bench.all(StorePages), hinted(bench, "demote")) == ([], (0, 1))
    bench.abort("same")
    bench.compute()
    bench.submit("again", FIRST, max_tokens=1, demote=True)
    bench.compute(1)
    store = bench.one(StorePages)
    assert (store.tier, len(ids(store.sources))) == ("host", 3)
    assert (bench.finished("again").demoted, hinted(bench, "demote")) == (12, (1, 1))
    bench.stored(store)
    assert bench.metric("kv_pages", "cached") == 0
    assert bench.metric("kv_tier_pages", "host", "used") == 3


def test_a_request_that_fails_demotes_nothing() -> None:
    bench = TierBench()
    bench.submit("first", FIRST, max_tokens=8, demote=True)
    bench.done(bench.plan(), 1)  # type: ignore[arg-type]
    bench.abort("first")
    bench.compute()
    assert (bench.all(StorePages), hinted(bench, "demote")) == ([], (0, 0))


def test_without_a_tier_nothing_is_demoted() -> None:
    bench = TierBench(host=0)
    bench.submit("first", FIRST, max_tokens=1, demote=True)
    bench.compute(1)
    assert (bench.finished("first").demoted, hinted(bench, "demote")) == (0, (0, 1))


def test_pages_on_their_way_to_disk_are_let_go_of() -> None:
    for action in ("demote", "release"):
        bench = TierBench(disk=32)
        bench.found({})
        bench.run("other", SECOND[:12])
        bench.stored(bench.last(StorePages))
        bench.submit("first", FIRST, max_tokens=1, demote=action == "demote", let_go=action == "release")
        bench.compute(1)
        archive = bench.last(StorePages)
        assert archive.tier == "disk"
        assert hinted(bench, action) == (1, 0), "a copy is no use"
        bench.stored(archive)
        bench.submit("third", [1] * 20, max_tokens=1)
        bench.compute()
        store = bench.last(StorePages)
        assert set(ids(store.sources)) <= set(ids(archive.sources)), "they leave first"
