"""Rooms one at a time: both orders of the two sides, aborts at every moment, what never ends, what does not fit."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.gateway.sglang_nixl.records import RoomLimits, StopWrites, WriteKv, WriteRow
from headrace.peer.commands import CancelLoad, LoadCancelled, LoadFailed, LoadKv, ReleaseLoad, RenewLease
from tests.gateway.sglang_nixl.room_bench import FIRST, LIMITS, PAGES, Bench, ended, only, told

DONE = [b"KV_STATUS", b"7", b"4", b"0", b""]
ACK = [b"ABORT_ACK", b"7", b"0", b"1"]


def failed(reason: str) -> list[bytes]:
    return [b"KV_STATUS", b"7", b"0", b"0", reason.encode()]


def loading(bench: Bench, **changes: Any) -> str:
    """A room up to its load; the load's name."""
    bench.register()
    bench.expect()
    bench.target(**changes)
    return only(LoadKv, bench.hold()).id


def test_the_decode_engine_comes_first() -> None:
    bench = Bench()
    assert bench.register() == ""
    assert bench.target(pages=PAGES) == []
    assert bench.expect() == []
    lease, load = bench.hold()
    assert isinstance(lease, RenewLease)
    assert isinstance(load, LoadKv)
    assert (lease.id, load.ticket.name, load.start, load.tokens, load.prompt_hash) == (
        load.id,
        "ticket-7",
        0,
        40,
        "hash",
    )
    write = only(WriteKv, bench.loaded(load.id, page=2))
    assert (write.first_page, write.tokens, write.ranks[0].target.pages) == (2, 40, (4, 5, 9))
    row = only(WriteRow, bench.written(load.id))
    assert (row.room, row.first_page, row.first, row.ranks[0].target.aux_index) == (7, 2, FIRST, 5)
    assert bench.table.next_deadline() == 30
    effects = bench.written(load.id)
    assert effects[0] == ReleaseLoad(id=load.id)
    assert (told(effects), ended(effects)) == ([(7001, DONE)], [("r", "", 200)])
    assert (len(bench.table), bench.table.next_deadline()) == (0, None)


def test_the_request_comes_first_and_the_lease_is_kept_until_the_engine_comes() -> None:
    bench = Bench()
    bench.expect()
    [lease] = bench.hold()
    assert isinstance(lease, RenewLease)
    bench.wait(299)
    bench.register()
    assert only(LoadKv, bench.target()).id == lease.id


def test_the_engine_has_a_part_of_the_prompt() -> None:
    bench = Bench()
    bench.register()
    bench.expect()
    bench.target(prefix=32, pages=[9])
    load = only(LoadKv, bench.hold())
    assert (load.start, load.tokens) == (32, 40)
    write = only(WriteKv, bench.loaded(load.id, start=32, page=6))
    assert (write.first_page, write.tokens) == (6, 8)


def test_the_engine_has_all_of_the_prompt_and_gets_the_first_token_alone() -> None:
    bench = Bench()
    bench.register()
    bench.expect()
    bench.target(tokens=32, prefix=32, pages=[])
    load = only(LoadKv, bench.hold(tokens=32))
    assert (load.start, load.tokens) == (31, 32), "the first token comes with a position at least"
    [row] = bench.loaded(load.id, start=31, tokens=32, page=3)
    assert isinstance(row, WriteRow)
    assert row.first_page == 3
    assert ended(bench.written(load.id)) == [("r", "", 200)]


def test_all_ranks_of_an_engine_have_to_come_and_all_are_told() -> None:
    bench = Bench()
    for rank in (0, 1):
        assert bench.register(agent=f"a{rank}", port=7001 + rank, tp_size=2, tp_rank=rank) == ""
    bench.expect()
    bench.hold()
    assert bench.target(agent="a1", port=7002, ranks=2, aux_index=8) == []
    load = only(LoadKv, bench.target(agent="a0", port=7001, ranks=2)).id
    heads = {one.rank.first_head: one.target.agent for one in only(WriteKv, bench.loaded(load)).ranks}
    assert heads == {0: "a0", 2: "a1"}
    bench.written(load)
    assert sorted(told(bench.written(load))) == [(7001, DONE), (7002, DONE)]


