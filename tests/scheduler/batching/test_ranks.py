"""Tensor-parallel shards under the scheduler: whose reports end a plan, whose acknowledgements a handoff waits for."""

from headrace.core.messages.orders import CancelSend, ReleaseRequest, SendChunk
from headrace.core.messages.replies import RequestFailed, RequestFinished, StageDown
from headrace.core.messages.stage_events import PlanDone, SampledToken, SendCancelled, StageReady
from headrace.core.types.requests.request import SendTo
from tests.scheduler.bench import PAGE, Bench, geometry

SAMPLER, OFFERING = 4, (0, 2, 4, 6)  # pp 2, tp 4, 2 KV heads


def bench() -> Bench:
    """Two stages of four shards, where two shards each have the same KV head."""
    made = Bench(up=False, stages=2, tp=4)
    for rank in range(8):
        made.do(
            StageReady(
                stage=rank,
                geometry=geometry(PAGE),
                offered=None if rank in OFFERING else (),
                fingerprint="f",
                data_port=1,
                kv_pages=64,
                vocab_size=1000,
            )
        )
    return made


def computed(made: Bench) -> None:
    """Compute a prompt of one chunk and sample its first token."""
    forward = made.plan()
    assert forward is not None
    made.done(forward, 7, stage=SAMPLER)


def test_a_plan_is_done_when_the_sampler_has_reported_it() -> None:
    made = bench()
    made.submit("a", 10, max_tokens=1)
    forward = made.plan()
    assert forward is not None
    sample = (SampledToken(forward.rows[0].request, 7),)
    for rank in (7, 0, 5, 3, 2, 1):
        made.do(PlanDone(stage=rank, seq=forward.seq, duration_s=0.01))
        assert made.ended() == 0
    made.do(PlanDone(stage=SAMPLER, seq=forward.seq, duration_s=0.01, samples=sample))
    assert len(made.all(RequestFinished)) == 1
    made.do(PlanDone(stage=6, seq=forward.seq, duration_s=0.01))  # overtaken
    made.assert_empty()


def test_only_ranks_that_offer_kv_have_to_acknowledge() -> None:
    made = bench()
    made.join()
    made.submit("a", 10, route=SendTo("t"))
    made.reserve()
    computed(made)
    send = made.all(SendChunk)[-1]
    for rank in OFFERING:
        assert made.ended() == 0
        made.ack(send, rank)
    assert made.ended() == 1
    assert len(made.all(ReleaseRequest)) == 1
    made.assert_empty()


def test_every_rank_has_to_confirm_a_cancelled_send() -> None:
    made = bench()
    made.join()
    made.submit("a", 10, route=SendTo("t"))
    made.reserve()
    computed(made)
    made.abort("a")
    cancel = made.all(CancelSend)[-1]
    for rank in range(8):
        assert not made.all(ReleaseRequest)
        made.do(SendCancelled(stage=rank, request=cancel.request))
    assert len(made.all(ReleaseRequest)) == 1
    made.assert_empty()


def test_the_rank_that_has_not_reported_a_plan_is_named() -> None:
    made = bench()
    made.submit("a", 10, max_tokens=1)
    forward = made.plan()
    assert forward is not None
    made.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.01))
    made.wait(made.config.stage_timeout_s + 1)
    failed = made.all(RequestFailed)[0].error
    assert failed.status == 503
    assert "rank 1 (stage 0, replica 0, shard 1) has not finished a plan" in failed.message
    assert [down.stage for down in made.all(StageDown)] == [1]
