"""Runners of small models on the CPU whose passes go through CUDA graphs (recorded_graphs.py)."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from headrace.core.config import EngineConfig, ModelConfig
from headrace.engine import runner
from headrace.engine.attention import ChosenAttention
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers import moe, native_decoder
from headrace.engine.layers.exchange import NoExchange
from headrace.engine.layers.graphs import PassGraphs
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.runner import ModelRunner

PAGE_SIZE, PAGES, LONGEST = 8, 96, 160
CLOSE = 1e-4  # the kernel that multiplies follows from the number of rows


def _by_sdpa(pool: KVPool, **_: object) -> ChosenAttention:
    return ChosenAttention(partial(SdpaPass, pool), "")


def make(
    folder: Path,
    arithmetic: Arithmetic | None = None,
    *,
    halves: int = 0,
    grouped: bool = True,
    tp: Collectives = ALONE,
) -> ModelRunner:
    """As on a GPU in float32: keys and values are placed before attention, and experts are grouped. halves: exchanges
    for passes that are cut. tp: the shards, of which this is the first."""
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    engine = EngineConfig(kv_pages=PAGES, page_size=PAGE_SIZE, threads=1, mla="length")
    plan = plan_rank(model, engine, LONGEST, tp=tp.size)
    experts = plan.terms.spec.moe.experts if plan.terms.spec.moe else 0
    with (
        patch.object(runner, "choose_arithmetic", lambda *_: arithmetic or TorchArithmetic()),
        patch.object(
            native_decoder, "choose_attention", lambda pool, **_: ChosenAttention(partial(SdpaPass, pool), "")
        ),
        patch.object(moe, "can_group", lambda *_: grouped),
    ):
        return ModelRunner(plan, exchanges=[NoExchange(experts) for _ in range(halves)], tp=tp)


def decoder(made: ModelRunner) -> NativeDecoder:
    assert isinstance(made._decoder, NativeDecoder)
    return made._decoder


def captured(made: ModelRunner, tokens: int) -> PassGraphs:
    """Have it capture graphs, and fill what passes must not read with NaN."""
    decoder(made).capture(tokens)
    found = decoder(made)._graphs
    assert found is not None
    buffers = found._buffers
    with torch.inference_mode():
        for each in (made.pool.tensor, buffers.hidden, buffers.query, buffers.attended):
            each.fill_(torch.nan)
    return found


def check_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE, equal_nan=True)
