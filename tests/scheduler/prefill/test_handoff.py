"""The handoff to a decode peer: which chunks are sent, and how requests end."""

from headrace.core.messages.frontend import Abort
from headrace.core.messages.orders import CancelSend, Forward, ReleaseRequest, SendChunk
from headrace.core.messages.peers import EndPeer, PeerCancelled, PeerGone, TellCancelled, TellFailed, TellFinished
from headrace.core.messages.replies import Progress, RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import SendFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import Discard, SendTo
from tests.scheduler.bench import Bench, ids, none, only


def started(
    tokens: int = 10, *, cached: int = 0, page_size: int = 4, bench: Bench | None = None, **fields: object
) -> Bench:
    bench = bench or Bench()
    bench.join(page_size=page_size)
    bench.submit("a", tokens, route=SendTo("t"), **fields)
    bench.reserve(tokens=tokens, cached=cached, page_size=page_size)
    return bench


def spans(sends: list[SendChunk]) -> list[tuple[int, int, int, bool]]:
    return [(send.chunk, send.start, send.start + send.count, send.last is not None) for send in sends]


def next_forward(bench: Bench) -> Forward:
    forward = bench.plan()
    assert forward is not None
    return forward


def test_chunks_are_sent_behind_their_forward_and_the_last_one_with_the_first_token() -> None:
    bench = started(38, bench=Bench(chunk_tokens=15), progress=True)
    first = next_forward(bench)
    send = bench.one(SendChunk)
    assert (send.seq, send.after) == (first.seq + 1, first.seq)
    second = next_forward(bench)
    assert spans(bench.all(SendChunk)) == [(0, 0, 12, False), (1, 12, 28, False)]
    bench.done(first)
    third = next_forward(bench)
    bench.done(second)
    assert len(bench.all(SendChunk)) == 2
    effects = bench.done(third, 77)
    send = only(effects, SendChunk)
    assert spans([send]) == [(2, 28, 38, True)]
    assert send.after == third.seq
    assert send.last is not None
    assert (send.last.token, send.last.prompt_tokens, send.last.finish_reason) == (77, 38, "")
    assert ids(send.dst_pages) == [507, 508, 509]
    assert send.dst_row == 7
    assert len(ids(send.pages)) == 3
    assert only(effects, Tokens).tokens == (77,)
    assert bench.last(Progress).phase == "transferring"


def test_only_what_the_peer_lacks_is_sent_in_its_own_pages() -> None:
    bench = started(20, cached=5, page_size=3, bench=Bench(chunk_tokens=8))
    forwards = [next_forward(bench), next_forward(bench)]
    bench.done(forwards[0])
    third = next_forward(bench)
    bench.done(forwards[1])
    bench.done(third, 1)
    sends = bench.all(SendChunk)
    assert spans(sends) == [(0, 5, 8, False), (1, 8, 16, False), (2, 16, 20, True)]
    # The peer's pages of 3 start at position 3: 500 holds 3..5, 501 holds 6..8, and so on.
    assert [ids(send.dst_pages) for send in sends] == [[500, 501], [501, 502, 503, 504], [504, 505]]
    table = ids(third.rows[0].pages)
    assert [ids(send.pages) for send in sends] == [table[1:2], table[2:4], table[4:5]]


def test_nothing_is_sent_while_the_peer_has_it_all() -> None:
    bench = started(20, cached=16, bench=Bench(chunk_tokens=8))
    next_forward(bench)
    next_forward(bench)
    assert bench.all(SendChunk) == []


def test_the_cached_prefix_goes_with_the_first_chunk() -> None:
    bench = Bench(chunk_tokens=8)
    bench.submit("warm", 16, route=Discard())
    bench.compute(1)
    started(30, bench=bench)
    forward = next_forward(bench)
    assert forward.rows[0].start == 16
    assert spans(bench.all(SendChunk)) == [(0, 0, 24, False)]


