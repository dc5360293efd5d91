"""--remote cost at a decode server's scheduler: prompts that are computed here though a prefill server was chosen."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.frontend import RemovePrefill
from headrace.core.messages.orders import Forward, PrepareReceive
from headrace.core.messages.replies import PrefillDecided, RequestFailed, Tokens
from headrace.core.types.requests.remote_prefill import PREFILL_REASONS, PrefillDecision, RemoteForecast
from headrace.core.types.requests.request import DecodeHere, FetchFrom
from headrace.scheduler.costs.backlog import TAU_S
from headrace.scheduler.state.ttft_prediction import REDIRECTED_RHO
from headrace.scheduler.telemetry.metrics import WAIT_TOKENS
from tests.scheduler.bench import Bench, none, only

PER_TOKEN_S = 0.01
COST = (0.0, PER_TOKEN_S, 0.0)


def measured(**changes: object) -> Bench:
    """A decode server whose stages have measured their speed, with a prefill server."""
    bench = Bench(False, **changes)
    bench.do(replace(bench.ready(0), cost=COST))
    bench.prefill_up()
    return bench


def ask(bench: Bench, rid: str, tokens: int | list[int], seconds: float | None, **fields: object) -> PrefillDecision:
    """Submit a prompt that the prefill server is expected to take so many seconds for."""
    forecast = None if seconds is None else RemoteForecast(0.0, seconds)
    route = FetchFrom("p", rid, forecast=forecast, compare=True)
    found = only(bench.submit(rid, tokens, route=route, **fields), PrefillDecided)
    assert found.rid == rid
    return found.decision


def work(bench: Bench, passes: int = 100) -> None:
    """Compute so many forward passes, if there are as many, in the time that was measured."""
    for _ in range(passes):
        if (forward := bench.plan()) is None:
            return
        seconds = PER_TOKEN_S * sum(row.count for row in forward.rows)
        bench.done(forward, *[1 for row in forward.rows if row.sample is not None], seconds=seconds)


def decoding(bench: Bench, *rids: str) -> None:
    """Requests that decode here."""
    for number, rid in enumerate(rids):
        bench.submit(rid, [900 + number], route=DecodeHere(), max_tokens=50)
    work(bench, 1)


def test_the_cheaper_side_computes_the_prompt() -> None:
    bench = measured()
    assert ask(bench, "far", 10, 0.05) == PrefillDecision(True, "cheaper_there")
    assert bench.last(PrepareReceive).ticket == "far"
    assert ask(bench, "near", 10, 0.5) == PrefillDecision(False, "cheaper_here")
    work(bench, 1)
    assert bench.tokens("near") == [1]


def test_without_a_prediction_of_both_it_goes_there() -> None:
    bench = measured()
    assert ask(bench, "a", 10, None) == PrefillDecision(True, "unknown_cost")
    bench = Bench()
    bench.prefill_up()
    assert ask(bench, "a", 10, 100.0) == PrefillDecision(True, "unknown_cost"), "no plan was computed here"


def test_what_is_cached_here_stays() -> None:
    """A turn of a conversation whose last turn was computed here, or fetched."""
    bench = measured()
    turn = list(range(100, 140))
    ask(bench, "first", turn, 9.0, max_tokens=1)
    work(bench)
    assert ask(bench, "second", [*turn, 1, 2], 0.2) == PrefillDecision(False, "cached_here")
    assert ask(bench, "other", list(range(200, 242)), 0.2).reason == "cheaper_there"


def test_a_request_that_decodes_here_is_worth_as_much_as_one_that_waits() -> None:
    """10 tokens take 0.1 s here, by which 4 requests get their next tokens later."""
    bench = measured()
    assert ask(bench, "alone", 10, 0.3, max_tokens=1) == PrefillDecision(False, "cheaper_here")
    work(bench)
    decoding(bench, "d1", "d2", "d3", "d4")
    assert ask(bench, "beside", list(range(50, 60)), 0.3) == PrefillDecision(True, "cheaper_there")


def test_a_queue_here_sends_prompts_away() -> None:
    bench = measured()
    found = [ask(bench, f"r{number}", list(range(20 * number, 20 * number + 20)), 1.0).remote for number in range(20)]
    assert found[:3] == [False] * 3
    assert found[-5:] == [True] * 5, "once the queue is long enough all go"


def test_routes_that_are_not_to_be_compared_are_as_they_were() -> None:
    bench = measured()
    assert none(bench.submit("always", 10, route=FetchFrom("p", "always")), PrefillDecided)
    assert bench.last(PrepareReceive).ticket == "always"
    assert none(bench.submit("posted", 10, route=FetchFrom("p", "t", posting="external")), PrefillDecided)
    assert bench.last(PrepareReceive).ticket == "t"
    assert none(bench.submit("here", 10, route=DecodeHere()), PrefillDecided)
    assert all(bench.metric("prefill_decisions_total", reason) == 0 for reason in PREFILL_REASONS)


def test_decisions_are_counted() -> None:
    bench = measured()
    ask(bench, "a", 10, 0.05)
    ask(bench, "b", 11, 9.0)
    ask(bench, "c", 12, None)
    found = {reason: bench.metric("prefill_decisions_total", reason) for reason in PREFILL_REASONS}
    assert found == {"cheaper_there": 1, "unknown_cost": 1, "probe": 0, "cheaper_here": 1, "cached_here": 0}


def test_what_stays_here_needs_no_session_and_outlives_the_prefill_server() -> None:
    bench = measured()
    assert not ask(bench, "a", 10, 9.0).remote
    bench.do(RemovePrefill(name="p"))
    assert not ask(bench, "b", list(range(60, 70)), 9.0).remote
    work(bench)
    assert not bench.all(RequestFailed)
    assert {reply.rid for reply in bench.all(Tokens)} == {"a", "b"}
    assert bench.all(Forward)


def test_a_server_that_was_slow_once_is_tried_again() -> None:
    """One prompt that loses less than 0.2 s, every half a minute. The first comparison begins that time."""
    bench = measured()
    found = []
    for number in range(100):
        found.append(ask(bench, f"r{number}", [number, 1], 0.15, max_tokens=1).reason)
        work(bench)
        bench.wait(1.0)
    assert [number for number, reason in enumerate(found) if reason == "probe"] == [30, 60, 90]
    assert ask(bench, "long", [101, 1], 0.5).reason == "cheaper_here", "it would lose more"


def test_short_prompts_are_told_to_wait_less_under_srpt_and_as_long_under_fcfs() -> None:
    for policy in ("srpt", "fcfs"):
        bench = measured(policy=policy, kv_pages=4096, max_model_len=100_000, policy_reserve=0.0)
        assert {bench.metric("predicted_wait_seconds", str(tokens)) for tokens in WAIT_TOKENS} == {0.0}
        for number in range(5):
            bench.submit(f"r{number}", [number] * 1000, route=DecodeHere())
        found = [bench.metric("predicted_wait_seconds", str(tokens)) for tokens in WAIT_TOKENS]
        assert found == sorted(found)
        assert found[-1] >= 50.0
        assert found[0] == (0.0 if policy == "srpt" else found[-1])


def test_a_prompt_is_told_to_delay_those_that_go_behind_it() -> None:
    """Under srpt a short one goes before the five that wait; under fcfs none. Those to come are as many under both."""
    for policy, behind in (("srpt", [5.0, 0.0]), ("fcfs", [0.0, 0.0])):
        bench = measured(policy=policy, kv_pages=4096, max_model_len=100_000, policy_reserve=0.0)
        ends = (str(WAIT_TOKENS[0]), str(WAIT_TOKENS[-1]))
        assert [bench.metric("delayed_requests", tokens) for tokens in ends] == [0.0, 0.0]
        for number in range(5):
            bench.submit(f"r{number}", [number] * 1000, route=DecodeHere())
        short, long = (bench.metric("delayed_requests", tokens) for tokens in ends)
        arriving = 5 / TAU_S * 50 / (1 - min(50 / TAU_S, REDIRECTED_RHO))
        assert short >= behind[0] + arriving
        assert long >= behind[1] + (arriving if policy == "fcfs" else 0.0)
        assert (short > long) == (policy == "srpt")
        bench.wait(1000.0)
        assert bench.metric("delayed_requests", ends[0]) == pytest.approx(behind[0], abs=0.01), (
            "none is to come any more"
        )