@pytest.mark.parametrize("request_first", [False, True])
def test_an_abort_before_anything_is_written_is_acknowledged_at_once(request_first: bool) -> None:
    bench = Bench()
    bench.register()
    bench.target()
    if request_first:
        bench.expect()
    effects = bench.abort()
    assert told(effects) == [(7001, ACK)], "and no status, since the engine has ended it"
    assert (ended(effects) or ended(bench.expect())) == [("r", "cancelled", 499)]
    lease, cancel = bench.hold()
    assert isinstance(cancel, CancelLoad), "KV that comes too late is released"
    assert lease.id == cancel.id
    assert len(bench.table) == 0


def test_an_abort_of_a_room_that_is_loaded_cancels_the_load() -> None:
    bench = Bench()
    load = loading(bench)
    effects = bench.abort()
    assert only(CancelLoad, effects).id == load
    assert (told(effects), ended(effects)) == ([(7001, ACK)], [("r", "cancelled", 499)])
    assert bench.loaded(load) == [ReleaseLoad(id=load)], "it came before the cancellation was seen"
    bench.table.handle(LoadCancelled(id=load), bench.now)
    assert bench.effects() == []


@pytest.mark.parametrize("step", ["kv", "row"])
def test_an_abort_while_bytes_are_on_their_way_waits_for_them(step: str) -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    if step == "row":
        bench.written(load)
    assert bench.abort(generation=9) == []
    effects = bench.written(load)
    assert effects[0] == ReleaseLoad(id=load)
    assert (told(effects), ended(effects)) == ([(7001, [*ACK[:3], b"9"])], [("r", "cancelled", 499)])


def test_writes_that_do_not_end_are_ended_before_anything_is_told_or_given_back() -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    bench.abort()
    assert bench.wait(29.9) == []
    effects = bench.wait(0.1)
    assert effects[:2] == [StopWrites(("agent-1",)), ReleaseLoad(id=load)]
    assert told(effects) == [(7001, ACK)]
    assert bench.written(load, "given up") == []
    assert len(bench.table) == 0


def test_a_lost_write_fails_the_room_after_all_writes_have_been_ended() -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    effects = bench.written(load, "NIXL: gone")
    assert effects[:2] == [StopWrites(("agent-1",)), ReleaseLoad(id=load)]
    assert told(effects) == [(7001, failed("writing to the decode engine: NIXL: gone"))]
    assert ended(effects) == [("r", "peer_gone", 502)]


def test_aborts_without_a_generation_or_of_unknown_rooms() -> None:
    bench = Bench()
    loading(bench)
    effects = bench.abort(generation=None)
    assert told(effects) == [(7001, failed("the decode engine has aborted the request"))]
    assert told(bench.abort(99, generation=4)) == [(7001, [b"ABORT_ACK", b"99", b"0", b"4"])]
    assert ended(bench.expect(99, "late")) == [("late", "cancelled", 499)]


def test_a_room_without_a_decode_engine_and_one_without_a_request_end() -> None:
    bench = Bench()
    bench.register()
    bench.expect()
    bench.hold()
    bench.target(8)
    effects = bench.wait(300)
    assert isinstance(effects[0], CancelLoad), "the prefill server's ticket is released"
    assert ended(effects) == [("r", "no_peer", 504)]
    text = b"no request has come for bootstrap_room 8 within 300 s"
    assert told(effects) == [(7001, [b"KV_STATUS", b"8", b"0", b"0", text])]
    late = "no decode engine has asked for bootstrap_room 7 within 300 s"
    assert told(bench.target()) == [(7001, failed(late))], "who comes later is told at once"
    assert ended(bench.expect(8, "late")) == [("late", "no_peer", 504)]
    bench.expect(9)
    assert bench.table.next_deadline() == 600


def test_a_prefill_server_that_refuses_the_prompt_fails_the_engines_room() -> None:
    bench = Bench()
    bench.register()
    bench.expect()
    assert ended(bench.withdraw()) == [("r", "prompt_too_long", 400)]
    assert told(bench.target()) == [(7001, failed("refused"))]
    assert bench.table.next_deadline() is None, "both sides know"
    load = loading(bench)
    effects = bench.withdraw()
    assert (only(CancelLoad, effects).id, told(effects)) == (load, [(7001, failed("refused"))])


def test_a_client_that_goes_while_bytes_are_on_their_way() -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    assert bench.withdraw(code="cancelled") == []
    assert told(bench.written(load)) == [(7001, failed("refused"))]


def test_a_load_that_fails() -> None:
    bench = Bench()
    load = loading(bench)
    bench.table.handle(LoadFailed(id=load, code="timeout", message="no data for 120 s"), bench.now)
    effects = bench.effects()
    assert not [effect for effect in effects if isinstance(effect, CancelLoad | ReleaseLoad)]
    assert (told(effects), ended(effects)) == ([(7001, failed("no data for 120 s"))], [("r", "timeout", 504)])


