"""The integrity check: each table notices when it does not fit the requests."""

from collections.abc import Callable

import pytest

from headrace.core.incoming import RemoteWriter
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.scheduler.peers.tickets import EndedTicket
from headrace.scheduler.queues.deadlines import Deadlines
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.plan_table import Plan, PlannedRow
from headrace.scheduler.state.state import State
from tests.scheduler.bench import Bench


def bench_with_requests() -> Bench:
    """One request of each kind: "fetch" is being fetched, "send" has its peer and waits, "held" is computed and waits
    for its peer, "run" is in a plan, "decode" is between two plans."""
    bench = Bench(pipeline_depth=0, chunk_tokens=16)
    bench.join()
    bench.prefill_up()
    bench.submit("fetch", 10, route=FetchFrom("p", "f"), cache_salt="fetch")
    bench.submit("decode", 4, max_tokens=8, cache_salt="decode")
    bench.submit("held", 8, route=SendTo("h", hold=True), cache_salt="held")
    first = bench.plan()
    assert first is not None
    bench.done(first, 1, 2)
    bench.submit("run", 10, cache_salt="run", max_tokens=4)
    assert bench.plan() is not None
    bench.submit("send", 10, route=SendTo("s"), cache_salt="send")
    bench.reserve("s", 10)
    return bench


def state_of(bench: Bench) -> State:
    return bench.scheduler._state


def named(state: State, rid: str) -> Request:
    request = state.requests.live(rid)
    assert request is not None
    return request


def forget_arrival(state: State) -> None:
    del state.requests._by_arrival[named(state, "run").arrival]


def free_rid(state: State) -> None:
    state.requests.end(named(state, "run"))


def lose_from_waiting(state: State) -> None:
    state.replicas[0].queues.policy.remove(named(state, "send"))


def decode_what_waits(state: State) -> None:
    state.replicas[0].queues.start_decoding(named(state, "send"))


def queue_twice(state: State) -> None:
    state.replicas[0].queues.prefilling[named(state, "run").arrival] = named(state, "run")
    state.replicas[0].queues.start_decoding(named(state, "run"))


def change_phase_alone(state: State) -> None:
    named(state, "decode").phase = Phase.RUNNING


def plan_behind_the_count(state: State) -> None:
    named(state, "send").planned += 1


def miscount_plans(state: State) -> None:
    named(state, "run").in_flight += 1


def plan_unknown_request(state: State) -> None:
    gone = Request(named(state, "run").submit, 99, 99, 0.0, 1, Phase.RUNNING)
    state.replicas[0].plans.add(Plan(seq=999, tokens=1, rows=(PlannedRow(gone, 99, 1, False),)), 0.0)


def drop_held(state: State) -> None:
    state.replicas[0].held.remove(named(state, "held"))


def drop_held_lease(state: State) -> None:
    state.deadlines = Deadlines()


def end_active_ticket(state: State) -> None:
    state.tickets.end("h", EndedTicket(None, 0, None))


def forget_match(state: State) -> None:
    outgoing = named(state, "send").outgoing
    assert outgoing is not None
    state.tickets.forget(outgoing.key)


def detach_from_peer(state: State) -> None:
    state.peers.detach(named(state, "send"))


def end_fetch(state: State) -> None:
    state.prefills.end_fetch(named(state, "fetch"))


def keep_with_prefill_server(state: State) -> None:
    request = named(state, "fetch")
    state.prefills["p"].requests[12345] = request


def lose_lease(state: State) -> None:
    named(state, "run").lease = None


def lose_row(state: State) -> None:
    named(state, "fetch").row = None


def take_other_row(state: State) -> None:
    named(state, "run").row = named(state, "fetch").row
    named(state, "fetch").row = None


@pytest.mark.parametrize(
    "damage",
    [
        forget_arrival,
        free_rid,
        lose_from_waiting,
        decode_what_waits,
        queue_twice,
        change_phase_alone,
        plan_behind_the_count,
        miscount_plans,
        plan_unknown_request,
        drop_held,
        drop_held_lease,
        end_active_ticket,
        forget_match,
        detach_from_peer,
        end_fetch,
        keep_with_prefill_server,
        lose_lease,
        lose_row,
        take_other_row,
    ],
)
def test_damage_is_found(damage: Callable[[State], None]) -> None:
    bench = bench_with_requests()
    assert bench.scheduler.check_integrity() == []
    damage(state_of(bench))
    assert bench.scheduler.check_integrity() != []
    assert bench.metric("integrity_errors") > 0


def leak_page(state: State) -> None:
    state.replicas[0].cache._allocator.allocate(1, 77)


def free_leased_page(state: State) -> None:
    lease = named(state, "run").lease
    assert lease is not None
    state.replicas[0].cache._allocator.release([lease.pages[-1]], lease.owner)


def steal_page(state: State) -> None:
    lease = named(state, "run").lease
    assert lease is not None
    state.replicas[0].cache._allocator.transfer(lease.pages[-1], lease.owner, 77)


def lock_once_more(state: State) -> None:
    next(iter(state.replicas[0].cache._tree.walk())).locks += 1


def leak_row(state: State) -> None:
    state.metadata_rows.allocate(1, 77)


def await_row_of_nobody(state: State) -> None:
    state.awaiting_row[77] = Request(named(state, "run").submit, 77, 77, 0.0, 1, Phase.INFLIGHT)


def compute_more_than_planned(state: State) -> None:
    request = named(state, "run")
    request.computed = request.planned + 1


def give_pages_too_early(state: State) -> None:
    named(state, "send").lease = named(state, "run").lease


def end_without_release(state: State) -> None:
    request = named(state, "decode")
    request.phase, request.in_flight = Phase.DONE, 0


def write_where_it_computes(state: State) -> None:
    incoming = named(state, "fetch").incoming
    assert incoming is not None
    incoming.writer = RemoteWriter.WRITING
    named(state, "run").incoming = incoming


def miscount_tenant(state: State) -> None:
    state.queued_by_tenant.tokens.add("", 5)


def count_as_unacknowledged(state: State) -> None:
    state.unacknowledged._counted[77] = ("owner", 3)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (leak_page, "private pages != 64"),
        (free_leased_page, "holds pages of others"),
        (steal_page, "holds pages of others"),
        (lock_once_more, "2 locks, leases and copies count 1"),
        (leak_row, "metadata rows free + 1 held"),
        (await_row_of_nobody, "requests {77} wait for metadata rows and are not known"),
        (compute_more_than_planned, "run (running) has computed 11 tokens of 10 planned"),
        (give_pages_too_early, "send (waiting) has pages already"),
        (lose_lease, "run (running) has no pages"),
        (drop_held_lease, "held (inflight) waits for a peer without a deadline"),
        (end_without_release, "decode (done) has ended, and nothing keeps its pages"),
        (write_where_it_computes, "run (running) computes on pages that a prefill server may write"),
        (miscount_tenant, "requests and tokens counted as queued by tenants"),
        (count_as_unacknowledged, "requests {77} count as not acknowledged"),
        (take_other_row, "run has metadata row"),
    ],
)
def test_the_check_says_what_is_damaged(damage: Callable[[State], None], said: str) -> None:
    bench = bench_with_requests()
    damage(state_of(bench))
    found = bench.scheduler.check_integrity()
    assert any(said in each for each in found), found
