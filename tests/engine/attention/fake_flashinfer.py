"""A double of the module flashinfer: it refuses what FlashInfer 0.7.2 does not take, and attends by plain torch.

In memory it does what FlashInfer does: a plan is written into pinned memory, from where the stream copies it, the
kernel reads the device's copy and the workspace. So the fake GPU sees what nothing orders.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
INT_BYTES = 1 << 10  # of a plan

refuses = False
"""Whether nothing can be compiled."""
wrong = 0.0
"""By how much results are wrong."""
made: list[Any] = []
"""Wrappers, of latents too."""


class BatchPrefillWithPagedKVCacheWrapper:
    """See flashinfer/prefill.py."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 << 20
        self._workspace = workspace
        self._device = workspace.device
        on_gpu = self._device.type == "cuda"
        self._pinned = torch.empty(INT_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._plan = torch.empty(INT_BYTES, dtype=torch.uint8, device=self._device)
        self._planned = False
        self.runs = 0
        made.append(self)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        q_data_type: torch.dtype = torch.float16, seq_lens: Tensor | None = None,
    ) -> None:  # fmt: skip
        if refuses:
            raise RuntimeError("Could not find nvcc\nand other words")
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in HEAD_DIMS
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert causal
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        for each in (*indices, *([] if seq_lens is None else [seq_lens])):
            assert (each.device.type, each.dtype, each.dim()) == ("cpu", torch.int32, 1)
        self._queries, self._pages, ids, last = (each.tolist() for each in indices)
        assert len(self._queries) == len(self._pages) == len(last) + 1
        assert self._pages[-1] == len(ids)
        assert all(1 <= each <= page_size for each in last)
        held = [b - a for a, b in zip(self._pages, self._pages[1:], strict=False)]
        self._lengths = [(count - 1) * page_size + each for count, each in zip(held, last, strict=True)]
        # FlashAttention-3 takes lengths from here, FlashAttention-2 from the pages.
        assert seq_lens is None or seq_lens.tolist() == self._lengths
        counts = [b - a for a, b in zip(self._queries, self._queries[1:], strict=False)]
        assert all(1 <= count <= length for count, length in zip(counts, self._lengths, strict=True))
        self._ids, self._heads = ids, num_qo_heads
        self._shape, self._dtype = (num_kv_heads, page_size, head_dim_qk), q_data_type
        # Lengths that it is not given it makes in pageable memory.
        lengths = torch.tensor(self._lengths, dtype=torch.int32) if seq_lens is None else seq_lens
        copied = [each.to(self._device, non_blocking=True) for each in (*indices, lengths)]
        self._on_device = copied[2]
        self._pinned.zero_()
        self._plan.copy_(self._pinned, non_blocking=True)
        self._planned = True

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor | None = None) -> Tensor:
        assert self._planned
        assert q.shape == (self._queries[-1], self._heads, self._shape[2])
        assert q.dtype == paged_kv_cache.dtype == self._dtype
        assert paged_kv_cache.dim() == 5
        keys, values = paged_kv_cache.unbind(1)
        assert keys.shape[1:] == self._shape
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == q.stride(-1) == 1
        assert out is not None, "it would fill one with zeros"
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        assert all(0 <= page < len(keys) for page in self._ids)
        self.runs += 1
        with as_one_launch(2 * q.nbytes):
            self._plan.sum()
            self._workspace[:1].zero_()
            self._attend(q, keys, values, out)
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Row by row, of the pages that it has."""
        for row, length in enumerate(self._lengths):
            queries = slice(self._queries[row], self._queries[row + 1])
            pages = self._on_device[self._pages[row] : self._pages[row + 1]]
            heads = [
                each.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :length].float() for each in (keys, values)
            ]
            count = queries.stop - queries.start
            visible = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
            attended = F.scaled_dot_product_attention(
                q[queries].float().transpose(0, 1)[None], heads[0][None], heads[1][None], visible, enable_gqa=True
            )
            out[queries].copy_(attended[0].transpose(0, 1) + wrong)


def as_one_launch(moved: int) -> AbstractContextManager[None]:
    """Of a kernel that reads and writes so many bytes beside keys and values."""
    from tests.engine.cuda import fake_gpu

    running = fake_gpu._running
    return running[-1].as_one("paged_attention", moved) if running else nullcontext()


@contextmanager
def installed(**state: Any) -> Iterator[None]:
    """It is what `import flashinfer` finds, with that of latents. state: of this module's variables."""
    from tests.engine.attention import fake_flashinfer_mla

    this = sys.modules[__name__]
    made.clear()
    found = {"flashinfer": this, "flashinfer.mla": fake_flashinfer_mla}
    with patch.dict(sys.modules, found), patch.multiple(this, **{"refuses": False, **state}):
        yield
