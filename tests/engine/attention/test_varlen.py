"""The attention of GPUs against the plain one: all of it but the kernel."""

from functools import partial

import torch
from hypothesis import given, settings

from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.varlen import VarlenPass
from tests.engine.attention.test_cpu import PAGES, make_pool, make_spans, poison_unused, run, spans_of
from tests.engine.flash import flash_on_cpu


@settings(max_examples=40, deadline=None)
@given(shapes=spans_of)
def test_varlen_attention_equals_plain_sdpa(shapes: list[tuple[int, int]]) -> None:
    """Any mix of chunks and single tokens, pages in any order, NaN in every other slot."""
    spans = make_spans(shapes, 16, PAGES, seed=len(shapes))
    low, high = make_pool(16, "bfloat16"), make_pool(16)
    poison_unused(low, spans)
    high.tensor.copy_(low.tensor)
    with flash_on_cpu():
        found = run(partial(VarlenPass, low), spans, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=2**-8)  # one rounding, at the end
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)
