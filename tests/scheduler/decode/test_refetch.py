"""A preempted request whose KV came from a prefill server asks that again, which may still have it."""

from headrace.core.messages.frontend import Abort
from headrace.core.messages.orders import CancelReceive, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskReserve, PrefillDown, TicketCancelled, TicketFailed
from headrace.core.messages.replies import Reserved, Tokens
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.requests.request import FetchFrom, FirstToken
from tests.scheduler.bench import Bench, ids, none
from tests.scheduler.decode.test_fetch import connected

PROMPT = 7  # tokens: two pages of 4, the second of which is full after one more


def decoding(bench: Bench, rid: str) -> None:
    """A request of PROMPT tokens whose KV has come, with its first token."""
    bench.submit(rid, PROMPT, max_tokens=6, route=FetchFrom("p", f"ticket of {rid}"))
    arrive(bench, 1)


def arrive(bench: Bench, token: int, tokens: int = PROMPT) -> None:
    prepare = bench.last(PrepareReceive)
    bench.expecting(prepare.request)
    bench.do(KvReceived(stage=0, request=prepare.request, first=FirstToken(token, tokens, 0), bytes=100, chunks=1))


def preempted() -> Bench:
    """The younger of two requests gave up its pages at 8 tokens, and nothing of it is cached; the older one goes on."""
    bench = connected(kv_pages=4, pipeline_depth=0, prefix_cache=False, chunk_tokens=4)
    decoding(bench, "old")
    decoding(bench, "young")
    forward = bench.plan()
    assert forward is not None
    bench.done(forward, 2, 102)
    forward = bench.plan()
    assert forward is not None
    assert len(forward.rows) == 1, "young gave way"
    bench.done(forward, 3)
    return bench


def finish_old(bench: Bench) -> None:
    for token in (4, 5, 6):
        forward = bench.plan()
        assert forward is not None
        bench.done(forward, token)
    assert bench.tokens("old") == [1, 2, 3, 4, 5, 6]


def refetching() -> tuple[Bench, PrepareReceive]:
    """Pages of young are leased again, and the stages get ready."""
    bench = preempted()
    seen = len(bench.all(PrepareReceive))
    finish_old(bench)
    assert len(bench.all(PrepareReceive)) == seen + 1
    return bench, bench.last(PrepareReceive)


def test_all_but_the_last_token_is_fetched_under_another_ticket() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    ask = bench.last(AskReserve).reservation
    assert ask.ticket not in ("ticket of young", "ticket of old")
    assert (ask.prompt_tokens, ask.cached_tokens, ask.wait) == (8, 0, True)
    assert ask.prompt_hash == prompt_hash(pack([*range(PROMPT), 1]))
    assert bench.last(Reserved) == Reserved(rid="young", ticket=ask.ticket, tokens=8)
    before = len(bench.all(Tokens))
    bench.do(KvReceived(stage=0, request=prepare.request, first=FirstToken(9, 8, 0), bytes=100, chunks=1))
    assert len(bench.all(Tokens)) == before, "what was sampled behind it is not its next token"
    forward = bench.plan()
    assert forward is not None
    (row,) = forward.rows
    assert (row.start, row.count, ids(row.tokens)) == (8, 1, [102])
    bench.done(forward, 103)
    for token in (104, 105, 106):
        forward = bench.plan()
        assert forward is not None
        bench.done(forward, token)
    assert bench.tokens("young") == [1, 102, 103, 104, 105, 106]
    finished = bench.finished("young")
    assert (finished.usage.prompt_tokens, finished.usage.cached_tokens) == (PROMPT, 0)
    assert (finished.handoff.pages, finished.handoff.bytes) == (4, 200), "what was fetched both times"
    assert bench.metric("refetches_total", "fetched") == 1
    assert bench.metric("prompt_tokens_total") == 2 * PROMPT
    bench.assert_empty()


def test_it_is_computed_here_if_the_prefill_server_fails_it() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    ask = bench.last(AskReserve)
    error = ErrorInfo(code="draining", message="bye", status=503)
    bench.do(
        TicketFailed(session="p1", ticket=ask.reservation.ticket, generation=ask.reservation.generation, error=error)
    )
    assert bench.ended("young") == 0
    assert bench.plan() is None, "a stage may still write into its pages"
    assert bench.last(CancelReceive).request == prepare.request
    bench.forgotten(prepare.request)
    assert bench.metric("refetches_total", "failed") == 1
    bench.compute(103)
    assert bench.tokens("young") == [1, 102, 103]
    bench.compute(104, 105, 106)
    assert bench.finished("young").reason == "length"
    bench.assert_empty()


def test_a_prompt_that_is_refused_there_is_computed_here() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    error = ErrorInfo(code="queue_full", message="full", status=429, at_prefill=True)
    bench.do(Abort(rid="young", error=error))
    ask = bench.last(AskCancel)
    bench.forgotten(prepare.request)
    bench.do(TicketCancelled(session="p1", ticket=ask.ticket, generation=ask.generation))
    bench.compute(103, 104, 105, 106)
    assert bench.finished("young").reason == "length"
    bench.assert_empty()


def test_a_prefill_server_that_dies_meanwhile_costs_the_computation() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    bench.do(PrefillDown(name="p", session="p1", reason="silent"))
    bench.forgotten(prepare.request)
    bench.compute(103, 104, 105, 106)
    assert bench.finished("young").reason == "length"
    bench.assert_empty()


def test_a_prefill_server_that_dies_before_is_not_asked() -> None:
    bench = preempted()
    bench.do(PrefillDown(name="p", session="p1", reason="silent"))
    assert bench.ended("young") == 0, "it has all that it needs to be computed here"
    seen = len(bench.all(PrepareReceive))
    finish_old(bench)
    bench.compute(103, 104, 105, 106)
    assert len(bench.all(PrepareReceive)) == seen
    assert bench.finished("young").reason == "length"
    bench.assert_empty()


def test_a_client_that_leaves_meanwhile_ends_it() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    bench.abort("young")
    assert bench.error("young").code == "cancelled"
    bench.forgotten(prepare.request)
    bench.assert_empty()


def test_a_client_that_leaves_while_the_fetch_is_given_up_ends_it_once() -> None:
    bench, prepare = refetching()
    bench.expecting(prepare.request)
    bench.do(PrefillDown(name="p", session="p1", reason="silent"))
    cancels = len(bench.all(CancelReceive))
    bench.abort("young")
    assert len(bench.all(CancelReceive)) == cancels
    bench.forgotten(prepare.request)
    assert bench.ended("young") == 1
    bench.assert_empty()


def test_what_is_cached_here_is_not_fetched_again() -> None:
    bench = connected(kv_pages=4, pipeline_depth=0)  # a pass has 16 tokens
    decoding(bench, "old")
    bench.submit("young", list(range(50, 57)), max_tokens=6, route=FetchFrom("p", "u"))
    arrive(bench, 1)
    for tokens in ((2, 102), (3,), (4,), (5,), (6,)):
        forward = bench.plan()
        assert forward is not None
        effects = bench.done(forward, *tokens)
    assert none(effects, PrepareReceive)
    assert bench.metric("refetches_total", "cached") == 1
    bench.compute(103, 104, 105, 106)
    assert bench.finished("young").reason == "length"
    bench.assert_empty()
