"""Heads of latent attention divided among ranks: each has all latents, and their results add up."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.core.config import MlaForm
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.attention.latent import latent_attention
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.collectives.operations import Alone, Collectives
from headrace.engine.dtypes import Precision
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.latent_attention import LatentAttentionBlock
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.rope import rotary_tables
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.weights import LayerReader
from tests.engine.collectives.threads import run_ranks
from tests.engine.models import LATENTS, Saved, shuffled_pages

LENGTH = 45


@pytest.mark.parametrize("form", ["absorbed", "expanded", "length"])
@pytest.mark.parametrize("cuts", [(3,), (2, 5), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("name", LATENTS)
def test_ranks_together_say_what_one_says(
    saved: Callable[[str], Saved], name: str, cuts: tuple[int, ...], form: MlaForm
) -> None:
    """Even and uneven splits of 6 heads, with and without biases; all ranks get the same bits."""
    source = resolve_source(str(saved(name).folder))
    spec = load_spec(source)
    assert spec.mla is not None
    mla = spec.mla
    generator = torch.Generator().manual_seed(1)
    normed = torch.randn(LENGTH, spec.hidden_size, generator=generator)
    cos, sin = rotary_tables(spec.rope, mla.rope_dim, LENGTH)
    pages = np.array(shuffled_pages(3, 8))
    precision = Precision(torch.float32, torch.float32, torch.float32)

    def attend(heads: range, tp: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        read = LayerReader(open_checkpoint(source, spec), 1, precision, "cpu", TorchArithmetic().pack)
        block = LatentAttentionBlock(spec, mla, read, TorchArithmetic(), form, heads, tp)
        geometry: Geometry = mla.geometry("float32", 16, range(1))
        pool = KVPool(geometry, 8)
        pool.tensor.fill_(0)
        attention = latent_attention(mla, pool, form, [block.projections])
        found = []
        for start, end in ((0, 30), (30, LENGTH)):
            rows = slice(start, end)
            attending = attention([AttentionSpan(start, end - start, pages)])
            found.append(block.post(0, normed[rows], Rotary(cos[rows], sin[rows]), attending).wait())
        return torch.cat(found), pool.tensor

    expected, latents = attend(range(spec.heads), Alone())
    edges = (0, *cuts, spec.heads)
    results = run_ranks(len(edges) - 1, lambda tp: attend(range(edges[tp.rank], edges[tp.rank + 1]), tp))
    for result, own in results:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(result, results[0][0])
        assert torch.equal(own, latents)
