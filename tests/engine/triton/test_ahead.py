"""Kernels compiled for Ampere, Hopper and Blackwell, at the widths of published models."""

from collections.abc import Callable
from types import SimpleNamespace
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
from headrace.engine.model.arithmetic import HeadRules, KvSlots, LatentRules, Normed, Stream
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.triton.arithmetic import TritonArithmetic
from headrace.engine.triton.products import Float8Rows, Grouped, Placing, Tile, multiply, tile_of
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


class Width(NamedTuple):
    """Of a model's products."""

    hidden: int
    inner: int
    heads: HeadRules
    head_dim: int = 128
    experts: int = 0


NORM = empty(128)
WIDTHS = {
    "Llama 3.1 8B": Width(4096, 14336, HeadRules(32, 8)),
    "Qwen3 30B-A3B": Width(2048, 768, HeadRules(32, 4, NORM, NORM, 1e-6), experts=128),
    "heads of 256": Width(4096, 14336, HeadRules(16, 8), 256),
    "heads of 64": Width(2048, 8192, HeadRules(32, 8), 64),
}


def own_product(name: str, width: Width, tile: Tile, *, float8: bool) -> None:
    """A product of our own that norms its rows, where it may."""

    def weight(*shape: int) -> Tensor | Float8Weight:
        if not float8:
            return empty(*shape)
        scales = empty(*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128, dtype=torch.float32)
        return Float8Weight(empty(*shape, dtype=torch.float8_e4m3fn), scales, 128)

    def rows(columns: int) -> Normed | Float8Rows | Tensor:
        if float8:
            scales = empty(TOKENS, columns // 128, dtype=torch.float32)
            return Float8Rows(empty(TOKENS, columns, dtype=torch.float8_e4m3fn), scales)
        powers = empty(TOKENS, columns // 128, dtype=torch.float32)
        return Normed(Stream(empty(TOKENS, columns), powers), empty(columns), 1e-5)

    hidden, inner, query = width.hidden, width.inner, width.heads.query_heads
    if name == "gated" and width.experts:
        sources = empty(8 * TOKENS, dtype=torch.int32)
        grouped = Grouped(SortedRows(sources, sources, empty(width.experts, dtype=torch.int32)), 8)
        x = rows(hidden) if float8 else empty(TOKENS, hidden)
        multiply(name, x, weight(width.experts, 2 * inner, hidden), empty(8 * TOKENS, inner), tile, grouped=grouped)
    elif name == "gated":
        multiply(name, rows(hidden), weight(2 * inner, hidden), empty(TOKENS, inner), tile)
    elif name == "added":
        x = rows(inner) if float8 else empty(TOKENS, inner)
        multiply(name, x, weight(hidden, inner), empty(TOKENS, hidden), tile)
    else:
        turns = empty(TOKENS, 1, width.head_dim, dtype=torch.float32)
        slots = KvSlots(empty(4096, width.head_dim), empty(TOKENS, dtype=torch.int64), PAGE_SIZE, print)
        placing = Placing(width.heads, turns, turns, slots)
        qkv, out = weight(width.heads.heads * width.head_dim, hidden), empty(TOKENS, query, width.head_dim)
        multiply(name, rows(hidden), qkv, out, tile, placing=placing)


def tile(capability: int, name: str, width: Width, *, float8: bool) -> Tile:
    """On such a GPU."""
    found = SimpleNamespace(major=capability // 10)
    with patch.object(torch.cuda, "get_device_properties", lambda _: found):
        return tile_of(name, torch.device("cuda"), width.head_dim // 2 if name == "heads" else 0, in_float8=float8)


COMMON = [("Llama 3.1 8B", "gated"), ("Llama 3.1 8B", "added"), ("Llama 3.1 8B", "heads"), ("Qwen3 30B-A3B", "gated")]
OWN = [
    pytest.param(model, name, at, marks=() if at == HOPPER and (model, name) in COMMON else pytest.mark.full)
    for model in WIDTHS
    for name in (("heads",) if model.startswith("heads") else ("gated", "added", "heads"))
    for at in (80, 90, 100)
]


@pytest.mark.parametrize(("model", "name", "capability"), OWN)
def test_products_of_our_own_use_matrix_units(model: str, name: str, capability: int) -> None:
    width = WIDTHS[model]
    with recorded() as launches:
        own_product(name, width, tile(capability, name, width, float8=False), float8=False)
    [taken] = (compiled(launch, capability) for launch in launches)
    assert taken.fits(capability), f"it takes {taken}"
    assert taken.instructions[{80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]], taken.instructions


@pytest.mark.parametrize("capability", [pytest.param(90, marks=pytest.mark.full), BLACKWELL])
@pytest.mark.parametrize("name", ["gated", "added", "heads"])
@pytest.mark.parametrize("model", WIDTHS)
def test_products_of_our_own_in_float8(model: str, name: str, capability: int) -> None:
    width = WIDTHS[model]
    with recorded() as launches:
        own_product(name, width, tile(capability, name, width, float8=True), float8=True)
    taken = compiled(launches[-1], capability)
    assert taken.fits(capability), f"it takes {taken}"
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
