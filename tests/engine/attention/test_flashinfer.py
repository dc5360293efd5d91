"""The attention by FlashInfer against the plain one, with a double in the place of its kernels; when it is chosen."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import AttentionChoice
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.engine import attention
from headrace.engine.attention import choose_attention
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.paged import Attention, AttentionSpan
from headrace.engine.kv.pool import KVPool
from tests.engine.attention import fake_flashinfer
from tests.engine.attention.passes import attend
from tests.engine.attention.test_cpu import make_spans, poison_unused, spans_of

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGES = 6, 2, 64, 3, 128


@pytest.fixture
def flashinfer() -> Iterator[None]:
    with fake_flashinfer.installed():
        yield


def make_pool(page_size: int, dtype: str) -> KVPool:
    pool = KVPool(Geometry(dtype, LAYERS, KV_HEADS, HEAD_DIM, page_size), PAGES)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def run(begin: Attention, spans: list[AttentionSpan], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs per layer; queries are strided, as those that a layer cuts from its product."""
    tokens = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(2)
    running, outputs = begin(spans), []
    for layer in range(LAYERS):
        heads = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).bfloat16().to(dtype)
        outputs.append(attend(running, layer, heads[:, :HEADS], heads[:, HEADS:]))
    return outputs


@settings(max_examples=40, deadline=None)
@given(shapes=spans_of, page_size=st.sampled_from([1, 4, 16]), more=st.integers(0, 2))
def test_flashinfer_attention_equals_plain_sdpa(shapes: list[tuple[int, int]], page_size: int, more: int) -> None:
    """Any mix of chunks and single tokens behind prefixes, pages in any order and more of them than a row needs yet,
    heads that share keys, NaN in every other slot."""
    shapes = [(start % 20, min(count, 8)) for start, count in shapes]
    spans = make_spans(shapes, page_size, PAGES - 2, seed=len(shapes))
    low, high = make_pool(page_size, "bfloat16"), make_pool(page_size, "float32")
    poison_unused(low, spans)
    high.tensor.copy_(low.tensor)
    held = [AttentionSpan(each.start, each.count, np.append(each.pages, np.full(more, PAGES - 1))) for each in spans]
    with fake_flashinfer.installed():
        from headrace.engine.attention.flashinfer import FlashInfer

        found = run(FlashInfer(low, HEADS), held, torch.bfloat16)
    for one, other in zip(found, run(partial(SdpaPass, high), spans, torch.float32), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=2**-8)  # one rounding, at the end
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)


@pytest.mark.usefixtures("flashinfer")
def test_halves_of_a_pass_have_plans_of_their_own() -> None:
    """Their layers take turns; the passes after them take the same two again."""
    from headrace.engine.attention.flashinfer import FlashInfer

    pool = make_pool(16, "bfloat16")
    spans = make_spans([(20, 9), (3, 30)], 16, PAGES, seed=1)
    flashinfer = FlashInfer(pool, HEADS)
    query, keys_values = torch.randn(39, HEADS, HEAD_DIM).bfloat16(), torch.randn(39, 2 * KV_HEADS, HEAD_DIM)
    for _ in range(3):
        halves = [(flashinfer([spans[0]]), slice(0, 9)), (flashinfer([spans[1]]), slice(9, 39))]
        for layer in range(LAYERS):
            for half, rows in halves:
                attended = attend(half, layer, query[rows], keys_values[rows])
                whole = SdpaPass(pool, [spans[0] if half is halves[0][0] else spans[1]])
                expected = whole.attend(layer, query[rows], keys_values[rows])
                torch.testing.assert_close(attended, expected, atol=1e-2, rtol=2e-2)
    assert [each.runs for each in fake_flashinfer.made] == [3 * LAYERS] * 2


class OnGpu:
    """A pool on the CPU is taken for one on a GPU, where attention is chosen."""

    def __init__(self, dtype: str, head_dim: int) -> None:
        self._pool = KVPool(Geometry(dtype, 2, KV_HEADS, head_dim, 16), 4)

    def choose(self, wanted: AttentionChoice, heads: int = HEADS) -> attention.ChosenAttention:
        with patch.object(attention, "_on_cpu", lambda _: False):
            return choose_attention(self._pool, native_units=True, wanted=wanted, heads=heads)


def test_it_is_chosen_where_it_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    gpu = OnGpu("bfloat16", 64)
    with fake_flashinfer.installed():
        for wanted in ("auto", "flashinfer"):
            assert gpu.choose(wanted).name == "FlashInfer"
        assert len(fake_flashinfer.made) == 2, "a trial each"
        assert gpu.choose("torch").name == "torch's flash kernel behind a gather (FlashInfer: it is not wanted)"
        assert len(fake_flashinfer.made) == 2
    assert not caplog.text


CASES: list[tuple[OnGpu, dict[str, Any], int, str]] = [
    (OnGpu("bfloat16", 96), {}, 6, "it has no kernels for heads of 96"),
    (OnGpu("float32", 64), {}, 6, "it computes in bfloat16 and float16, not in float32"),
    (OnGpu("bfloat16", 64), {}, 5, "5 query heads cannot share 2 KV heads evenly"),
    (OnGpu("bfloat16", 64), {"refuses": True}, 6, "RuntimeError: Could not find nvcc"),
    (OnGpu("bfloat16", 64), {"wrong": 0.5}, 6, r"RuntimeError: its attention differs from torch's by 0\.5"),
    (OnGpu("bfloat16", 64), {"wrong": float("nan")}, 6, "RuntimeError: its attention differs from torch's by nan"),
]


@pytest.mark.parametrize(("gpu", "state", "heads", "why"), CASES)
def test_where_it_does_not_work_it_is_an_error_or_torch(
    gpu: OnGpu, state: dict[str, Any], heads: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_flashinfer.installed(**state):
        assert gpu.choose("auto", heads).name.startswith("torch")
        assert bool(caplog.text) == bool(state), "what should work is worth a warning"
        with pytest.raises(
            ConfigError, match=rf"^--attention flashinfer does not work .*: {why}.*; write --att.* torch$"
        ):
            gpu.choose("flashinfer", heads)


def test_without_it() -> None:
    gpu = OnGpu("float16", 128)
    with patch.object(attention, "find_spec", lambda _: None):
        assert gpu.choose("auto").name.endswith("(FlashInfer: it is not installed: pip install 'headrace[flashinfer]')")
        with pytest.raises(
            ConfigError, match=r"^[^\n]*it is not installed: pip install 'headrace\[flashinfer\]'; [^\n]*$"
        ):
            gpu.choose("flashinfer")