def test_pages_that_are_not_those_of_the_prompt_are_never_written() -> None:
    bench = Bench()
    bench.register()
    bench.expect()
    bench.target(pages=[1, 2])
    effects = bench.hold()
    text = "the decode engine names 2 pages; the prompt's 40 tokens after 0 need 3 of 16"
    assert (told(effects), ended(effects)) == ([(7001, failed(text))], [("r", "bad_reservation", 502)])
    assert not [effect for effect in effects if isinstance(effect, LoadKv)]


def test_engines_that_are_not_registered_or_do_not_fit() -> None:
    bench = Bench()
    effects = bench.target()
    assert not bench.table.is_registered("agent-1")
    text = "the decode engine cannot be served: it has not registered here since this gateway was started"
    assert told(effects) == [(7001, failed(text))]
    assert "6 here" in bench.register(kv=range(4))
    assert b"4 KV buffers" in told(bench.target(8))[0][1][-1]
    assert "6 here" in bench.register(kv=range(4)), "again"
    assert bench.register(agent="restarted") == "", "at the same address"
    assert not bench.table.is_registered("agent-1")


def test_an_engine_that_is_started_again_ends_what_its_predecessor_waited_for() -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    bench.target(8)
    bench.register(agent="restarted")
    effects = bench.effects()
    assert only(StopWrites, effects).agents == ("agent-1",)
    assert [room for _, (_, room, *_) in told(effects)] == [b"8"]
    assert ended(bench.written(load, "given up")) == [("r", "peer_gone", 502)]


def test_a_room_that_two_requests_of_an_engine_have_ends_for_both() -> None:
    bench = Bench()
    load = loading(bench)
    bench.loaded(load)
    assert bench.target() == [], "said twice"
    assert bench.target(pages=[1, 2, 3]) == [], "bytes are on their way"
    effects = bench.written(load)
    assert ended(effects) == [("r", "room_in_use", 502)]
    text = b"bootstrap_room 7 is in use by two requests at the decode engine"
    assert told(effects)[0][1][-1] == text
    bench = Bench()
    load = loading(bench)
    bench.register(agent="other", port=7005)
    [(port, frames)] = told(bench.target(agent="other", port=7005))
    assert (port, frames[-1]) == (7005, b"the room is in use by another decode engine")
    assert told(bench.abort(port=7005)) == [(7005, ACK)]
    assert ended(bench.expect(request="again")) == [("again", "room_in_use", 409)]
    assert only(WriteKv, bench.loaded(load)).ranks[0].target.agent == "agent-1", "which is not touched by it"


def test_rooms_and_ranks_are_bounded() -> None:
    bench = Bench(msgspec.structs.replace(LIMITS, rooms=2, ranks=2))
    bench.register()
    for number in (1, 2):
        bench.target(number)
        bench.expect(number, f"r{number}")
    assert told(bench.target(3))[0][1] == [b"KV_STATUS", b"3", b"0", b"0", b"2 rooms are open"]
    assert ended(bench.expect(4)) == [("r", "queue_full", 429)]
    for number in range(5):
        bench.register(agent=f"a{number}", port=7010 + number)
    assert [bench.table.is_registered(f"a{number}") for number in range(5)] == [False, False, False, True, True]


