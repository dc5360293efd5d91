"""Passes through CUDA graphs by the kernels for GPUs, whose padding has no slots; by Triton's interpreter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.model.arithmetic import TorchArithmetic
from tests.engine.graphed import PAGE_SIZE, captured, check_same, make
from tests.engine.models import Prompt, Saved, random_tokens
from tests.engine.recorded_graphs import Device


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy has them of padding
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen3-moe", "deepseek-v3"))]
)
def test_passes_by_the_kernels_for_gpus(
    saved: Callable[[str], Saved],
    device: Device,
    interpreted: TorchArithmetic,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    known: dict[str, Any] = type(interpreted).add_norm.__globals__
    launch = known["launch"]

    def launched(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        if device.open is not None:
            device.open.call(partial(launch, kernel, grid), *arguments, **constants)
        else:
            launch(kernel, grid, *arguments, **constants)

    monkeypatch.setitem(known, "launch", launched)
    plain, graphed = make(saved(name).folder), make(saved(name).folder, interpreted)
    plain.pool.tensor.fill_(torch.nan)
    captured(graphed, 16)
    counts = [each.expert_rows.counts() if each.expert_rows else np.zeros(1) for each in (plain, graphed)]
    pages = [[4, 7, 2], [5, 1, 9]]
    prompts = [Prompt(each, random_tokens(20, each), pages[each], PAGE_SIZE) for each in range(2)]
    for rows in (
        [prompts[0].row(0, 9), prompts[1].row(0, 2)],
        [prompts[1].row(2, 1), prompts[0].row(9, 1)],
        [prompts[1].row(3, 13)],
    ):
        before = device.replays
        check_same(graphed.forward(rows), plain.forward(rows))
        check_same(graphed.pool.tensor, plain.pool.tensor)
        assert device.replays - before == 4
    for each, old in zip((plain, graphed), counts, strict=True):
        old -= each.expert_rows.counts() if each.expert_rows else 0
    assert (counts[0] == counts[1]).all()
