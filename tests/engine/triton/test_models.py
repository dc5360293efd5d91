"""Models with the arithmetic in Triton, by its interpreter, against the same models without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.core.config import Dtype, EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.engine import runner
from headrace.engine.attention import ChosenAttention
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.layers import moe, native_decoder
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.runner import ModelRunner
from tests.cpus import cpuinfo
from tests.engine.models import GREEDY, LATENTS, Prompt, Saved, random_tokens, reported_logprobs


def make(
    folder: Path, arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch, dtype: Dtype = "float32"
) -> ModelRunner:
    """As on a GPU: 16 bits are multiplied as such, and keys and values are placed before attention."""
    monkeypatch.setattr(moe, "can_group", lambda *_: True)
    monkeypatch.setattr(runner, "choose_arithmetic", lambda *_: arithmetic)
    monkeypatch.setattr(
        native_decoder, "choose_attention", lambda pool, **_: ChosenAttention(partial(SdpaPass, pool), "torch")
    )
    model = ModelConfig(model=str(folder), dtype=dtype, device="cpu")
    made = ModelRunner(plan_rank(model, EngineConfig(kv_pages=16, threads=1, cpuinfo=cpuinfo("bf16")), 128))
    made.pool.tensor.fill_(torch.nan)  # what was not written must not be read
    return made


def plans() -> list[list[PlanRow]]:
    """Chunks behind prefixes, and rows that decode beside them."""
    one, two = (Prompt(number, random_tokens(length, number), [3 * number, 3 * number + 2, 3 * number + 1], 16)
                for number, length in enumerate((5, 21)))  # fmt: skip
    decoding = {"tokens": b"", "sample": GREEDY}
    return [
        [one.row(0, 5, sample=GREEDY), two.row(0, 9)],
        [two.row(9, 12, sample=GREEDY), one.row(5, 1, **decoding)],
        [one.row(6, 1, **decoding), two.row(21, 1, **decoding)],
    ]


MODELS = ["llama", "qwen3-moe", "deepseek-v3"]
OTHERS = ["qwen3", *(name for name in LATENTS if name not in MODELS)]


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_same_tokens(
    saved: Callable[[str], Saved], interpreted: TorchArithmetic, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = saved(name).folder
    fused, plain = (make(folder, each, monkeypatch) for each in (interpreted, TorchArithmetic()))
    for rows in plans():
        for one, other in zip(fused.execute(rows)[0], plain.execute(rows)[0], strict=True):
            assert one.token == other.token
            torch.testing.assert_close(reported_logprobs(one), reported_logprobs(other), atol=2e-4, rtol=2e-4)