FLOODS: dict[str, Callable[[Bench, int], Any]] = {
    "aborts": lambda bench, number: bench.abort(number),
    "rooms of engines that have not registered": lambda bench, number: bench.target(number, agent="nobody"),
    "rooms": lambda bench, number: bench.target(number),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_rooms_without_a_request_keep_no_request_out(flood: str) -> None:
    """Whoever reaches the port can send these, and name an engine's address in them."""
    bench = Bench(msgspec.structs.replace(LIMITS, rooms=3))
    bench.register()
    for number in range(100, 200):
        FLOODS[flood](bench, number)
    assert len(bench.table._rooms) <= 2 * 3, "what is remembered is bounded, too"
    for number in range(3):
        assert ended(bench.expect(number, f"r{number}")) == []
    assert ended(bench.expect(3, "one more")) == [("one more", "queue_full", 429)]
    bench.wait(1000)  # they end
    bench.wait(1000)  # and are forgotten
    assert (len(bench.table), bench.table._rooms, bench.table._early, bench.table._ended) == (0, {}, {}, {})


def test_a_host_that_opens_rooms_without_end_has_them_from_itself() -> None:
    bench = Bench(msgspec.structs.replace(LIMITS, rooms=4))
    bench.register()
    bench.register(agent="greedy", host="127.0.0.2", port=7002)
    bench.target(1)
    bench.target(2)
    for number in range(100, 200):
        bench.target(number, agent="greedy", host="127.0.0.2", port=7002)
    assert ended(bench.expect(1, "a")) == ended(bench.expect(2, "b")) == []
    assert isinstance(bench.hold(1, "a")[-1], LoadKv), "its engine's room has stayed"
    assert [len(rooms) for rooms in bench.table._early.values()] == [2]


def test_a_host_that_registers_ranks_without_end_replaces_its_own() -> None:
    bench = Bench(msgspec.structs.replace(LIMITS, ranks=3))
    bench.register(agent="honest", port=7001)
    for number in range(20):
        bench.register(agent=f"greedy-{number}", host="127.0.0.2", port=8000 + number)
    assert [bench.table.is_registered(name) for name in ("honest", "greedy-17", "greedy-18", "greedy-19")] == [
        True,
        False,
        True,
        True,
    ]


def test_rooms_of_an_engine_that_has_not_said_how_it_is_set_up_wait_for_that() -> None:
    bench = Bench()
    bench.register(verified=False)
    bench.expect()
    bench.target()
    assert len(bench.hold()) == 1, "the lease"
    assert bench.verify("another") == []
    load = only(LoadKv, bench.verify()).id
    assert bench.verify(wrong="said late") == []
    assert only(WriteKv, bench.loaded(load)).tokens == 40


def test_an_engine_that_is_set_up_otherwise_is_told_so_before_and_after() -> None:
    bench = Bench()
    bench.register(verified=False)
    bench.target()
    text = "the decode engine cannot be served: --page-size is 1"
    assert told(bench.verify(wrong="--page-size is 1")) == [(7001, failed(text))]
    assert ended(bench.expect()) == [("r", "unfit", 502)]
    [(_, frames)] = told(bench.target(8))
    assert frames[-1] == text.encode()
    assert bench.register(agent="restarted", verified=False) == "", "at the same address, and not asked yet"
    bench.target(9, agent="restarted")
    bench.expect(9)
    bench.hold(9)
    [(_, frames)] = told(bench.wait(300))
    assert b"has not answered GET /server_info" in frames[-1]


def test_all_ranks_of_an_engine_wait_for_what_it_says() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.register(agent=f"a{rank}", port=7001 + rank, tp_size=2, tp_rank=rank, verified=False)
        bench.target(agent=f"a{rank}", port=7001 + rank, ranks=2)
    bench.expect()
    bench.hold()
    assert bench.verify("a1") == []
    assert only(LoadKv, bench.verify("a0"))


def counted(bench: Bench) -> dict[str, float]:
    return {one.labels[0]: one.value for one in bench.table.statistics().samples if one.name == "rooms_ended_total"}


def test_a_room_is_counted_once_whatever_is_said_of_it_afterwards() -> None:
    """An engine sends an ABORT for each room that it was told has failed, from each of its ranks."""
    bench = Bench()
    bench.register()
    for number in range(4):
        bench.expect(number, f"r{number}")
        bench.target(number)
        bench.withdraw(number, f"r{number}")
        bench.abort(number)
        bench.abort(number, generation=2)
    assert counted(bench) == {"failed": 4, "aborted": 0, "handed_over": 0}
    load = loading(bench)
    bench.loaded(load)
    bench.written(load)
    bench.written(load)
    bench.abort(7)
    assert counted(bench) == {"failed": 4, "aborted": 0, "handed_over": 1}
    bench.abort(8)
    bench.abort(8)
    assert counted(bench)["aborted"] == 0, "of which no request has come"
    bench.expect(8, "late")
    assert counted(bench)["aborted"] == 1
    bench.wait(60)
    loading(bench)
    bench.abort()
    bench.abort()
    assert counted(bench)["aborted"] == 2


def test_counters() -> None:
    bench = Bench(RoomLimits())
    load = loading(bench)
    bench.loaded(load)
    bench.written(load)
    bench.written(load)
    bench.abort(8)
    bench.expect(8, "late")
    bench.target(9, agent="unknown")
    values = {(one.name, one.labels): one.value for one in bench.table.statistics().samples}
    assert values == {
        ("rooms_open", ()): 0,
        ("rooms_ended_total", ("handed_over",)): 1,
        ("rooms_ended_total", ("aborted",)): 1,
        ("rooms_ended_total", ("failed",)): 1,
        ("tokens_written_total", ()): 40,
    }
