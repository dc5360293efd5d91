"""The attention to latents by FlashInfer against the plain one, with a double in the place of its kernels; when it is
chosen."""

from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import AttentionChoice, MlaForm
from headrace.core.types.errors import ConfigError
from headrace.engine import attention
from headrace.engine.attention import choose_latent_attention
from headrace.engine.attention.latent import LatentSdpa
from headrace.engine.attention.paged import AttentionSpan, SlotWriter
from headrace.engine.attention.work import PlanWork
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.mla_spec import MlaSpec
from tests.engine.attention import fake_flashinfer
from tests.engine.attention.test_cpu import make_spans, spans_of
from tests.engine.attention.test_latent import MLA

SMALL = MlaSpec(kv_rank=128, nope_dim=24, rope_dim=64, value_dim=16)
HEADS, LAYERS, PAGES = 8, 3, 128


def make_pool(mla: MlaSpec, page_size: int, dtype: str = "bfloat16", pages: int = PAGES) -> KVPool:
    pool = KVPool(mla.geometry(dtype, page_size, range(LAYERS)), pages)
    pool.tensor.fill_(float("nan"))
    return pool


def run(begin: PlanWork, mla: MlaSpec, pool: KVPool, spans: list[AttentionSpan]) -> list[torch.Tensor]:
    """Outputs per layer of the spans' prefixes, one after the other, and then of the spans together."""
    generator = torch.Generator().manual_seed(2)
    prefixes = [AttentionSpan(0, span.start, span.pages) for span in spans if span.start]
    outputs = []
    for rows in (*([each] for each in prefixes), spans):
        running, writer = begin(rows), SlotWriter(pool, rows)
        for layer in range(LAYERS):
            tokens = sum(span.count for span in rows)
            query, latents = (
                torch.randn(tokens, heads, mla.slot_dim, generator=generator).bfloat16() for heads in (HEADS, 1)
            )
            writer.write(layer, latents)
            outputs.append(running.attend(layer, query.to(pool.tensor.dtype)))
    return outputs


@settings(max_examples=40, deadline=None)
@given(shapes=spans_of, page_size=st.sampled_from([1, 4, 16]), more=st.integers(0, 2))
def test_latents_are_attended_to_as_by_torch(shapes: list[tuple[int, int]], page_size: int, more: int) -> None:
    """Any mix of chunks and single tokens behind prefixes, pages in any order and more of them than a row needs yet,
    NaN in every slot that is not written."""
    shapes = [(start % 20, min(count, 8)) for start, count in shapes]
    spans = make_spans(shapes, page_size, PAGES - 2, seed=len(shapes))
    held = [AttentionSpan(each.start, each.count, np.append(each.pages, np.full(more, PAGES - 1))) for each in spans]
    low, high = make_pool(SMALL, page_size), make_pool(SMALL, page_size, "float32")
    plain = partial(LatentSdpa, SMALL)
    with fake_flashinfer.installed():
        from headrace.engine.attention.flashinfer import FlashInferLatents

        found = run(FlashInferLatents(SMALL, low, HEADS, partial(plain, low)), SMALL, low, held)
        assert fake_flashinfer.made
    for one, other in zip(found, run(partial(plain, high), SMALL, high, spans), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=2**-8)  # one rounding, at the end
    torch.testing.assert_close(low.tensor.float(), high.tensor, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize(("tokens", "planned"), [(15872, True), (15873, False)])
def test_what_a_plan_does_not_hold_is_attended_to_otherwise(tokens: int, planned: bool) -> None:
    """FlashInfer plans 16,384 tiles of 128 heads, here of a token each, and as many parts as there are processors."""
    pool = make_pool(SMALL, 16, pages=1)
    span = AttentionSpan(0, tokens, np.zeros(tokens // 16 + 1, np.int64))
    others: list[Any] = []
    with fake_flashinfer.installed():
        from headrace.engine.attention.flashinfer import FlashInferLatents

        FlashInferLatents(SMALL, pool, 128, others.append)([span])  # type: ignore[arg-type]
        assert [each.plans for each in fake_flashinfer.made] == [1] * planned
    assert others == ([] if planned else [[span]])


def choose(
    wanted: AttentionChoice, *, mla: MlaSpec = MLA, dtype: str = "bfloat16", heads: int = 16, form: MlaForm = "length"
) -> attention.ChosenAttention:
    """A pool on the CPU is taken for one on a GPU."""
    pool = make_pool(mla, 16, dtype, pages=4)
    with patch.object(attention, "_on_cpu", lambda _: False):
        return choose_latent_attention(mla, pool, form, (), wanted=wanted, heads=heads)


def test_it_is_chosen_where_it_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    with fake_flashinfer.installed():
        for wanted in ("auto", "flashinfer"):
            assert choose(wanted).name == "FlashInfer over latents (--mla length)"
        assert len(fake_flashinfer.made) == 2, "a trial each"
        assert choose("torch").name == "torch over latents (--mla length; FlashInfer: it is not wanted)"
        assert len(fake_flashinfer.made) == 2
    assert not caplog.text


@pytest.mark.parametrize(
    ("terms", "state", "why"),
    [
        ({"mla": MlaSpec(kv_rank=96, nope_dim=8, rope_dim=64, value_dim=8)}, {}, "it has no kernels for latents of 96"),
        ({"mla": MlaSpec(kv_rank=128, nope_dim=8, rope_dim=32, value_dim=8)}, {}, "it has no .* rotated keys of 32"),
        ({"dtype": "float32"}, {}, "it computes in bfloat16 and float16, not in float32"),
        ({"heads": 20}, {}, "20 query heads do not divide its tiles of 128"),
        ({"form": "expanded"}, {}, "rows in expanded form do not read latents"),
        ({}, {"refuses": True}, "RuntimeError: Could not find nvcc"),
        ({}, {"wrong": 0.5}, r"RuntimeError: its attention differs from torch's by 0\.5"),
        ({}, {"wrong": float("nan")}, "RuntimeError: its attention differs from torch's by nan"),
    ],
)
def test_where_it_does_not_work_it_is_an_error_or_torch(
    terms: dict[str, Any], state: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_flashinfer.installed(**state):
        assert choose("auto", **terms).name.startswith("torch over latents")
        assert bool(caplog.text) == bool(state), "what should work is worth a warning"
        with pytest.raises(
            ConfigError, match=rf"^--attention flashinfer does not work .*: {why}.*; write --att.* torch$"
        ):
            choose("flashinfer", **terms)
