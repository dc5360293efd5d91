"""Kernels compiled for Ampere, Hopper and Blackwell, at the widths of published models."""

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.engine.attention import triton_work
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.triton_work import TritonWork
from headrace.engine.attention.work import PagedRows, Ranges
from headrace.engine.model.arithmetic import HeadRules, KvSlots, LatentRules
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.triton.arithmetic import TritonArithmetic
from tests.engine.layers.mixtures import SPECS
from tests.engine.triton.ahead import compiled, recorded

TOKENS, PAGE_SIZE = 2048, 16
AMPERE, HOPPER, BLACKWELL = pytest.param(80, marks=pytest.mark.full), 90, pytest.param(100, marks=pytest.mark.full)
QWEN = replace(SPECS["qwen3"], experts=128, top_k=8)
DEEPSEEK = replace(
    SPECS["qwen3"], experts=256, top_k=8, groups=8, top_groups=4, group_score="two best", scores="sigmoid",
    choice_bias=True, normalized=True, scaling=2.5,
)  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def place(arithmetic: TritonArithmetic, query: int, kv: int, *, normed: bool) -> None:
    weight = empty(128) if normed else None
    turns = empty(TOKENS, 1, 128, dtype=torch.float32)
    slots = KvSlots(empty(4096, 128), empty(TOKENS, dtype=torch.int64), PAGE_SIZE, print)
    rules = HeadRules(query, kv, weight, weight, 1e-6)
    arithmetic.place_heads(empty(TOKENS, query + 2 * kv, 128), rules, turns, turns, slots)


def experts(arithmetic: TritonArithmetic) -> None:
    choice = ExpertChoice(empty(TOKENS, 8, dtype=torch.int64), empty(TOKENS, 8, dtype=torch.float32))
    sources = empty(TOKENS * 8, dtype=torch.int32)
    rows = SortedRows(sources, sources, empty(32, dtype=torch.int32))
    arithmetic.sort_rows(choice.experts, range(32, 64), empty(32, dtype=torch.int64), 256)
    arithmetic.take_rows(empty(TOKENS, 7168), rows, 8)
    arithmetic.gate_rows(empty(TOKENS * 8, 4096), rows)
    arithmetic.combine_rows(empty(TOKENS * 8, 7168), rows, choice)


def latents(arithmetic: TritonArithmetic, query_rank: int, query: int) -> None:
    """query: heads."""
    turns = empty(TOKENS, 1, 64, dtype=torch.float32)
    slots = KvSlots(empty(4096, 576), empty(TOKENS, dtype=torch.int64), PAGE_SIZE, print)
    rules = LatentRules(empty(query_rank) if query_rank else None, empty(512), 64, 1e-6)
    arithmetic.place_latents(empty(TOKENS, (query_rank or query * 192) + 576), rules, turns, turns, slots)
    arithmetic.rotate_pairs(empty(TOKENS, query, 192)[..., 128:], turns, turns)


CASES: dict[str, Callable[[TritonArithmetic], object]] = {
    "norm of 4,096": lambda made: made.add_norm(empty(TOKENS, 4096), empty(TOKENS, 4096), empty(4096), 1e-5),
    "norm of 8,192": lambda made: made.add_norm(empty(TOKENS, 8192), empty(TOKENS, 8192), empty(8192), 1e-5),
    "gate of Llama 8B": lambda made: made.gate(empty(TOKENS, 2 * 14336)),
    "heads of Llama 8B": lambda made: place(made, 32, 8, normed=False),
    "heads of Qwen3 30B-A3B": lambda made: place(made, 32, 4, normed=True),
    "choice of Qwen3 30B-A3B": lambda made: made.choose(empty(TOKENS, 128), QWEN),
    "choice of DeepSeek V3": lambda made: made.choose(
        empty(TOKENS, 256, dtype=torch.float32), DEEPSEEK, empty(256, dtype=torch.float32), slice(256, 512)
    ),
    "experts of DeepSeek V3": experts,
    "latents of DeepSeek V3": lambda made: latents(made, 1536, 16),
    "latents of DeepSeek V2 Lite": lambda made: latents(made, 0, 16),
}


