"""A double of the module flashinfer.mla: it refuses what FlashInfer 0.7.2 does not take of latents, and attends by
plain torch. See fake_flashinfer.py."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.engine.attention import fake_flashinfer
from tests.engine.attention.fake_flashinfer import INT_BYTES, as_one_launch

MULTIPROCESSORS = 132
WORK_ITEMS = 16384  # of a plan
TILE_KV = 64


class MLAPlanMetadata(NamedTuple):
    """See flashinfer/mla/_batch_mla/_contracts.py."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, *parts: Tensor) -> "MLAPlanMetadata":
        return cls(*parts)


class BatchMLAPagedAttentionWrapper:
    """See flashinfer/mla/_batch_mla/_wrapper.py."""

    def __init__(self, float_workspace_buffer: Tensor, *, backend: str = "auto") -> None:
        assert backend in ("fa2", "fa3"), "others are chosen and compiled while requests wait"
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 << 20
        self.backend = backend
        self._workspace = float_workspace_buffer
        self._device = float_workspace_buffer.device
        self._on_gpu = self._device.type == "cuda"
        self._plan: Tensor | None = None
        self.runs = 0
        self.plans = 0
        fake_flashinfer.made.append(self)

    def plan(
        self, *, metadata: MLAPlanMetadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int,
        causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        if fake_flashinfer.refuses:
            raise RuntimeError("Could not find nvcc\nand other words")
        assert type(metadata) is MLAPlanMetadata
        for each in metadata:
            assert (each.device.type, each.dtype, each.dim()) == ("cpu", torch.int32, 1)
            assert each.is_contiguous()
        assert all(type(each) is int for each in (num_heads, head_dim_ckv, head_dim_kpe, page_size))
        assert type(causal) is bool
        assert math.isfinite(sm_scale)
        self._check_kernels(head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type)
        queries, pages, ids, lengths = (each.tolist() for each in metadata)
        counts = self._check_rows(queries, pages, ids, lengths, page_size)
        _check_work(counts, lengths, num_heads)
        self._queries, self._pages, self._ids, self._lengths = queries, pages, ids, lengths
        self._heads, self._widths, self._size = num_heads, (head_dim_ckv, head_dim_kpe), page_size
        self._scale, self._dtype = sm_scale, q_data_type
        # Each plan has memory of its own, on the device and pinned, which lives as long as the plan.
        self._plan = torch.empty(INT_BYTES, dtype=torch.uint8, device=self._device)
        self._pinned = torch.empty(INT_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._pinned.zero_()
        self._plan.copy_(self._pinned, non_blocking=True)
        copied = [each.to(self._device, non_blocking=True) for each in metadata]
        self._on_device = copied[2]
        self.plans += 1

    def _check_kernels(self, ckv: int, kpe: int, query: torch.dtype, kv: torch.dtype) -> None:
        assert query == kv
        assert query in (torch.float16, torch.bfloat16)
        assert ckv % 128 == 0
        assert kpe % 64 == 0
        major = torch.cuda.get_device_properties(self._device).major if self._on_gpu else 8
        assert self.backend == "fa2" or (major == 9 and ckv in (128, 256, 512))

    @staticmethod
    def _check_rows(queries: Any, pages: Any, ids: Any, lengths: Any, page_size: int) -> list[int]:
        assert queries[0] == pages[0] == 0
        assert len(queries) == len(pages) == len(lengths) + 1
        assert pages[-1] <= len(ids)
        held = [b - a for a, b in pairwise(pages)]
        assert held == [-(-length // page_size) for length in lengths]
        counts = [b - a for a, b in pairwise(queries)]
        assert all(1 <= count <= length for count, length in zip(counts, lengths, strict=True))
        return counts

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor) -> Tensor:
        assert self._plan is not None
        ckv, kpe = self._widths
        assert query.shape == (self._queries[-1], self._heads, ckv + kpe)
        assert query.dtype == kv_cache.dtype == out.dtype == self._dtype
        assert kv_cache.shape[1:] == (self._size, ckv + kpe)
        assert out.shape == (*query.shape[:2], ckv)
        assert kv_cache.stride(-1) == query.stride(-1) == out.stride(-1) == 1
        # 16 bytes are loaded at a time.
        assert all(step % 8 == 0 for each in (query, kv_cache) for step in (*each.stride()[:2], each.storage_offset()))
        assert all(0 <= page < len(kv_cache) for page in self._ids)
        self.runs += 1
        with as_one_launch(query.nbytes + out.nbytes):
            self._plan.sum()
            self._workspace[:1].zero_()
            self._attend(query, kv_cache, out)
        return out

    def _attend(self, query: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        """Row by row, of the pages that it has."""
        for row, length in enumerate(self._lengths):
            queries = slice(self._queries[row], self._queries[row + 1])
            pages = self._on_device[self._pages[row] : self._pages[row + 1]]
            latents = kv_cache.index_select(0, pages).flatten(0, 1)[:length].float()
            count = queries.stop - queries.start
            visible = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
            scores = torch.einsum("thw,pw->htp", query[queries].float(), latents) * self._scale
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            attended = torch.einsum("htp,pc->thc", weights, latents[:, : self._widths[0]])
            out[queries].copy_(attended + fake_flashinfer.wrong)


def _check_work(counts: list[int], lengths: list[int], heads: int) -> None:
    """Raises ValueError for more tiles than a plan holds, and for those that end within a token's heads where its last
    key begins a tile of keys. See _fa_common.py and MLAPlan in scheduler.cuh."""
    cluster = 2 if sum(counts) * heads // len(counts) > 64 else 1
    tile = 64 * cluster
    ends: list[int] = []
    for count, length in zip(counts, lengths, strict=True):
        for end in range(tile, count * heads, tile):
            token, within = divmod(end, heads)
            if within and (length - count + token) % TILE_KV == 0:
                raise ValueError("causal tile boundary is unsupported")
        tiles = -(-count * heads // tile)
        ends += [min(length - count - (-(number + 1) * tile // heads), length) for number in range(tiles - 1)] + [
            length
        ]
    average = -(-sum(ends) // (MULTIPROCESSORS // cluster))
    limit = next((part for most, part in ((8, 32), (16, 64), (32, 128), (64, 192)) if average <= most), 0)
    limit = limit or -(-average // 256) * 256
    if (items := sum(-(-end // limit) for end in ends)) > WORK_ITEMS:
        raise ValueError(f"FA MLA needs {items} work items including KV splits; native capacity is {WORK_ITEMS}.")
