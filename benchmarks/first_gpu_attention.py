"""Ways of attention beside each other, as a part of first_gpu_minutes: dense keys and values, pages, latents."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.core.config import AttentionChoice
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.engine.attention import choose_attention, choose_latent_attention
from headrace.engine.attention.latent import LatentPass
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.mla_spec import MlaSpec

if TYPE_CHECKING:
    from benchmarks.first_gpu_minutes import Minutes

DEEPSEEK_V3 = MlaSpec(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
PAGES = {"flashinfer": (16,), "triton": (16,), "torch": (16, 256)}
"""Tokens of a page, by what --attention names."""


class Shape(NamedTuple):
    """A chunk behind a prefix, and heads."""

    prefix: int
    tokens: int
    heads: int
    kv_heads: int
    width: int

    @property
    def flops(self) -> float:
        """Of attention."""
        seen = self.tokens * self.prefix + self.tokens * (self.tokens + 1) / 2
        return 2.0 * 2 * self.heads * self.width * seen


def attention(at: "Minutes") -> None:
    """Attention by itself, in one layer: chunks as shares of the peak, rows that decode from latents in GB/s."""
    heads = (4, 2, 16) if at.tiny else (32, 8, 128)
    for prefix, tokens in ((8, 64),) if at.tiny else ((0, 2048), (0, 8192), (0, 32768), (8192, 512)):
        shape = Shape(prefix, tokens, *heads)
        ways = in_pages(at, shape) if prefix else dense(at, shape) | in_pages(at, shape)
        for name, make in ways.items():
            what = f"attention, {tokens:,} tokens{f' behind {prefix:,}' if prefix else ''}, {name}"
            try:
                at.keep(f"{what}: {at.share(shape.flops, at.time(make()))}")
            except (RuntimeError, TypeError, ConfigError) as error:
                at.keep(f"{what}: {str(error).partition(chr(10))[0]}")
    latents(at)


def dense(at: "Minutes", shape: Shape) -> dict[str, Callable[[], Callable[[], object]]]:
    """Of torch, over keys and values [1, heads, tokens, width]: causal, without a prefix."""

    def by(backend: SDPBackend) -> Callable[[], object]:
        query, key, value = (
            torch.randn(1, count, shape.tokens, shape.width, device=at.device).bfloat16()
            for count in (shape.heads, shape.kv_heads, shape.kv_heads)
        )

        def attend() -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        return attend

    found = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    return {f"{name}, dense": partial(by, backend) for name, backend in found.items()} if at.on_gpu else {}


def in_pages(at: "Minutes", shape: Shape) -> dict[str, Callable[[], Callable[[], object]]]:
    """What --attention names."""

    def by(wanted: AttentionChoice, page_size: int) -> Callable[[], object]:
        positions = shape.prefix + shape.tokens
        pages = ceil_div(positions, page_size)
        pool = KVPool(Geometry("bfloat16", 1, shape.kv_heads, shape.width, page_size), pages, str(at.device))
        chosen = choose_attention(pool, native_units=True, wanted=wanted, heads=shape.heads, compiled=at.on_gpu)
        pool.tensor.normal_()
        running = chosen.begin([AttentionSpan(shape.prefix, shape.tokens, np.random.default_rng(1).permutation(pages))])
        query, rows = (_random(at, shape.tokens, heads, shape.width) for heads in (shape.heads, 2 * shape.kv_heads))
        return lambda: running.attend(0, query, rows)

    ways: Mapping[str, tuple[int, ...]] = PAGES if at.on_gpu else {"torch": (16,)}
    return {
        f"--attention {wanted}, pages of {size}": partial(by, wanted, size)  # type: ignore[arg-type]
        for wanted, sizes in ways.items()
        for size in sizes
    }


def latents(at: "Minutes") -> None:
    """Rows that decode, one of eight shards of DeepSeek-V3."""
    rows, length = (3, 40) if at.tiny else (32, 8192)
    held = ceil_div(length, 16)
    for wanted in ("flashinfer", "torch") if at.on_gpu else ("torch",):
        what = f"{rows} rows that attend to {length:,} latents, --attention {wanted}"
        try:
            pool = KVPool(DEEPSEEK_V3.geometry("bfloat16", 16, range(1)), rows * held, str(at.device))
            chosen = choose_latent_attention(DEEPSEEK_V3, pool, "absorbed", (), wanted=wanted, heads=16)
            pool.tensor.normal_()
            spans = [AttentionSpan(length - 1, 1, np.arange(row * held, (row + 1) * held)) for row in range(rows)]
            running = chosen.begin(spans)
            assert isinstance(running, LatentPass)
            [part] = running.parts
            assert part.absorbed is not None
            taken = at.time(partial(part.absorbed.attend, 0, _random(at, rows, 16, DEEPSEEK_V3.slot_dim)))
            at.keep(f"{what}: {rows * length * DEEPSEEK_V3.slot_dim * 2 / taken / 1e9:,.0f} GB/s")
        except (RuntimeError, ConfigError) as error:
            at.keep(f"{what}: {str(error).partition(chr(10))[0]}")


def _random(at: "Minutes", rows: int, heads: int, width: int) -> Tensor:
    return torch.randn(rows, heads, width, device=at.device).bfloat16()
