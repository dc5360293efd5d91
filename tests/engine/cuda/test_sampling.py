"""Sampling on a GPU: the host waits once, for what was sampled."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.requests.request import SamplingParams, TokenHistory
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
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_once(gpu: FakeGpu, tmp_path: Path, kind: str) -> None:
    rows = KINDS[kind]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made:
        with gpu.counted() as forward:
            hidden = made.forward(rows)
        with gpu.counted() as sampling:
            made.sample(rows, hidden)
    assert not forward.syncs
    assert sampling.syncs.total() == 1, sampling.described()


def test_logprobs_take_one_more_wait(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = [row(1, 0, 100, sample=replace(GREEDY, logprobs=5)), row(2, 40, 1, first_page=20, sample=GREEDY)]
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made:
        hidden = made.forward(rows)
        with gpu.counted() as sampling:
            result = made.sample(rows, hidden)
    assert [sampled.logprob is None for sampled in result.samples] == [False, True]
    assert sampling.syncs.total() == 2, sampling.described()