def test_done_when_every_stage_acked_every_chunk_in_any_order() -> None:
    bench = started(20, bench=Bench(stages=2))
    forwards = [next_forward(bench), next_forward(bench)]
    bench.done(forwards[0])
    bench.done(forwards[1], 9)
    first, last = bench.all(SendChunk)
    for send, stage in ((last, 1), (first, 0), (last, 1), (last, 0)):
        bench.ack(send, stage)
        assert bench.ended() == 0
    effects = bench.ack(first, 1)
    finished = only(effects, RequestFinished)
    assert (finished.reason, finished.usage.completion_tokens) == ("handoff", 1)
    assert (finished.handoff.pages, finished.handoff.chunks, finished.handoff.bytes) == (5, 2, 400)
    assert only(effects, TellFinished).first is None
    only(effects, ReleaseRequest)
    assert none(effects, CancelSend)
    assert bench.metric("dropped_messages_total", "duplicate_ack") == 1
    bench.assert_empty()
    bench.ack(first, 1)
    assert bench.metric("dropped_messages_total", "unknown_request") == 1


def test_a_first_token_that_ends_the_request_moves_no_kv() -> None:
    bench = started(10, stop_token_ids=(5,))
    effects = bench.done(next_forward(bench), 5)
    told = only(effects, TellFinished)
    assert told.first is not None
    assert (told.first.token, told.first.finish_reason) == (5, "stop")
    assert only(effects, RequestFinished).reason == "stop"
    assert bench.all(SendChunk) == []
    bench.assert_empty()


def test_min_tokens_keep_a_stop_token_from_ending_it() -> None:
    bench = started(10, stop_token_ids=(5,), min_tokens=2)
    assert none(bench.done(next_forward(bench), 5), TellFinished)
    assert bench.one(SendChunk).last is not None


def test_a_request_of_one_token_sends_no_kv() -> None:
    bench = started(40, max_tokens=1)
    bench.compute(3)
    assert bench.all(SendChunk) == []
    told = bench.one(TellFinished)
    assert told.first is not None
    assert told.first.finish_reason == "length"
    bench.assert_empty()


def test_an_end_with_chunks_under_way_waits_until_they_are_cancelled() -> None:
    bench = started(20, stop_token_ids=(5,))
    forwards = [next_forward(bench), next_forward(bench)]
    bench.done(forwards[0])
    effects = bench.done(forwards[1], 5)
    only(effects, RequestFinished)
    cancel = only(effects, CancelSend)
    assert none(effects, ReleaseRequest)
    assert none(effects, TellFinished), "bytes may still follow"
    effects = bench.quiet(cancel.request)
    only(effects, TellFinished)
    only(effects, ReleaseRequest)
    bench.assert_empty()


def test_the_peer_is_silent_only_from_when_the_stage_reaches_the_send() -> None:
    bench = started(20, bench=Bench(stage_timeout_s=500))
    forwards = [next_forward(bench), next_forward(bench)]
    bench.wait(60)
    assert bench.ended() == 0, "the forward is still being computed"
    bench.done(forwards[0])
    bench.wait(9)
    assert bench.ended() == 0
    bench.wait(2)
    assert (bench.error().code, bench.error().status) == ("peer_gone", 502)
    only(bench.seen, EndPeer)
    assert none(bench.seen, TellFailed)
    cancel = bench.one(CancelSend)
    bench.done(forwards[1], 1)
    assert not bench.scheduler.idle
    bench.do(PeerGone(session="s", reason=""))
    assert none(bench.quiet(cancel.request), TellFailed), "its session has ended, and with it all its tickets"
    bench.assert_empty()


def test_a_peer_that_acknowledges_nothing_is_gone_with_all_its_requests_and_no_others() -> None:
    bench = started(8)
    bench.join("other")
    for ticket, session in (("u", "s"), ("v", "other")):
        bench.submit(ticket, 8, route=SendTo(ticket), cache_salt=ticket)
        bench.reserve(ticket, 8, session=session)
    bench.wait(1)
    bench.compute(1, 2, 3)
    mine = bench.last(SendChunk)
    bench.wait(9)
    bench.ack(mine)
    effects = bench.wait(2)
    assert only(effects, EndPeer).session == "s"
    effects += bench.do(PeerGone(session="s", reason=""))
    assert {failed.rid: failed.error.code for failed in effects if isinstance(failed, RequestFailed)} == {
        "a": "peer_gone",
        "u": "peer_gone",
    }
    assert bench.finished("v")


