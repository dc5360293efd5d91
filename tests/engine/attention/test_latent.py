"""Attention over latents in the sizes of DeepSeek models: native kernels against torch, and bit by bit over chunks."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.attention import expanded
from headrace.engine.attention.latent import LatentAttention, latent_attention
from headrace.engine.attention.paged import AttentionSpan, SlotWriter
from headrace.engine.attention.varlen import VarlenDense
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.latent_attention import HeadsTogether
from headrace.engine.model.mla_spec import MlaSpec
from tests.engine.flash import flash_on_cpu
from tests.engine.kernels import WIDTHS, native, normal

MLA = MlaSpec(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
SMALL = MlaSpec(kv_rank=40, nope_dim=8, rope_dim=4, value_dim=16)  # values wider than keys
PAGES, PAGE_SIZE = 170, 16


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_pool(mla: MlaSpec, dtype: str = "float32") -> KVPool:
    part = Component("latent", dtype, layers=2, kv_heads=1, head_dim=mla.slot_dim, planes=1)
    pool = KVPool(Geometry(dtype, 0, 0, 0, PAGE_SIZE, components=(part,)), PAGES)
    pool.tensor.fill_(float("nan"))
    return pool


def attend(attention: LatentAttention, cuts: list[int], query: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The second layer in absorbed form, chunk by chunk; pages in any order."""
    pages = np.random.default_rng(1).permutation(PAGES)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(query)], strict=True):
        attending = attention([AttentionSpan(start, end - start, pages)])
        attending.slots(1).write(latents[start:end])
        [part] = attending.parts
        assert part.absorbed is not None
        parts.append(part.absorbed.attend(1, query[start:end]))
    return torch.cat(parts)


