"""A pass over all layers of a stage in one native call: tasks over tiles of rows, without a barrier between kernels."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.runtime.progress import PassProgress
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.grouped_attention import GroupedAttention
from headrace.engine.layers.layer import Layer
from headrace.engine.model.arithmetic import Weight
from headrace.engine.model.config import ModelSpec
from headrace.engine.native.int8 import PackedInt8
from headrace.engine.native.kernel_calls import STEP, BatchRecord, Kernels, LayerRecord, StackRecord

TILE_ROWS = (128, 96, 64, 48, 32)
"""Most rows of a tile: more read keys, values and weights less often, fewer leave threads less to wait for."""

INT8_TILE_ROWS = (256, *TILE_ROWS)
"""With weights in 8 bits, whose products take less time: what is read weighs more."""

TILES_PER_THREAD = 4
"""At least, or half as many of few rows: those behind a tile that is held up are what the other threads have to do."""

LANES = 32  # rows of a head that attention computes at a time


class TaskGraph:
    """Layers that are computed by headrace_run_graph(), see engine/native/graph.c. Bits are those of the kernels, layer
    by layer."""

    def __init__(self, kernels: Kernels, layers: Sequence[Layer], spec: ModelSpec, dtype: torch.dtype) -> None:
        """layers: for which takes() is true."""
        self._kernels, self._dtype, self._spec = kernels, dtype, spec
        self._kept: list[Tensor | PackedInt8] = []  # whose addresses are in the records
        self._layers = (LayerRecord * len(layers))(*map(self._record, layers))
        int8 = any(isinstance(weight, PackedInt8) for weight in _matrices(layers[0]))
        self._stack = StackRecord(
            ctypes.addressof(self._layers), len(layers), spec.hidden_size, spec.intermediate_size, int8, spec.norm_eps
        )
        self.seed = 0
        """For tests: with another number tasks are taken in a random order, and held up."""

    @staticmethod
    def takes(kernels: Kernels, layers: Sequence[Layer], pool: KVPool, dtype: torch.dtype) -> bool:
        """Whether these layers may be computed so: dense ones with grouped-query attention, whose weights our kernels
        have packed, all in 8 bits or none, of one shard, over a pool in the dtype of the computation."""
        if not layers or not kernels.runs(dtype) or pool.tensor.dtype != dtype:
            return False
        if dtype != torch.float32 and pool.geometry.head_dim % STEP:
            return False
        kinds = {isinstance(weight, PackedInt8) for layer in layers for weight in _matrices(layer)}
        return len(kinds) == 1 and all(_is_plain(kernels, layer) for layer in layers)

    def tile_rows(self, spans: Sequence[AttentionSpan]) -> int:
        """Rows of a tile of a pass; 0 for one tile, each step of which threads divide: of too few rows for the threads,
        or with a tile that would keep one thread busy when the others are done, such as single rows over many
        positions."""
        threads, rows = torch.get_num_threads(), sum(span.count for span in spans)
        sizes = INT8_TILE_ROWS if self._stack.int8 else TILE_ROWS
        if threads == 1:
            return sizes[0]
        few = rows <= (TILES_PER_THREAD * threads - 1) * sizes[-1]
        least = TILES_PER_THREAD // 2 if few else TILES_PER_THREAD
        costs = self._costs(spans)
        for size in (size for size in sizes if ceil_div(rows, size) >= least * threads):
            tiles = np.add.reduceat(costs, np.arange(0, rows, size))
            if tiles.max() * (least / 2) * threads <= tiles.sum():
                return size
        return 0

    def run(
        self, hidden: Tensor, rotary: Rotary, attention: NativePass, tile_rows: int, progress: PassProgress
    ) -> None:
        """Run the layers over hidden states [tokens, hidden size], in place. tile_rows: see tile_rows(). Raises
        MemoryError."""
        terms, scoring = attention.terms(self._spec.heads, items=not tile_rows)
        rows, heads = len(hidden), self._spec.heads + 2 * self._spec.kv_heads
        joined = hidden.new_empty(rows, heads * self._spec.head_dim)
        cos, sin = rotary.cos.contiguous(), rotary.sin.contiguous()
        batch = BatchRecord(
            attention=ctypes.pointer(terms),
            scoring=ctypes.pointer(scoring),
            rows=rows,
            hidden=hidden.data_ptr(),
            joined=joined.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            tile_rows=tile_rows,
            progress=progress.address,
            seed=self.seed,
        )
        self._kernels.run_layers(self._dtype, self._stack, batch)

    def _costs(self, spans: Sequence[AttentionSpan]) -> NDArray[np.float64]:
        """What each row of a pass costs, in multiplications of a layer."""
        spec, inner = self._spec, self._stack.inner
        counts = np.array([span.count for span in spans])
        ends = np.array([span.start for span in spans]) + counts
        lanes = -(-counts * (spec.heads // spec.kv_heads) // LANES) * LANES  # some of which have no row
        attention = 2.0 * spec.kv_heads * spec.head_dim * ends * lanes / counts
        attended = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
        return np.repeat(attention + spec.hidden_size * (attended + 3.0 * inner), counts)

    def _record(self, layer: Layer) -> LayerRecord:
        block, (qkv, output, gate_up, down) = layer.attention, _matrices(layer)
        assert isinstance(block, GroupedAttention)
        bias_dtype = torch.float32 if isinstance(qkv, PackedInt8) else self._dtype
        return LayerRecord(
            input_norm=self._vector(layer.input_norm, self._dtype),
            qkv=self._matrix(qkv),
            qkv_bias=self._vector(block.qkv.bias, bias_dtype),
            q_norm=self._vector(block.rules.q_norm, self._dtype),
            k_norm=self._vector(block.rules.k_norm, self._dtype),
            output=self._matrix(output),
            output_bias=self._vector(block.output.bias, bias_dtype),
            post_norm=self._vector(layer.post_norm, self._dtype),
            gate_up=self._matrix(gate_up),
            down=self._matrix(down),
        )

    def _vector(self, values: Tensor | None, dtype: torch.dtype) -> int | None:
        if values is None:
            return None
        kept = values.to(dtype).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _matrix(self, weight: Weight) -> int:
        assert isinstance(weight, Tensor | PackedInt8)
        self._kept.append(weight)
        return ctypes.addressof(weight.record) if isinstance(weight, PackedInt8) else weight.data_ptr()


def _matrices(layer: Layer) -> tuple[Weight, ...]:
    """Query, key and value; output; gate and up; down. None of another layer than _is_plain()."""
    block, mlp = layer.attention, layer.mlp
    if not isinstance(block, GroupedAttention) or not isinstance(mlp, DenseMlp):
        return ()
    return block.qkv.weight, block.output.weight, mlp.gate_up.weight, mlp.down.weight


def _is_plain(kernels: Kernels, layer: Layer) -> bool:
    block, panels = layer.attention, [kernels.whole_panels(weight) for weight in _matrices(layer)]
    if not isinstance(block, GroupedAttention) or block.shards > 1 or not panels:
        return False
    return all(panels) and panels[2] % 2 == 0  # no panel has columns of gate and up
