"""Attention on GPUs in 16-bit dtypes by FlashInfer (arXiv 2501.01005), whose kernels read the pages of the pool.

    plan    once a pass, on the host: which block of the device computes what
    run     once a layer, over that layer of the pool as it lies: strides say how far apart its pages are

No keys and values are gathered. On Hopper these are kernels of FlashAttention-3 (arXiv 2407.08608), elsewhere of
FlashAttention-2; FlashInfer compiles them at their first use, and keeps them.

Imported where it is chosen: FlashInfer is an extra, and takes seconds to import.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter, held_pages
from headrace.engine.attention.work import PlanWork, RowWork
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots
from headrace.engine.model.mla_spec import MlaSpec

WORKSPACE_BYTES = 128 << 20  # for parts of long rows that are computed apart; what FlashInfer recommends
# Of one plan over latents: 16,384 tiles and parts of tiles, where no multiprocessor has more than one part.
MOST_TILES = 16384 - 512


class _Plan:
    """A wrapper of FlashInfer: the plan of one pass at a time, in memory of its own."""

    def __init__(self, wrapper: Any, on_gpu: bool) -> None:
        self._wrapper = wrapper
        self._on_gpu = on_gpu
        self._copied: torch.cuda.Event | None = None
        self._launching = False

    @property
    def free(self) -> bool:
        """Another pass may be planned: all layers of the last one are launched, and its plan is on the device."""
        return not self._launching and (self._copied is None or bool(self._copied.query()))  # type: ignore[no-untyped-call]

    def make(self, *arguments: object, **named: object) -> None:
        """Plan a pass."""
        self._wrapper.plan(*arguments, **named)
        self._launching = True
        if self._on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def run(self, *arguments: Tensor, last: bool, **named: Tensor) -> None:
        """Compute one layer of the planned pass. last: it is the last one."""
        self._wrapper.run(*arguments, **named)
        self._launching = not last


class _Rows(NamedTuple):
    """The rows of a pass as FlashInfer plans them: int32 on the host, pinned where there is a GPU, to which it copies
    them itself."""

    query_ends: Tensor
    page_ends: Tensor
    pages: Tensor
    lengths: Tensor
    last_page: Tensor
    """Positions in each one's last page."""


class _Planner:
    """Plans passes over one pool. Used by one thread, which launches everything on one stream.

    FlashInfer writes a plan into pinned memory of its wrapper, from where the stream copies it when it gets there,
    behind the passes that were queued before. No stream keeps the host from writing the next plan over it, so a wrapper
    is planned with again when its copy is done, and there are as many as plans wait for theirs, which the passes in
    flight bound. Both halves of a pass have one, since they take turns in launching their layers. All else is in device
    memory, whose uses the stream orders: a later plan comes there behind the layers of the one before it, and one
    workspace does for all wrappers.
    """

    def __init__(self, pool: KVPool, make_wrapper: Callable[[Tensor], Any]) -> None:
        """pool: in a 16-bit dtype. make_wrapper: with the workspace that it has on the device."""
        device = pool.tensor.device
        self._pool, self._make_wrapper = pool, make_wrapper
        self._on_gpu = device.type == "cuda"
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: list[_Plan] = []

    def _free_plan(self) -> _Plan:
        plan = next((each for each in self._plans if each.free), None)
        if plan is None:
            plan = _Plan(self._make_wrapper(self._workspace), self._on_gpu)
            self._plans.append(plan)
        return plan

    def _rows(self, spans: Sequence[AttentionSpan]) -> _Rows:
        size = self._pool.page_size
        lengths = [span.start + span.count for span in spans]
        pages = held_pages(spans, size)
        return _Rows(
            query_ends=self._host(_ends([span.count for span in spans])),
            page_ends=self._host(_ends([len(each) for each in pages])),
            pages=self._host(np.concatenate(pages)),
            lengths=self._host(lengths),
            last_page=self._host([(length - 1) % size + 1 for length in lengths]),
        )

    def _host(self, values: NDArray[Any] | list[int]) -> Tensor:
        host = torch.from_numpy(np.asarray(values, np.int32))
        return host.pin_memory() if self._on_gpu else host


