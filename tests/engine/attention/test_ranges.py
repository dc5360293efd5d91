"""Native attention with ranges (windows, chunks, blocks that see each other), capped scores and sinks, against sums
written out in float64."""

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import headrace.engine.attention.native as native_attention
from headrace.engine.attention.native import NativeWork
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.work import PagedRows, Ranges
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from tests.engine.attention.test_cpu import make_spans
from tests.engine.kernels import assert_same_bits, normal

KV_HEADS, GROUP, PAGE, PAGES = 2, 3, 16, 64
Range = Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]]


def window(size: int) -> Range:
    return lambda positions: (np.maximum(positions - size + 1, 0), positions + 1)


def chunk(size: int) -> Range:
    return lambda positions: (positions // size * size, positions + 1)


def block(first: int, last: int, size: int) -> Range:
    """Positions [first, last) see each other, besides a window."""

    def of(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        begins, ends = window(size)(positions)
        inside = (positions >= first) & (positions < last)
        return np.where(inside, np.minimum(begins, first), begins), np.where(inside, last, ends)

    return of


class Case(NamedTuple):
    """Keys and values of a pool, queries of a batch and what is asked of their attention."""

    rows: PagedRows
    spans: list[AttentionSpan]
    query: Tensor
    ranges: Ranges
    softcap: float
    sinks: Tensor | None


def ranges_of(of: Range, spans: list[AttentionSpan]) -> Ranges:
    parts = [of(np.arange(span.start, span.start + span.count)) for span in spans]
    return Ranges(*(np.concatenate(each).astype(np.int32) for each in zip(*parts, strict=True)))


def make_case(
    shapes: list[tuple[int, int]], of: Range, *, widths: tuple[int, int], dtype: torch.dtype, softcap: float,
    sinks: bool, seed: int,
) -> Case:  # fmt: skip
    """What no row attends to is NaN."""
    spans = make_spans(shapes, PAGE, PAGES, seed)
    keys, values = (normal(PAGES, 1, KV_HEADS, PAGE, width, seed=seed + width).to(dtype) for width in widths)
    ranges = ranges_of(of, spans)
    seen = torch.zeros(PAGES, PAGE, dtype=torch.bool)
    row = 0
    for span in spans:
        for position in range(ranges.begins[row], ranges.ends[row + span.count - 1]):
            seen[span.pages[position // PAGE], position % PAGE] = True
        row += span.count
    for each in (keys, values):
        each.masked_fill_(~seen[:, None, None, :, None], torch.nan)
    query = normal(row, KV_HEADS * GROUP, widths[0], seed=seed)
    of_heads = normal(KV_HEADS * GROUP, seed=seed) * 3 if sinks else None
    return Case(PagedRows(keys, values, widths[1]), spans, query, ranges, softcap, of_heads)


def attended(case: Case, kernels: Kernels, query: Tensor | None = None) -> Tensor:
    width = case.query.shape[2]
    work = NativeWork(kernels, case.spans, case.rows, width**-0.5, softcap=case.softcap, ranges=case.ranges)
    return work.attend(0, case.query if query is None else query, case.sinks)


def written_out(case: Case) -> Tensor:
    keys, values, value_width = case.rows
    assert values is not None
    output = torch.empty(*case.query.shape[:2], value_width, dtype=torch.float64)
    row = 0
    for span in case.spans:
        for _ in range(span.count):
            positions = np.arange(case.ranges.begins[row], case.ranges.ends[row])
            pages, slots = span.pages[positions // PAGE], positions % PAGE
            for head in range(case.query.shape[1]):
                of = (pages, 0, head // GROUP, slots)
                scores = keys[of].double() @ case.query[row, head].double() * case.query.shape[2] ** -0.5
                if case.softcap:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                if case.sinks is not None:
                    scores = torch.cat((scores, case.sinks[head : head + 1].double()))
                output[row, head] = scores.softmax(0)[: len(positions)] @ values[of].double()
            row += 1
    return output


@pytest.fixture(scope="module", params=["256 bits", "512 bits", "emulated"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Emulated: attention in bfloat16 as on a CPU with its instructions."""
    wide = request.param != "256 bits"
    found = load_kernels(wide=wide, bfloat16=wide, emulate=request.param == "emulated")
    if found is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    return found


shapes_of = st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(2, 90))), min_size=1, max_size=3)
ranges_st = st.one_of(
    st.builds(window, st.sampled_from([1, 2, 7, 16, 33, 500])),
    st.builds(chunk, st.sampled_from([8, 50])),
    st.builds(block, st.just(20), st.just(30), st.sampled_from([4, 40])),
)


@settings(max_examples=50, deadline=None)
@given(
    shapes=shapes_of, of=ranges_st, widths=st.sampled_from([(16, 16), (24, 16), (16, 40)]),
    softcap=st.sampled_from([0.0, 2.0, 50.0]), sinks=st.booleans(), segment=st.sampled_from([128, 2048]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_float32_equals_what_is_written_out(
    kernels: Kernels, shapes: list[tuple[int, int]], of: Range, widths: tuple[int, int], softcap: float, sinks: bool,
    segment: int, seed: int,
) -> None:  # fmt: skip
    shapes = [(start, count) for start, count in shapes if start + count >= 30 or start + count <= 20]
    case = make_case(
        shapes or [(0, 5)], of, widths=widths, dtype=torch.float32, softcap=softcap, sinks=sinks, seed=seed
    )
    with patch.object(native_attention, "SEGMENT", segment), patch.object(torch, "get_num_threads", lambda: 4):
        found = attended(case, kernels)
    torch.testing.assert_close(found.double(), written_out(case), atol=2e-5, rtol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    shapes=shapes_of, size=st.sampled_from([1, 7, 33, 500]), width=st.sampled_from([16, 80]), sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 20.0]), segment=st.sampled_from([128, 2048]), seed=st.integers(0, 9),
)  # fmt: skip
def test_bfloat16_equals_what_is_written_out(
    kernels: Kernels, shapes: list[tuple[int, int]], size: int, width: int, sinks: bool, softcap: float, segment: int,
    seed: int,
) -> None:  # fmt: skip
    case = make_case(
        shapes, window(size), widths=(width, width), dtype=torch.bfloat16, softcap=softcap, sinks=sinks, seed=seed
    )
    case = case._replace(query=case.query.bfloat16())
    with patch.object(native_attention, "SEGMENT", segment), patch.object(torch, "get_num_threads", lambda: 4):
        found = attended(case, kernels)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), written_out(case), atol=3e-2, rtol=2e-2)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=5), of=st.sampled_from([1, 7, 33, 200]),
    rounded=st.booleans(), softcap=st.sampled_from([0.0, 20.0]), segment=st.sampled_from([128, 2048]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_bits_do_not_depend_on_chunks(
    kernels: Kernels, sizes: list[int], of: int, rounded: bool, softcap: float, segment: int, seed: int
) -> None:
    """A prompt whole, and in chunks, where pages behind the window have something else."""
    dtype = torch.bfloat16 if rounded else torch.float32
    count = sum(sizes)
    whole = make_case([(0, count)], window(of), widths=(16, 16), dtype=dtype, softcap=softcap, sinks=True, seed=seed)
    whole = whole._replace(query=whole.query.to(dtype))
    parts, start = [], 0
    with patch.object(native_attention, "SEGMENT", segment), patch.object(torch, "get_num_threads", lambda: 4):
        for size in sizes:
            keys, values, width = whole.rows
            assert values is not None
            span = AttentionSpan(start, size, whole.spans[0].pages)
            keys, values = keys.clone(), values.clone()
            behind = max(0, start - of + 1) // PAGE
            for each in (keys, values):
                each[span.pages[:behind]] = torch.nan
            part = whole._replace(
                rows=PagedRows(keys, values, width), spans=[span], query=whole.query[start : start + size],
                ranges=ranges_of(window(of), [span]),
            )  # fmt: skip
            parts.append(attended(part, kernels))
            start += size
        assert_same_bits(torch.cat(parts), attended(whole, kernels))


def test_all_of_it_is_causal_attention(kernels: Kernels) -> None:
    """Ranges that say what is so without them give the same bits."""
    case = make_case(
        [(0, 70), (40, 1)], window(1000), widths=(16, 16), dtype=torch.float32, softcap=0.0, sinks=False, seed=1
    )
    without = NativeWork(kernels, case.spans, case.rows, 0.25).attend(0, case.query)
    assert_same_bits(attended(case, kernels), without)
