"""The CPU attention against the plain one, over random batches."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.engine.attention.cpu as cpu
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.attention import choose_attention
from headrace.engine.attention.cpu import CpuPass
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.paged import Attention, AttentionSpan
from headrace.engine.device import has_bfloat16_vectors, has_matrix_units, has_wide_vectors
from headrace.engine.kv.pool import KVPool
from headrace.engine.native.kernel_calls import load_kernels
from tests.cpus import KINDS, cpuinfo
from tests.engine.attention.passes import attend

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGES = 6, 2, 16, 2, 128


def make_pool(page_size: int, dtype: str = "float32", pages: int = PAGES) -> KVPool:
    """Random where a request may have been, and the same every time."""
    pool = KVPool(Geometry(dtype, LAYERS, KV_HEADS, HEAD_DIM, page_size), pages)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def make_spans(shapes: list[tuple[int, int]], page_size: int, pages: int, seed: int) -> list[AttentionSpan]:
    """Of (start, count) each, over pages of their own in any order."""
    order = np.random.default_rng(seed).permutation(pages)
    spans = []
    for start, count in shapes:
        needed = -(-(start + count) // page_size)
        spans.append(AttentionSpan(start, count, order[:needed]))
        order = order[needed:]
    return spans


def poison_unused(pool: KVPool, spans: list[AttentionSpan]) -> None:
    """NaN everywhere but in the positions before each span."""
    clean = pool.tensor.clone()
    pool.tensor.fill_(float("nan"))
    size = pool.geometry.page_size
    for span in spans:
        for position in range(span.start):
            page, slot = span.pages[position // size], position % size
            pool.tensor[page, :, :, :, slot] = clean[page, :, :, :, slot]


def run(attention: Attention, spans: list[AttentionSpan], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Outputs per layer for the same queries, keys and values every time, rounded to bfloat16 first."""
    tokens = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(2)
    running = attention(spans)
    outputs = []
    for layer in range(LAYERS):
        query = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).bfloat16().to(dtype)
        keys_values = torch.randn(tokens, 2 * KV_HEADS, HEAD_DIM, generator=generator).bfloat16().to(dtype)
        outputs.append(attend(running, layer, query, keys_values))
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*KINDS, "sdpa"])
@pytest.mark.parametrize(("start", "count"), [(50, 1), (70, 1), (40, 30), (0, 40)])
def test_nan_in_a_key_or_value_shows_in_all_that_see_it(kind: str, dtype: str, start: int, count: int) -> None:
    """A NaN score must not be dropped by the maximum: the position would be left out unnoticed."""
    torch_dtype = getattr(torch, dtype)
    spans = make_spans([(start, count), (30, 1), (20, 9)], 16, PAGES, seed=1)

    def attended(bad: tuple[int, int] | None) -> torch.Tensor:
        pool = make_pool(16, dtype)
        native = kind == "sdpa" or has_matrix_units(dtype, "cpu", cpuinfo(kind))
        attention: Attention = partial(SdpaPass, pool)
        if kind != "sdpa":
            kernels = load_kernels(wide=has_wide_vectors(cpuinfo(kind)), bfloat16=has_bfloat16_vectors(cpuinfo(kind)))
            attention = choose_attention(pool, native_units=native, kernels=kernels).begin
        compute = torch_dtype if native else torch.float32
        tokens = sum(span.count for span in spans)
        generator = torch.Generator().manual_seed(2)
        query = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(compute)
        keys_values = torch.randn(tokens, 2 * KV_HEADS, HEAD_DIM, generator=generator).to(compute)
        if bad is not None:
            position, plane = bad
            if position < start:
                pool.tensor[spans[0].pages[position // 16], 0, plane, 0, position % 16, 3] = torch.nan
            else:
                keys_values[position - start, plane * KV_HEADS, 3] = torch.nan
        return attend(attention(spans), 0, query, keys_values)

    clean = attended(None)
    for position in {0, start - 1, start, start + count - 1} - {-1}:
        for plane in (0, 1):
            found = attended((position, plane))
            sees = torch.arange(start, start + count) >= position
            group, element = HEADS // KV_HEADS, slice(None) if plane == 0 else 3
            assert not found[:count][sees][:, :group, element].isfinite().any(), (position, plane)
            torch.testing.assert_close(found[count:], clean[count:], atol=0, rtol=0)
            torch.testing.assert_close(found[:count, group:], clean[:count, group:], atol=0, rtol=0)


spans_of = st.lists(st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(2, 50))), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes=spans_of, page_size=st.sampled_from([4, 16]), block=st.sampled_from([8, 128]), seed=st.integers(0, 9))
def test_cpu_attention_equals_plain_sdpa(shapes: list[tuple[int, int]], page_size: int, block: int, seed: int) -> None:
    """Any mix of chunks and single tokens, any pages in any order, NaN in every other slot."""
    spans = make_spans(shapes, page_size, PAGES, seed)
    pools = [make_pool(page_size) for _ in range(2)]
    for pool in pools:
        poison_unused(pool, spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "DIAGONAL", block)
        fast = run(partial(CpuPass, pools[0], compute_dtype=torch.float32), spans)
    plain = run(partial(SdpaPass, pools[1]), spans)
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pools[0].tensor, pools[1].tensor, equal_nan=True, atol=0, rtol=0)


def test_sixteen_bit_keys_are_attended_in_float32() -> None:
    spans = [AttentionSpan(20, 9, np.array([3, 1])), AttentionSpan(40, 1, np.array([0, 7, 5]))]
    low, high = make_pool(16, "bfloat16"), make_pool(16)
    high.tensor.copy_(low.tensor)
    found = run(choose_attention(low, native_units=False).begin, spans, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=2**-8)  # one rounding, at the end


def test_the_cpus_matrix_units_are_given_sixteen_bits() -> None:
    """Chunks and single tokens in the pool's own dtype, with and without a prefix: off by its roundings only."""
    spans = make_spans([(37, 60), (0, 150), (44, 1), (9, 1)], 16, PAGES, seed=3)
    low, high = make_pool(16, "bfloat16"), make_pool(16)
    high.tensor.copy_(low.tensor)
    found = run(choose_attention(low, native_units=True).begin, spans, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, atol=2e-2, rtol=2e-2)


def test_long_rows_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group never gathers more than its bound, and rows of very different length do not pad each other."""
    pool = make_pool(4)
    monkeypatch.setattr(cpu, "GROUP_BYTES", 40 * pool.geometry.token_bytes // LAYERS)
    lengths = [(row, AttentionSpan(start, 1, np.arange(16))) for row, start in enumerate((9, 60, 9, 9, 2, 14, 9))]
    groups = cpu.group_by_length(pool, lengths)
    assert sorted(row for group in groups for row, _ in group) == list(range(7))
    for group in groups:
        longest = max(span.start + 1 for _, span in group)
        assert len(group) == 1 or len(group) * longest <= 40
        assert longest <= cpu.GROUP_SPREAD * (min(span.start + 1 for _, span in group) + 4)
