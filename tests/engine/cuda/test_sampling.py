"""Sampling on a GPU: nothing waits for what was sampled; a plan's result is read when the device is done with it."""

from pathlib import Path

import pytest
import torch
import zmq
from msgspec.structs import replace

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.runtime.clock import SystemClock
from headrace.core.types import packed
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.kv.device_copies import begin_copy
from headrace.engine.outbox import ComputedPlan, DeviceOutbox, EventOutbox, QueuedPlan
from headrace.engine.row_sampler import FedTokens
from headrace.engine.telemetry.meter import Meter
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.cuda.models import GREEDY, fake_runner, row

DRAWN = SamplingParams(temperature=0.7, seed=3)
KINDS: dict[str, list[PlanRow]] = {
    "greedy": [row(1, 0, 100, sample=GREEDY), row(2, 40, 1, first_page=20, sample=GREEDY)],
    "drawn": [row(1, 0, 100, sample=DRAWN), row(2, 40, 1, first_page=20, sample=GREEDY)],
    "filtered": [
        row(1, 0, 100, sample=SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=3)),
        row(2, 40, 1, first_page=20, sample=DRAWN),
    ],
    "early stop": [row(1, 0, 100, sample=SamplingParams(temperature=0.0, stop_token_ids=(7, 9), min_tokens=3))],
    "penalties": [
        replace(
            row(1, 0, 4, sample=SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias=((5, 1.0),))),
            history=TokenHistory(packed.pack([1, 2, 3]), b""),
        )
    ],
    "prompt logprobs": [replace(row(1, 0, 300), prompt_logprobs=2)],
    "chunks": [row(1, 0, 100), row(2, 40, 1, first_page=20, sample=GREEDY), row(3, 0, 50, first_page=30)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_for_nothing(gpu: FakeGpu, tmp_path: Path, kind: str) -> None:
    rows = KINDS[kind]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, gpu.counted() as counts:
        sampling = made.sample(rows, made.forward(rows))
        assert not counts.syncs, counts.described()
        result = sampling.result()
    assert [sampled.request for sampled in result.samples] == [row.request for row in rows if row.sample]
    assert counts.syncs.total() == 1, "for the event behind it"


def test_tokens_stay_on_the_device_for_the_next_plans(gpu: FakeGpu, tmp_path: Path) -> None:
    """Three plans of one request are queued before the first of them has ended."""
    first = [row(1, 0, 100, sample=GREEDY)]
    later = [[replace(row(1, at, 1, sample=GREEDY), tokens=b"")] for at in (100, 101)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, gpu.counted() as counts:
        samplings = [made.sample(rows, made.forward(rows)) for rows in (first, *later)]
        assert not counts.syncs, counts.described()
        assert all(sampling.outcome is None for sampling in samplings)
        samplings[2].result()
        assert all(sampling.outcome is not None for sampling in samplings), "in their order"
        made.sample(later[1], made.forward(later[1]))


def test_tokens_of_another_rank_stay_on_the_device(gpu: FakeGpu, tmp_path: Path) -> None:
    decoding = [replace(row(1, 100, 1), tokens=b"")]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made:
        fed = FedTokens({1: 0}, torch.tensor([5], device="cuda"))
        with gpu.counted() as counts:
            made.feed(fed)
            made.forward(decoding)
    assert not counts.syncs, counts.described()


def test_penalties_wait_for_the_tokens_that_they_follow_from(gpu: FakeGpu, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    history = TokenHistory(packed.pack([1, 2, 3]), b"")
    first = [replace(row(1, 0, 4, sample=params), history=history)]
    second = [replace(row(1, 4, 1, sample=params), tokens=b""), row(2, 0, 100, first_page=20, sample=GREEDY)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made:
        before = made.sample(first, made.forward(first))
        with gpu.counted() as counts:
            hidden = made.forward(second)
            assert not counts.syncs, "layers do not need them on the host"
            made.sample(second, hidden).result()
        assert before.outcome is not None
    assert counts.syncs.total() <= 3, counts.described()


def test_a_request_that_has_ended_leaves_nothing(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = [row(1, 0, 100, sample=GREEDY), row(2, 40, 1, first_page=20, sample=GREEDY)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made:
        sampling = made.sample(rows, made.forward(rows))
        made.release(1)
        assert [sampled.request for sampled in sampling.result().samples] == [2]
        assert (made._sampler._last.keys(), made._sampler._on_device) == ({2}, {})


def test_logprobs_are_read_with_the_tokens(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = [row(1, 0, 100, sample=replace(GREEDY, logprobs=5)), row(2, 40, 1, first_page=20, sample=GREEDY)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, gpu.counted() as counts:
        sampling = made.sample(rows, made.forward(rows))
        assert not counts.syncs, counts.described()
        result = sampling.result()
    assert [sampled.logprob is None for sampled in result.samples] == [False, True]


def test_nan_in_chunks_is_found_without_a_wait(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that sample nothing are looked at, too: what they leave in the prefix cache is shared."""
    copies: list[torch.Tensor] = []

    def copied(values: torch.Tensor) -> torch.Tensor:
        """The second of two chunks comes out NaN."""
        copies.append(values)
        return torch.tensor([True, False]) if values.dtype is torch.bool else begin_copy(values)

    monkeypatch.setattr("headrace.engine.row_sampler.begin_copy", copied)
    rows = KINDS["chunks"]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, gpu.counted() as counts:
        sampling = made.sample(rows, made.forward(rows))
        assert not counts.syncs, counts.described()
        result = sampling.result()
    assert [tuple(values.shape) for values in copies if values.dtype is torch.bool] == [(2,)]
    assert (result.nonfinite, [sampled.request for sampled in result.samples]) == ([3], [2])


def test_a_plan_is_reported_with_what_it_sampled(gpu: FakeGpu, tmp_path: Path) -> None:
    """By the thread that waits for the device."""
    rows = [row(1, 0, 100, sample=GREEDY)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, zmq.Context() as context:
        outbox, meter = EventOutbox(context), Meter(0, SystemClock())
        reports = DeviceOutbox(outbox, torch.device("cuda:0"), meter)
        meter.begin(Forward(seq=7, rows=tuple(rows)))
        meter.mark()
        reports.begin()
        sampling = made.sample(rows, made.forward(rows))
        meter.mark()
        run, seconds = meter.end()
        reports.post(QueuedPlan(run, 0, seconds, sampling))
        assert outbox.reader.poll(10_000)
        [item] = outbox.drain()
        assert isinstance(item, ComputedPlan)
        assert [sampled.request for sampled in item.done.samples] == [1]
        reports.close()
        outbox.close()
