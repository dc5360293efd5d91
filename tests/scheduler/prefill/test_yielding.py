"""Prompts whose peer has not come give way to those whose peer has: in the order, and with their pages."""

import pytest

from headrace.core.messages.orders import Forward, SendChunk
from headrace.core.messages.replies import Tokens
from headrace.core.types.packed import unpack
from tests.scheduler.bench import Bench
from tests.scheduler.prefill.test_rendezvous import send_to


def optimist(**changes: object) -> Bench:
    """A pool of 12 pages of 4 tokens."""
    bench = Bench(**({"optimistic_start": True, "kv_pages": 12, "hold_percent": 100, "chunk_tokens": 64} | changes))
    bench.join()
    return bench


def fresh(first: int, count: int) -> list[int]:
    """A prompt that shares no page with others."""
    return list(range(first, first + count))


def bootstrapped(bench: Bench, rid: str, tokens: list[int], ticket: str) -> None:
    """A prompt whose peer has come before it."""
    bench.reserve(ticket, len(tokens))
    send_to(bench, rid, tokens, ticket)


def rows(forward: Forward | None) -> list[tuple[int, int]]:
    assert forward is not None
    return [(row.start, row.count) for row in forward.rows]


def hand_over(bench: Bench) -> None:
    for send in bench.all(SendChunk):
        bench.ack(send)


def test_a_computed_prompt_gives_its_pages_up_and_is_sent_once_its_peer_comes() -> None:
    bench = optimist()
    send_to(bench, "early", fresh(0, 30), "t")
    bench.compute(7)
    assert bench.tokens("early") == [7]
    bootstrapped(bench, "late", fresh(100, 40), "u")
    bench.compute(8)
    assert bench.tokens("late") == [8]
    assert bench.metric("preemptions_total") == 1
    assert (bench.metric("queue_requests", "bootstrap"), bench.metric("held_pages")) == (1, 0)
    hand_over(bench)
    bench.reserve("t", 30)
    again = bench.plan()
    assert again is not None
    bench.done(again, 9)
    assert bench.tokens("early") == [7], "the client has its first token"
    sends = [send for send in bench.all(SendChunk) if send.ticket == "t"]
    assert sum(send.count for send in sends) == 30
    assert sends[-1].last is not None
    assert sends[-1].last.token == 7, "the peer gets the token that the client got"
    hand_over(bench)
    usage = bench.finished("early").usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (30, 1, 0)
    assert bench.metric("prompt_tokens_total") == 70
    bench.assert_empty()


def test_what_the_prefix_cache_still_has_is_not_computed_again() -> None:
    bench = optimist()
    send_to(bench, "early", fresh(0, 32), "t")
    bench.compute(7)
    bootstrapped(bench, "late", fresh(100, 32), "u")
    bench.compute(8)
    hand_over(bench)
    bench.reserve("t", 32)
    (start, count) = rows(bench.plan())[0]
    assert start > 0, "8 of its pages were cached, and 4 of them were taken"
    assert start + count == 32


def test_a_prompt_in_a_plan_gives_its_pages_up_when_that_is_done() -> None:
    bench = optimist(chunk_tokens=16)
    send_to(bench, "early", fresh(0, 40), "t")
    first = bench.plan()
    assert first is not None
    bootstrapped(bench, "late", fresh(100, 20), "u")
    assert bench.plan() is None, "the pages of early are in use"
    bench.done(first)
    assert rows(bench.plan()) == [(0, 16)]
    assert bench.metric("queue_requests", "bootstrap") == 1


def test_a_peer_that_comes_meanwhile_finds_it_in_the_queue() -> None:
    bench = optimist(chunk_tokens=16)
    send_to(bench, "early", fresh(0, 40), "t")
    first = bench.plan()
    assert first is not None
    bootstrapped(bench, "late", fresh(100, 20), "u")
    bench.plan()
    bench.reserve("t", 40)
    bench.done(first)
    bench.compute(8)
    hand_over(bench)
    bench.compute(7)
    hand_over(bench)
    assert (bench.finished("early").reason, bench.finished("late").reason) == ("handoff", "handoff")
    bench.assert_empty()


def test_the_last_plan_of_a_prompt_that_gives_way_gives_its_first_token_once() -> None:
    bench = optimist()
    send_to(bench, "early", fresh(0, 40), "t")
    whole = bench.plan()
    assert whole is not None
    bootstrapped(bench, "late", fresh(100, 20), "u")
    bench.plan()
    bench.done(whole, 7)
    bench.compute(8)
    bench.reserve("t", 40)
    hand_over(bench)
    bench.compute(9)
    hand_over(bench)
    assert bench.tokens("early") == [7]
    assert [effect.rid for effect in bench.all(Tokens)] == ["early", "late"]
    bench.assert_empty()


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"hidden_states": "last"}, {"hold": True}])
def test_prompts_whose_results_the_client_has_keep_their_pages(fields: dict[str, object]) -> None:
    bench = optimist()
    send_to(bench, "early", fresh(0, 30), "t", **fields)  # type: ignore[arg-type]
    bench.compute(7)
    bootstrapped(bench, "late", fresh(100, 40), "u")
    assert bench.plan() is None
    assert bench.metric("preemptions_total") == 0


def test_nothing_gives_way_if_that_is_not_enough() -> None:
    bench = optimist()
    send_to(bench, "early", fresh(0, 12), "t")
    bench.compute(7)
    bootstrapped(bench, "first", fresh(100, 24), "u")
    bench.compute(8)
    bootstrapped(bench, "late", fresh(200, 28), "v")
    assert bench.plan() is None
    assert bench.metric("preemptions_total") == 0, "3 pages come free, and 4 are lacking"


def test_the_latest_arrivals_give_way_first() -> None:
    bench = optimist()
    for number, rid in enumerate("abc"):
        send_to(bench, rid, fresh(100 * number, 16), rid)
        bench.compute(7)
    bootstrapped(bench, "late", fresh(900, 32), "u")
    bench.compute(8)
    bench.reserve("a", 16)
    assert bench.plan() is None, "it was computed before, and has its pages"
    hand_over(bench)
    assert bench.finished("a").reason == "handoff"
    bench.reserve("c", 16)
    assert rows(bench.plan())[0][1] > 0


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "slo"])
def test_prompts_whose_peer_has_come_are_computed_first(policy: str) -> None:
    bench = optimist(kv_pages=64, chunk_tokens=16, policy=policy, policy_reserve=0.5)
    send_to(bench, "early", fresh(0, 8), "t")
    bootstrapped(bench, "late", fresh(100, 16), "u")
    forward = bench.plan()
    assert forward is not None
    assert [unpack(row.tokens)[0] for row in forward.rows] == [100]


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "slo"])
def test_a_prompt_gives_way_no_more_once_its_peer_has_come(policy: str) -> None:
    bench = optimist(kv_pages=64, chunk_tokens=8, policy=policy, policy_reserve=0.0)
    send_to(bench, "early", fresh(0, 8), "t")
    bootstrapped(bench, "late", fresh(100, 16), "u")
    bench.reserve("t", 8)
    forward = bench.plan()
    assert forward is not None
    assert [unpack(row.tokens)[0] for row in forward.rows] == [0], "it came first, and has less to compute"
