"""Handoff from one of several replicas: acknowledgements of its ranks, and of no others (S7)."""

from headrace.core.messages.orders import CancelSend, ReplicaOrder, SendChunk
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import ChunkAcked, SendCancelled, SendFailed
from headrace.core.types.requests.request import SendTo
from tests.scheduler.bench import Bench, none
from tests.scheduler.state.test_binding import Replicas, prompt


def computed() -> tuple[Replicas, SendChunk]:
    """A prompt of replica 1, computed on both of its stages (ranks 1 and 3), and ordered out."""
    bench = Replicas(dp=2, stages=2)
    bench.join()
    bench.submit("a", prompt(10), route=SendTo("t"), replica=1)
    bench.reserve("t", 10)
    bench.run()
    sends = [one for one in bench.all(ReplicaOrder) if isinstance(one.order, SendChunk)]
    assert {one.replica for one in sends} == {1}
    send = sends[-1].order
    assert isinstance(send, SendChunk)
    assert send.last is not None
    return bench, send


def ack(bench: Bench, send: SendChunk, rank: int) -> list[object]:
    return list(bench.do(ChunkAcked(stage=rank, request=send.request, chunk=send.chunk, bytes=1)))


def test_done_when_every_rank_of_the_replica_has_acknowledged() -> None:
    bench, send = computed()
    for rank in (0, 2):
        ack(bench, send, rank)
    assert bench.metric("dropped_messages_total", "duplicate_ack") == 2, "ranks of the other replica have no part in it"
    ack(bench, send, 1)
    assert none(bench.seen, RequestFinished)
    ack(bench, send, 3)
    assert bench.finished().reason == "handoff"


def test_one_failed_rank_fails_it() -> None:
    bench, send = computed()
    ack(bench, send, 3)
    bench.do(SendFailed(stage=1, request=send.request, code="bad_chunk", message="refused"))
    assert bench.error().code == "bad_chunk"
    cancels = [one for one in bench.all(ReplicaOrder) if isinstance(one.order, CancelSend)]
    assert [one.replica for one in cancels] == [1]
    bench.do(SendCancelled(stage=1, request=send.request))
    assert not bench.scheduler.idle
    bench.do(SendCancelled(stage=3, request=send.request))
    assert bench.scheduler.idle
