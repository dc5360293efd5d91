"""Attention on GPUs in 16-bit dtypes by FlashInfer (arXiv 2501.01005), whose kernels read the pages of the pool.

    plan    once a pass, on the host: which block of the device computes what
    run     once a layer, over pool.tensor[:, layer] as it lies: its strides say how far apart a layer's pages are

No keys and values are gathered. On Hopper these are kernels of FlashAttention-3 (arXiv 2407.08608), elsewhere of
FlashAttention-2; FlashInfer compiles them at their first use, and keeps them.

Imported where it is chosen: FlashInfer is an extra, and takes seconds to import.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots

WORKSPACE_BYTES = 128 << 20  # for parts of long rows that are computed apart; what FlashInfer recommends
LARGEST_GAP = 0.1  # between the trial and torch: roundings to bfloat16 of values around 1 are far below it


class _Plans:
    """A wrapper of FlashInfer: the plan of one pass at a time, in memory of its own."""

    def __init__(self, workspace: Tensor) -> None:
        self._on_gpu = workspace.device.type == "cuda"
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._copied: torch.cuda.Event | None = None
        self._launching = False

    @property
    def free(self) -> bool:
        """Another pass may be planned: all layers of the last one are launched, and its plan is on the device."""
        return not self._launching and (self._copied is None or bool(self._copied.query()))  # type: ignore[no-untyped-call]

    def plan(self, pool: KVPool, spans: Sequence[AttentionSpan], heads: int) -> None:
        """Plan a pass. heads: of queries."""
        size = pool.page_size
        counts, lengths = [span.count for span in spans], [span.start + span.count for span in spans]
        pages = [span.pages[: ceil_div(length, size)] for span, length in zip(spans, lengths, strict=True)]
        self._wrapper.plan(
            self._host(_ends(counts)),
            self._host(_ends([len(each) for each in pages])),
            self._host(np.concatenate(pages)),
            self._host([(length - 1) % size + 1 for length in lengths]),
            heads,
            pool.geometry.kv_heads,
            pool.geometry.head_dim,
            size,
            causal=True,
            q_data_type=pool.tensor.dtype,
            seq_lens=self._host(lengths),  # else it makes its own in pageable memory, which the host waits for
        )
        self._launching = True
        if self._on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def run(self, query: Tensor, pages: Tensor, *, last: bool) -> Tensor:
        """Attention of the planned pass in one layer. pages: [pages, 2, kv_heads, page_size, head_dim], keys before
        values. last: it is the last one of the pass."""
        attended = query.new_empty(query.shape)  # which FlashInfer would fill with zeros first
        self._wrapper.run(query, pages, out=attended)
        self._launching = not last
        return attended

    def _host(self, values: NDArray[Any] | list[int]) -> Tensor:
        """int32 in host memory, where FlashInfer plans; it copies them to the device itself."""
        host = torch.from_numpy(np.asarray(values, np.int32))
        return host.pin_memory() if self._on_gpu else host


class FlashInfer:
    """An Attention by FlashInfer, over one pool. Used by one thread, which launches everything on one stream.

    FlashInfer writes a plan into pinned memory of its wrapper, from where the stream copies it when it gets there,
    behind the passes that were queued before. No stream keeps the host from writing the next plan over it, so a wrapper
    is planned with again when its copy is done, and there are as many as plans wait for theirs, which the passes in
    flight bound. Both halves of a pass have one, since they take turns in launching their layers. All else is in device
    memory, whose uses the stream orders: a later plan comes there behind the layers of the one before it, and one
    workspace does for all wrappers.
    """

    def __init__(self, pool: KVPool, heads: int) -> None:
        """pool: in a 16-bit dtype. heads: of queries, a multiple of those of keys."""
        self._pool, self._heads = pool, heads
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.tensor.device)
        self._plans: list[_Plans] = []

    def __call__(self, spans: Sequence[AttentionSpan]) -> "FlashInferPass":
        """See Attention."""
        plans = next((each for each in self._plans if each.free), None)
        if plans is None:
            plans = _Plans(self._workspace)
            self._plans.append(plans)
        plans.plan(self._pool, spans, self._heads)
        return FlashInferPass(self._pool, spans, plans)


class FlashInferPass(AttentionPass):
    """An AttentionPass by FlashInfer, for float16 and bfloat16 on CUDA: one kernel call per layer, two where it divides
    long rows."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan], plans: _Plans) -> None:
        """Prepare the indices of what is written. plans: with the plan of these rows."""
        self._pool = pool
        self._writer = SlotWriter(pool, spans)
        self._plans = plans

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass. Layers are attended to in their order."""
        last = layer == self._pool.geometry.layers - 1
        return self._plans.run(query, self._pool.tensor[:, layer], last=last)


def try_flashinfer(pool: KVPool, heads: int) -> FlashInfer:
    """Attention by FlashInfer, after a trial beside torch's: a chunk behind a prefix, in the first and the last page of
    the pool, which are overwritten. Arguments as of FlashInfer. Raises RuntimeError for other results, and whatever
    FlashInfer and its compilers raise."""
    made = FlashInfer(pool, heads)
    layer, device = pool.geometry.layers - 1, pool.tensor.device
    pages = np.unique([pool.pages - 1, 0])[::-1].astype(np.int64)
    prefix = pool.page_size // 2
    span = AttentionSpan(prefix, len(pages) * pool.page_size - prefix, pages)
    for page in pages:
        pool.tensor[int(page), layer].normal_()
    query = torch.randn(span.count, heads, pool.geometry.head_dim, device=device).to(pool.tensor.dtype)
    one, other = (running.attend(layer, query, query) for running in (made([span]), SdpaPass(pool, [span])))
    gap = (one - other).float().abs().max().item()
    if not gap <= LARGEST_GAP:
        raise RuntimeError(f"its attention differs from torch's by {gap:.2g}")
    return made


def _ends(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Cumulative lengths, from 0."""
    return np.cumsum([0, *lengths])