class Projections:
    """LatentProjections of a weight [heads, nope_dim + value_dim, kv_rank]."""

    def __init__(self, weight: torch.Tensor, mla: MlaSpec) -> None:
        self.tiles: list[int] = []
        """Numbers of heads whose keys and values were made."""
        self.made_of: list[torch.Tensor] = []
        self._rank, self._keys, self._values = mla.kv_rank, weight[:, : mla.nope_dim], weight[:, mla.nope_dim :]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thm,hmc->thc", query, self._keys)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thc,hvc->thv", attended, self._values)

    def expand(self, rows: torch.Tensor, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        self.tiles.append(len(heads))
        self.made_of.append(rows)
        weights = (part[heads.start : heads.stop] for part in (self._keys, self._values))
        keys, values = (torch.einsum("pc,hdc->phd", rows[:, : self._rank], part) for part in weights)
        return torch.cat((keys, rows[:, None, self._rank :].expand(-1, len(heads), -1)), -1), values


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mla", "heads", "length"), [(MLA, 16, 70), (MLA, 24, 300), (SMALL, 3, 70), (SMALL, 17, 9)])
@pytest.mark.usefixtures("two_threads")
def test_native_latents_equal_torch(mla: MlaSpec, heads: int, length: int, dtype: str, wide: bool) -> None:
    query, latents = normal(length, heads, mla.slot_dim), normal(length, 1, mla.slot_dim, seed=1).bfloat16().float()
    fast = latent_attention(mla, make_pool(mla, dtype), "absorbed", (), kernels=native(wide))
    plain = latent_attention(mla, make_pool(mla, dtype), "absorbed", ())
    found = attend(fast, [length // 3], query, latents)
    assert found.shape == (length, heads, mla.kv_rank)
    torch.testing.assert_close(found, attend(plain, [length // 2, length - 1], query, latents), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_chunks_and_threads(wide: bool) -> None:
    """Past a segment, where single rows are divided among threads."""
    length = 2200
    query, latents = normal(length, 4, SMALL.slot_dim), normal(length, 1, SMALL.slot_dim, seed=1)
    for dtype in ("float32", "bfloat16"):
        whole = attend(
            latent_attention(SMALL, make_pool(SMALL, dtype), "absorbed", (), kernels=native(wide)), [], query, latents
        )
        for cuts in ([2199], [1, 2, 1000, 2100, 2101], list(range(100, 2200, 100))):
            attention = latent_attention(SMALL, make_pool(SMALL, dtype), "absorbed", (), kernels=native(wide))
            assert torch.equal(attend(attention, cuts, query, latents), whole)
        torch.set_num_threads(1)
        attention = latent_attention(SMALL, make_pool(SMALL, dtype), "absorbed", (), kernels=native(wide))
        assert torch.equal(attend(attention, [2198], query, latents), whole)
        torch.set_num_threads(2)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("tile_heads", [1, 2, 5])
@pytest.mark.parametrize("mla", [MLA, SMALL])
def test_both_forms_are_the_same(mla: MlaSpec, tile_heads: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded a few heads at a time, over a prefix, against scores with the latents themselves."""
    heads, start, count = 5, 37, 30
    both = (mla.query_dim + mla.value_dim) * 4 * (start + count)
    monkeypatch.setattr(expanded, "TILE_BYTES", tile_heads * both)  # some tokens at a time, too, without kernels
    weight = normal(heads, mla.nope_dim + mla.value_dim, mla.kv_rank) / mla.kv_rank**0.5
    query, latents = normal(start + count, heads, mla.query_dim), normal(start + count, 1, mla.slot_dim, seed=1)
    pages = np.random.default_rng(1).permutation(PAGES)
    made = Projections(weight, mla)
    found = []
    for form in ("expanded", "absorbed"):
        attention = latent_attention(mla, make_pool(mla), form, [made, made], kernels=native(True) if kernels else None)
        for first, tokens in ((0, start), (start, count)):
            rows = slice(first, first + tokens)
            made.tiles[:] = made.tiles if form == "absorbed" else []
            attending = attention([AttentionSpan(first, tokens, pages)])
            attending.slots(1).write(latents[rows])
            result = attending.attend(1, query[rows], latents[rows])
        found.append(result)
    assert max(made.tiles) == tile_heads
    torch.testing.assert_close(found[0], found[1], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 3, 0, 2], [3, 1, 2, 0]])
def test_rows_of_both_forms_in_any_order(order: list[int]) -> None:
    """Each as by itself: rows of a form one behind the other, or not."""
    heads, counts = 3, [30, 40, 1, 1]
    made = Projections(normal(heads, SMALL.nope_dim + SMALL.value_dim, SMALL.kv_rank), SMALL)
    query, latents = normal(200, heads, SMALL.query_dim), normal(200, 1, SMALL.slot_dim, seed=1)
    pages = np.random.default_rng(1).permutation(PAGES)

    def attended(numbers: list[int]) -> list[torch.Tensor]:
        attention = latent_attention(SMALL, pool, "length", [made])
        spans = [AttentionSpan(4, counts[number], pages[10 * number : 10 * number + 10]) for number in numbers]
        rows = torch.cat([torch.arange(50 * number, 50 * number + counts[number]) for number in numbers])
        attending = attention(spans)
        attending.slots(0).write(latents[rows])
        found = attending.attend(0, query[rows], latents[rows])
        return list(found.split([counts[number] for number in numbers]))

    pool = make_pool(SMALL)
    pool.tensor.fill_(1)
    together = attended(order)
    for number, found in zip(order, together, strict=True):
        torch.testing.assert_close(found, attended([number])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mla", [MLA, SMALL])
@pytest.mark.parametrize("count", [1, 30])
def test_the_flash_kernel_of_gpus_gets_heads_of_one_width(mla: MlaSpec, count: int) -> None:
    """Of one product. All of it but the kernel, in bfloat16, behind a prefix."""
    heads, pages, pool = 3, np.random.default_rng(1).permutation(PAGES), make_pool(mla, "bfloat16")
    weight = normal(heads, mla.nope_dim + mla.value_dim, mla.kv_rank).bfloat16() / mla.kv_rank**0.5
    query, latents = normal(count, heads, mla.query_dim).bfloat16(), normal(67, 1, mla.slot_dim, seed=1).bfloat16()
    SlotWriter(pool, [AttentionSpan(0, 67, pages)]).write(1, latents)
    spans = [AttentionSpan(67 - count, count, pages)]
    none = latents[:count, :0]
    with flash_on_cpu():
        rows = expanded.ExpandedRows(mla, pool, spans, VarlenDense(mla.scale))
        found = rows.attend(1, query, none, HeadsTogether(weight, mla).expand)
    wide = make_pool(mla)
    SlotWriter(wide, [AttentionSpan(0, 67, pages)]).write(1, latents.float())
    plain = expanded.ExpandedRows(mla, wide, spans, expanded.SdpaDense(mla.scale))
    expected = plain.attend(1, query.float(), none.float(), Projections(weight.float(), mla).expand)
    assert found.shape == (count, heads, mla.value_dim)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=2e-2)  # keys and values are rounded


@pytest.mark.parametrize("mla", [MLA, SMALL])
def test_one_product_of_slots_gives_the_keys_and_values_of_latents(mla: MlaSpec) -> None:
    weight, rows = normal(5, mla.nope_dim + mla.value_dim, mla.kv_rank), normal(9, mla.slot_dim, seed=1)
    made, expected = HeadsTogether(weight, mla), Projections(weight, mla)
    for heads in (range(5), range(2, 4)):
        for found, wanted in zip(made.expand(rows, heads), expected.expand(rows, heads), strict=True):
            assert found.shape[2] == mla.wide_dim
            torch.testing.assert_close(found[..., : wanted.shape[2]], wanted)
            assert not found[..., wanted.shape[2] :].any(), "zeros"
        keys = made.expand(rows, heads)[0][..., mla.nope_dim : mla.query_dim]
        assert torch.equal(keys, rows[:, None, mla.kv_rank :].expand_as(keys)), "the rotated part is as it was"
    query, attended = normal(4, 5, mla.nope_dim), normal(4, 5, mla.kv_rank)
    torch.testing.assert_close(made.absorb(query), expected.absorb(query))
    torch.testing.assert_close(made.values(attended), expected.values(attended))


def test_latents_that_are_at_hand_are_not_gathered() -> None:
    """Of rows without a prefix, and in the dtype of the pool."""
    pages, pool = np.random.default_rng(1).permutation(PAGES), make_pool(SMALL)
    made = Projections(normal(3, SMALL.nope_dim + SMALL.value_dim, SMALL.kv_rank), SMALL)
    query, latents = normal(50, 3, SMALL.query_dim), normal(50, 1, SMALL.slot_dim, seed=1)
    spans = [AttentionSpan(0, 30, pages), AttentionSpan(0, 20, pages[10:])]
    attending = latent_attention(SMALL, pool, "expanded", [made])(spans)
    attending.slots(0).write(latents)
    found = attending.attend(0, query, latents)
    assert all(rows.untyped_storage().data_ptr() == latents.untyped_storage().data_ptr() for rows in made.made_of)
    made.made_of.clear()
    assert torch.equal(attending.attend(0, query, latents[:, :0]), found)
    assert torch.equal(attending.attend(0, query, latents.bfloat16()), found)
    assert not any(rows.untyped_storage().data_ptr() == latents.untyped_storage().data_ptr() for rows in made.made_of)


def test_the_form_by_length_is_the_one_with_fewer_products() -> None:
    """170 tokens behind a very long prefix, as the sizes of DeepSeek-V2 and -V3 say; any number without one."""
    pool = make_pool(MLA)
    attention = latent_attention(MLA, pool, "length", ())
    pages = np.zeros(1_000_000 // PAGE_SIZE + 100, np.int64)

    def expands(start: int, count: int) -> bool:
        return attention._expands(AttentionSpan(start, count, pages))

    assert not expands(1_000_000, 170)
    assert expands(1_000_000, 180)
    assert not expands(100, 1)
    assert expands(0, 2)
    assert expands(100, 100)