class FlashInfer(_Planner):
    """An Attention by FlashInfer over keys and values."""

    def __init__(self, pool: KVPool, heads: int) -> None:
        """pool: in a 16-bit dtype. heads: of queries, a multiple of those of keys."""
        super().__init__(pool, partial(BatchPrefillWithPagedKVCacheWrapper, kv_layout="HND"))
        self._heads = heads

    def __call__(self, spans: Sequence[AttentionSpan]) -> "FlashInferPass":
        """See Attention."""
        plan, rows, pool = self._free_plan(), self._rows(spans), self._pool
        plan.make(
            rows.query_ends,
            rows.page_ends,
            rows.pages,
            rows.last_page,
            self._heads,
            pool.geometry.kv_heads,
            pool.geometry.head_dim,
            pool.page_size,
            causal=True,
            q_data_type=pool.tensor.dtype,
            seq_lens=rows.lengths,  # else it makes its own in pageable memory, which the host waits for
        )
        return FlashInferPass(pool, spans, plan)


class FlashInferPass(AttentionPass):
    """An AttentionPass by FlashInfer, for float16 and bfloat16 on CUDA: one kernel call per layer, two where it divides
    long rows."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan], plan: _Plan) -> None:
        """Prepare the indices of what is written. plan: of these rows."""
        self._pool = pool
        self._writer = SlotWriter(pool, spans)
        self._plan = plan

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass. Layers are attended to in their order."""
        attended = query.new_empty(query.shape)  # which FlashInfer would fill with zeros first
        pages = self._pool.tensor[:, layer]  # [pages, 2, kv_heads, page_size, head_dim]
        self._plan.run(query, pages, out=attended, last=layer == self._pool.geometry.layers - 1)
        return attended


class FlashInferLatents(_Planner):
    """PlanWork by FlashInfer over latents in absorbed form (arXiv 2405.04434). Latent and rotated key are views of a
    slot of the pool: the kernels take the step between pages, and that between slots, from the strides.

    The kernels are named. FlashInfer's own choice is made anew for each pass, by its lengths, and would compile others
    while requests wait.
    """

    def __init__(self, mla: MlaSpec, pool: KVPool, heads: int, otherwise: PlanWork) -> None:
        """heads: of queries. otherwise: attends in passes of more tiles than a plan holds."""
        device = pool.tensor.device
        hopper = device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9
        super().__init__(pool, partial(BatchMLAPagedAttentionWrapper, backend="fa3" if hopper else "fa2"))
        self._mla, self._heads, self._otherwise = mla, heads, otherwise

    def __call__(self, spans: Sequence[AttentionSpan]) -> RowWork:
        """See PlanWork."""
        if self._tiles(spans) > MOST_TILES:
            return self._otherwise(spans)
        plan, rows, mla = self._free_plan(), self._rows(spans), self._mla
        dtype = self._pool.tensor.dtype
        plan.make(
            metadata=MLAPlanMetadata.csr(rows.query_ends, rows.page_ends, rows.pages, rows.lengths),
            num_heads=self._heads,
            head_dim_ckv=mla.kv_rank,
            head_dim_kpe=mla.rope_dim,
            page_size=self._pool.page_size,
            causal=True,
            sm_scale=mla.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return FlashInferLatentWork(mla, self._pool, plan)

    def _tiles(self, spans: Sequence[AttentionSpan]) -> int:
        """Into how many its kernels divide the queries of all heads."""
        rows = [span.count * self._heads for span in spans]
        size = 128 if sum(rows) // len(rows) > 64 else 64
        return sum(ceil_div(each, size) for each in rows)


class FlashInferLatentWork(RowWork):
    """RowWork by FlashInfer in absorbed form, one kernel call per layer. See LatentRows.absorbed for shapes."""

    def __init__(self, mla: MlaSpec, pool: KVPool, plan: _Plan) -> None:
        """plan: of a pass's rows in absorbed form."""
        self._mla = mla
        self._pool = pool
        self._plan = plan

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See RowWork. Layers are attended to in their order."""
        attended = query.new_empty(*query.shape[:2], self._mla.kv_rank)
        slots = self._pool.tensor[:, layer, 0, 0]  # [pages, page_size, slot_dim]
        self._plan.run(query=query, kv_cache=slots, out=attended, last=layer == self._pool.tensor.shape[1] - 1)
        return attended


def _ends(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Cumulative lengths, from 0."""
    return np.cumsum([0, *lengths])