def test_acknowledgements_to_one_stage_do_not_excuse_what_another_waits_for() -> None:
    bench = started(8, bench=Bench(stages=2))
    bench.compute(1)
    bench.submit("b", 8, route=SendTo("u"), cache_salt="b")
    bench.reserve("u", 8)
    bench.compute(2)
    first, second = bench.all(SendChunk)
    bench.ack(first, 0)
    bench.wait(8)
    bench.ack(second, 0)
    bench.wait(3)
    assert bench.error("a").code == "peer_gone"


def test_an_ack_of_any_request_shows_that_the_peer_is_alive() -> None:
    bench = started(8)
    bench.submit("b", 8, route=SendTo("u"), cache_salt="b")
    bench.reserve("u", 8)
    bench.compute(1, 2)
    _, other = bench.all(SendChunk)
    bench.wait(8)
    bench.ack(other)
    bench.wait(8)
    assert bench.ended("a") == 0, "its bytes stand in the same queue as the ones that got through"
    bench.wait(3)
    assert bench.error("a").code == "peer_gone"


def test_a_refused_chunk_fails_the_request() -> None:
    bench = started(10)
    bench.compute(1)
    send = bench.one(SendChunk)
    effects = bench.do(SendFailed(stage=0, request=send.request, code="checksum_mismatch", message="bad"))
    error = only(effects, RequestFailed).error
    assert (error.code, error.status, error.stage) == ("checksum_mismatch", 502, 0)
    assert only(bench.quiet(send.request), TellFailed).error == error
    bench.assert_empty()


def test_a_peer_that_does_not_expect_a_chunk_any_more_has_cancelled() -> None:
    """Its stage's refusal may come before the CancelSend of its scheduler, which is then answered as ever."""
    bench = started(10)
    bench.compute(1)
    send = bench.one(SendChunk)
    effects = bench.do(SendFailed(stage=0, request=send.request, code="cancelled", message="taken back"))
    assert (only(effects, RequestFailed).error.code, only(effects, RequestFailed).error.status) == ("cancelled", 499)
    assert bench.do(PeerCancelled(session="s", ticket="t", generation=1, reason="r")) == []
    only(bench.quiet(send.request), TellCancelled)
    bench.assert_empty()


def test_a_failure_with_bytes_under_way_keeps_pages_and_the_reply_until_every_stage_has_stopped() -> None:
    bench = started(10, bench=Bench(stages=2, kv_pages=3))
    bench.compute(1)
    send = bench.one(SendChunk)
    effects = bench.do(Abort(rid="a", error=ErrorInfo(code="gone", message="m", status=499)))
    only(effects, RequestFailed)
    only(effects, CancelSend)
    bench.submit("b", 9, route=Discard(), cache_salt="b")
    assert bench.plan() is None
    assert none(bench.quiet(send.request, 1), ReleaseRequest)
    assert none(bench.quiet(send.request, 1), ReleaseRequest), "the same stage twice is one stage"
    effects = bench.quiet(send.request, 0)
    only(effects, ReleaseRequest)
    assert only(effects, TellFailed).error.code == "gone"
    assert bench.plan() is not None


def test_a_cancel_is_answered_once_when_sends_have_stopped() -> None:
    bench = started(10)
    bench.compute(1)
    send = bench.one(SendChunk)
    cancelled = PeerCancelled(session="s", ticket="t", generation=1, reason="r")
    effects = bench.do(cancelled)
    assert none(effects, TellCancelled)
    assert bench.do(cancelled) == []
    effects = bench.quiet(send.request)
    only(effects, TellCancelled)
    assert none(effects, TellFailed)
    bench.assert_empty()


def test_the_first_reason_stays() -> None:
    bench = started(10)
    bench.compute(1)
    send = bench.one(SendChunk)
    bench.do(SendFailed(stage=0, request=send.request, code="first", message=""))
    bench.do(SendFailed(stage=0, request=send.request, code="second", message=""))
    bench.abort("a")
    bench.do(PeerGone(session="s", reason=""))
    assert [failed.error.code for failed in bench.all(RequestFailed)] == ["first"]
    bench.quiet(send.request)
    bench.assert_empty()


def test_late_acks_of_a_failed_request_do_not_finish_it() -> None:
    bench = started(10)
    bench.compute(1)
    send = bench.one(SendChunk)
    bench.abort("a")
    assert none(bench.ack(send), RequestFinished)
    assert not bench.scheduler.idle
    bench.quiet(send.request)
    assert bench.ended("a") == 1
    bench.assert_empty()
