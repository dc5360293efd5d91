"""The spans that the scheduler reports of a request that is part of a distributed trace."""

from headrace.core.messages.orders import SendChunk
from headrace.core.messages.replies import RequestFailed, RequestFinished, RequestTraced
from headrace.core.messages.stage_events import PlanDone
from headrace.core.trace import RequestSpan
from headrace.core.types.requests.request import DecodeHere, Discard, SendTo
from headrace.scheduler.requests.parts import MAX_CHUNKS, MAX_PHASES, SpanLog
from tests.scheduler.bench import Bench, none, only

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_the_phases_of_a_handoff_and_the_chunks_of_its_prefill() -> None:
    """Two stages: a chunk begins on the first and ends on the last."""
    bench = Bench(stages=2, chunk_tokens=16, pipeline_depth=0)
    bench.join()
    begun = bench.now
    bench.submit("a", 40, route=SendTo("t"), traceparent=PARENT)
    bench.wait(1)
    bench.reserve("t", 40)
    bench.wait(1)
    for token in (None, None, 7):
        plan = bench.plan()
        assert plan is not None
        bench.wait(0.5)
        bench.do(PlanDone(stage=0, seq=plan.seq, duration_s=0.25, samples=()))
        bench.wait(0.5)
        bench.done(plan, *([] if token is None else [token]), seconds=0.125)
    bench.wait(1)
    assert none(bench.seen, RequestTraced)
    for send in bench.all(SendChunk):
        bench.ack(send, 0)
        bench.ack(send, 1)
    traced = bench.one(RequestTraced)
    assert (traced.rid, traced.traceparent, traced.error, traced.peer) == ("a", PARENT, "", "peer")
    assert traced.handoff == bench.finished().handoff
    assert traced.usage == bench.finished().usage
    assert [(span.phase, span.start - begun, span.end - begun, span.first, span.count) for span in traced.spans] == [
        ("bootstrap", 0, 1, 0, 0),
        ("waiting", 1, 2, 0, 0),
        ("", 2.25, 3, 0, 16),
        ("", 3.25, 4, 16, 16),
        ("", 4.25, 5, 32, 8),
        ("running", 2, 5, 0, 0),
        ("inflight", 5, 6, 0, 0),
    ]


def test_a_request_without_a_trace_has_no_spans() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard())
    bench.compute(1)
    only(bench.seen, RequestFinished)
    assert none(bench.seen, RequestTraced)


def test_spans_come_before_the_end_and_say_what_failed() -> None:
    bench = Bench()
    bench.submit("a", 40, route=DecodeHere(), traceparent=PARENT)
    plan = bench.plan()
    assert plan is not None
    bench.wait(1)
    bench.done(plan)
    bench.wait(1)
    effects = bench.abort("a")
    traced, failed = only(effects, RequestTraced), only(effects, RequestFailed)
    assert effects.index(traced) < effects.index(failed)
    assert [span.phase for span in traced.spans] == ["waiting", "", "running"]
    assert traced.error == failed.error.code
    assert (traced.rid, traced.traceparent) == ("a", PARENT)


def test_the_number_of_spans_is_bounded() -> None:
    log = SpanLog()
    for number in range(MAX_CHUNKS + 5):
        log.chunk(number, 1, 0.0, 1.0)
    for _ in range(MAX_PHASES + 2):
        log.phase("waiting", 0.0, 1.0)
    assert len(log.spans) == MAX_CHUNKS + MAX_PHASES
    assert log.dropped == 7
    assert log.spans[MAX_CHUNKS] == RequestSpan("waiting", 0.0, 1.0)
