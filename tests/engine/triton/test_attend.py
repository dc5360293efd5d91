"""Attention over pages by our own kernel, by Triton's interpreter, against sums written out in float64."""

from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.work import MakeWork
from tests.engine.attention.test_cpu import PAGES, make_pool, make_spans, poison_unused, run
from tests.engine.attention.test_ranges import Range, block, chunk, make_case, window, written_out

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in")  # numpy's, in the interpreter
FEW = settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}
RANGES: dict[str, Range] = {
    "causal": window(1 << 20), "window": window(20), "chunk": chunk(32), "block": block(40, 70, 64),
}  # fmt: skip


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", RANGES)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 7, 45])), min_size=1, max_size=3),
    widths=st.sampled_from([(16, 16), (24, 24), (32, 16)]), softcap=st.sampled_from([0.0, 5.0]), sinks=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@FEW
def test_attention(
    interpreted_work: MakeWork, name: str, dtype: torch.dtype,
    shapes: list[tuple[int, int]], widths: tuple[int, int], softcap: float, sinks: bool, seed: int,
) -> None:  # fmt: skip
    if name == "block":  # which is in one chunk
        shapes = [(30, 45), (80, 3)]
    case = make_case(shapes, RANGES[name], widths=widths, dtype=dtype, softcap=softcap, sinks=sinks, seed=seed)
    query, scale = case.query.to(dtype), widths[0] ** -0.5
    ranges = None if name == "causal" else case.ranges
    work = interpreted_work(case.spans, case.rows, scale, softcap=softcap, ranges=ranges)
    found = work.attend(0, query, case.sinks)
    assert found.dtype == dtype
    expected = written_out(case._replace(query=query.float()))
    torch.testing.assert_close(found.double(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@given(
    shapes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 7, 40])), min_size=1, max_size=3),
    page_size=st.sampled_from([4, 16]),
)
@FEW
def test_over_a_pool(modules: dict[str, ModuleType], shapes: list[tuple[int, int]], page_size: int) -> None:
    """Of keys and values, causally: layer by layer, pages in any order, NaN in every other slot."""
    spans = make_spans(shapes, page_size, PAGES, seed=len(shapes))
    low, high = make_pool(page_size, "bfloat16"), make_pool(page_size)
    poison_unused(low, spans)
    high.tensor.copy_(low.tensor)
    found = run(partial(modules["triton_work"].TritonPass, low), spans, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans), strict=True):
        torch.testing.assert_close(one.float(), other, atol=CLOSE[torch.bfloat16], rtol=CLOSE[torch.bfloat16])
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)


def test_queries_in_a_wider_tensor_and_wider_than_the_pool(interpreted_work: MakeWork) -> None:
    case = make_case(
        [(30, 40)], RANGES["window"], widths=(16, 16), dtype=torch.bfloat16, softcap=0.0, sinks=False, seed=3
    )
    joined = torch.cat((case.query, case.query), 1)[:, : case.query.shape[1]]
    work = interpreted_work(case.spans, case.rows, 0.25, ranges=case.ranges)
    expected = written_out(case)
    torch.testing.assert_close(work.attend(0, joined).double(), expected, atol=1e-4, rtol=1e-4)


def test_pages_of_another_order_are_refused(interpreted_work: MakeWork) -> None:
    case = make_case([(0, 4)], RANGES["causal"], widths=(16, 16), dtype=torch.float32, softcap=0.0, sinks=False, seed=0)
    turned = case.rows._replace(keys=case.rows.keys.transpose(3, 4).contiguous().transpose(3, 4))
    with pytest.raises(ValueError, match="slots of a page do not lie one after the other"):
        interpreted_work(case.spans, turned, 1.0)
