"""The attention of GPUs against the plain one: all of it but the kernel."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings

from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.varlen import PAGED, VarlenPass, reads_pages
from tests.engine.attention.test_cpu import PAGES, make_pool, make_spans, poison_unused, run, spans_of
from tests.engine.flash import flash_on_cpu


@pytest.mark.parametrize(("page_size", "pages", "longer"), [(16, PAGES, 1), (256, 16, 6)])
@settings(max_examples=30, deadline=None)
@given(shapes=spans_of)
def test_varlen_attention_equals_plain_sdpa(
    page_size: int, pages: int, longer: int, shapes: list[tuple[int, int]]
) -> None:
    """Any mix of chunks and single tokens, pages in any order, NaN in every other slot; gathered, and in pages."""
    shapes = [(start * longer, count if count == 1 else count * longer) for start, count in shapes]
    spans = make_spans(shapes, page_size, pages, seed=len(shapes))
    low, high = make_pool(page_size, "bfloat16", pages), make_pool(page_size, pages=pages)
    assert reads_pages(low) == (PAGED and page_size == 256)
    poison_unused(low, spans)
    high.tensor.copy_(low.tensor)
    with flash_on_cpu():
        found = run(partial(VarlenPass, low), spans, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=2**-8)  # one rounding, at the end
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)