def product(arithmetic: TritonArithmetic, rows: int, experts: int) -> None:
    """Of a shard of DeepSeek V3's experts, or of Qwen3 8B."""
    shape = (experts, 4096, 7168) if experts else (24576, 4096)
    scales = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    weight = Float8Weight(empty(*shape, dtype=torch.float8_e4m3fn), empty(*scales, dtype=torch.float32), 128)
    x = empty(rows, shape[-1])
    if experts:
        sources = empty(rows, dtype=torch.int32)
        arithmetic.grouped_linear(x, weight, SortedRows(sources, sources, empty(experts, dtype=torch.int32)))
    else:
        arithmetic.linear(x, weight)


PRODUCTS: dict[str, Callable[[TritonArithmetic], object]] = {
    "few rows": lambda made: product(made, 64, 0),
    "many rows": lambda made: product(made, TOKENS, 0),
    "few rows of experts": lambda made: product(made, 1024, 32),
    "many rows of experts": lambda made: product(made, TOKENS * 8, 32),
}


class Heads(NamedTuple):
    query: int
    kv: int
    width: int
    softcap: float = 0.0
    sinks: bool = False
    ranged: bool = True


ATTENTION = {
    "Llama 3.1 8B": Heads(32, 8, 128, ranged=False),
    "Llama 3.2 1B": Heads(32, 8, 64, ranged=False),
    "Gemma 3 27B": Heads(32, 16, 128),
    "Gemma 2 9B": Heads(16, 8, 256, softcap=50.0),
    "gpt-oss": Heads(64, 8, 64, sinks=True),
    "Phi 3": Heads(32, 32, 96),
}


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("tokens", [1, 700])
def test_attention_uses_matrix_units(name: str, tokens: int, capability: int) -> None:
    heads = ATTENTION[name]
    pages = empty(64, 2, heads.kv, PAGE_SIZE, heads.width)
    spans = [AttentionSpan(40, tokens, np.arange(64))]
    numbers = np.zeros(tokens, np.int32)
    ranges = Ranges(numbers, numbers) if heads.ranged else None
    work = TritonWork(spans, PagedRows(pages, pages, heads.width), 0.1, softcap=heads.softcap, ranges=ranges)
    with recorded() as launches, patch.object(triton_work, "place", lambda values, _: torch.from_numpy(values)):
        work.attend(1, empty(tokens, heads.query, heads.width), empty(heads.query) if heads.sinks else None)
    taken = compiled(launches[0], capability)
    assert taken.fits(capability), f"attend takes {taken}"
    assert sum(taken.instructions[name] for name in ("HMMA", "HGMMA", "UTCHMMA")), taken.instructions


MATRIX_UNITS = {90: "QGMMA", 100: "UTCQMMA"}  # instructions that multiply matrices in FP8


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_float8_use_matrix_units(name: str, capability: int) -> None:
    with recorded() as launches:
        PRODUCTS[name](TritonArithmetic())
    for launch in launches:
        taken = compiled(launch, capability)
        assert taken.fits(capability), f"{launch.kernel.__name__} takes {taken}"
    assert taken.instructions[MATRIX_UNITS[capability]], taken.instructions


def test_a_kernel_that_takes_too_much_is_found() -> None:
    with recorded() as launches:
        TritonArithmetic().add_norm(empty(1, 1 << 17), empty(1, 1 << 17), empty(1 << 17), 1e-5)
    assert not compiled(launches[0], 90).fits(90)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("name", CASES)
def test_kernels_fit(name: str, capability: int) -> None:
    with recorded() as launches:
        CASES[name](TritonArithmetic())
    assert launches
    for launch in launches:
        taken = compiled(launch, capability)
        assert taken.fits(capability), f"{launch.kernel.__name__} takes {taken}"
