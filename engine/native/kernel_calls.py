"""Native CPU kernels, called through ctypes: products, RMSNorm, rotary embedding, SwiGLU gate, attention.

Where they were not compiled at installation, or the CPU lacks AVX2, torch does the same work.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.core.runtime.native_library import load_library
from headrace.engine.model.arithmetic import Arithmetic, Rows, Weight, linear
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.native import onednn
from headrace.engine.native.int8 import Int8Record, PackedInt8, pack_int8

log = logging.getLogger(__name__)

STEP = 8  # as in bfloat16_panel.h: head_dim has to be a multiple of it
ALL_SEGMENTS = -1  # as in attention.h
POOL_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as numbered in simd.h
_I, _P, _F = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class SpanRecord(ctypes.Structure):
    """struct span of attention.h: rows [row, row + count) of a batch are positions [start, start + count) of a request.

    pages: address of int64 page ids covering [0, start + count).
    """

    _fields_ = (("start", _I), ("count", _I), ("row", _I), ("pages", _P))


class ItemRecord(ctypes.Structure):
    """struct item of attention.h: a work item, queries of `count` tokens from `first` of a span, for one KV head; over
    one segment of positions, or ALL_SEGMENTS."""

    _fields_ = (("span", _I), ("head", _I), ("first", _I), ("count", _I), ("segment", _I), ("partial", _I))


class RowsRecord(ctypes.Structure):
    """struct rows of attention.h: keys or values of a pool. memory is an address."""

    _fields_ = (("memory", _P), *((name, _I) for name in ("page_stride", "layer_stride", "head_stride", "width")))


class ScoringRecord(ctypes.Structure):
    """struct scoring of attention.h: how scores become weights. sinks is an address; scale, cap and sinks are times
    log2(e)."""

    _fields_ = (("scale", _F), ("cap", _F), ("sinks", _P))


class PassRecord(ctypes.Structure):
    """struct pass of attention.h: one forward pass. begins, ends, spans, items and merges are addresses; the caller
    keeps their memory and that of keys and values alive."""

    _fields_ = (
        *((name, RowsRecord) for name in ("keys", "values")),
        *((name, _I) for name in ("dtype", "page_size", "kv_heads", "group")),
        *((name, _P) for name in ("begins", "ends")),
        ("spans", _P),
        ("items", _P),
        ("item_count", _I),
        ("most_tokens", _I),
        ("segment", _I),
        ("merges", _P),
        ("merge_count", _I),
        ("partial_count", _I),
    )


class LayerRecord(ctypes.Structure):
    """struct layer of graph.h: addresses of a layer's weights, or None."""

    _fields_ = tuple(
        (name, _P)
        for name in (
            "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias", "post_norm", "gate_up",
            "down",
        )
    )  # fmt: skip


class StackRecord(ctypes.Structure):
    """struct stack of graph.h: the layers of a stage. layers: address of their records."""

    _fields_ = (("layers", _P), ("count", _I), ("hidden", _I), ("inner", _I), ("int8", _I), ("eps", _F))


class BatchRecord(ctypes.Structure):
    """struct batch of graph.h: what a pass computes. All but numbers are addresses; the caller keeps them alive."""

    _fields_ = (
        ("attention", ctypes.POINTER(PassRecord)),
        ("scoring", ctypes.POINTER(ScoringRecord)),
        ("rows", _I),
        *((name, _P) for name in ("hidden", "joined", "cos", "sin")),
        ("tile_rows", _I),
        ("progress", _P),
        ("seed", _I),
    )


class Kernels(Arithmetic):
    """An Arithmetic of native kernels, and attention. All methods but pack() and linear() raise ValueError for a tensor
    of the wrong dtype or strides.

    Tensors are on the CPU, in float32 or in bfloat16, which is rounded where torch rounds it.
    Rows may be strided where a method says so; the elements of a row are contiguous.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        bits: Literal[256, 512],
        int8_bits: Literal[256, 512] = 256,
        attend_bfloat16: str = "",
        *,
        bfloat16: bool = False,
    ) -> None:
        """library: the loaded kernels. bits: of the vectors that float32 and elementwise kernels use. int8_bits: of
        those that products in 8 bits use. attend_bfloat16: name of the attention kernel for bfloat16, if there is to
        be one. bfloat16: products in bfloat16 are ours, not oneDNN's; with 512 bits."""

        def kernel(name: str, *arguments: Any) -> Any:
            function = library[name]
            function.argtypes = arguments
            return function

        self._lanes = bits // 16
        self._add_norm = kernel(f"headrace_add_norm_{bits}", _P, _P, _P, _P, _I, _I, _F, _I)
        self._rotate = kernel(f"headrace_rotate_{bits}", _P, _P, _P, _I, _I, _I, _I, _I)
        self._gate = kernel(f"headrace_gate_{bits}", _P, _P, _I, _I, _I)
        self._write_slots = kernel(f"headrace_write_slots_{bits}", _P, _I, _P, _P, _I, _I, _I, _I, _I, _I)
        product = (_P, _P, _P, _P, _I, _I, _I, _I)
        self._multiply = {torch.float32: kernel(f"headrace_multiply_float32_{bits}", *product)}
        run = (ctypes.POINTER(StackRecord), ctypes.POINTER(BatchRecord))
        self._run = {torch.float32: kernel(f"headrace_run_float32_{bits}", *run)}
        if bfloat16:
            self._multiply[torch.bfloat16] = kernel(f"headrace_multiply_bfloat16_{bits}", *product)
            self._run[torch.bfloat16] = kernel(f"headrace_run_bfloat16_{bits}", *run)
        self._multiply_by_rows = kernel(f"headrace_multiply_by_rows_{bits}", _P, _P, _P, _I, _I, _I, _I)
        self._int8_lanes = int8_bits // 16
        self._multiply_int8 = kernel(
            f"headrace_multiply_int8_{int8_bits}", _P, _I, ctypes.POINTER(Int8Record), _P, _P, _I, _I, _I
        )
        attend = (ctypes.POINTER(PassRecord), _I, _P, _I, _P, ctypes.POINTER(ScoringRecord))
        self._attend = {torch.float32: kernel(f"headrace_attend_float32_{bits}", *attend)}
        if attend_bfloat16:
            self._attend[torch.bfloat16] = kernel(attend_bfloat16, *attend)

    def pack(self, weight: Weight) -> Weight:
        """A weight [out, in] in the layout that linear() multiplies fastest.

        8 bits: see pack_int8(). Otherwise, where lanes divides out, float32: [out / lanes, in, lanes], and bfloat16:
        [out / lanes, in / 2, lanes, 2]; where we do not multiply bfloat16, oneDNN's own layout. Else unchanged.
        """
        if isinstance(weight, Int8Weight):
            return pack_int8(weight, self._int8_lanes)
        if isinstance(weight, Float8Weight):
            return weight
        columns, depth = weight.shape
        whole = columns % self._lanes == 0 and weight.dtype in self._multiply
        if whole and weight.dtype == torch.float32:
            return weight.reshape(-1, self._lanes, depth).transpose(1, 2).contiguous()
        if whole and depth % 2 == 0:
            pairs = weight.contiguous().view(torch.int32).view(-1, self._lanes, depth // 2)  # which are copied faster
            return pairs.transpose(1, 2).contiguous().view(weight.dtype).view(-1, depth // 2, self._lanes, 2)
        if weight.dtype == torch.bfloat16 and onednn.has_bfloat16():
            return onednn.pack(weight)
        return weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight.T + bias [out] → [rows, out]. weight: [out, in], or from pack(). Raises ValueError for
        an x that is not dense or of another width, and MemoryError when there is no memory to quantise it."""
        if isinstance(weight, PackedInt8):
            return self._multiply_by_int8(x, weight, bias)
        if isinstance(weight, Int8Weight | Float8Weight):
            return _other_linear(x, weight, bias)
        if x.dtype == torch.float32 and weight.dtype != x.dtype:
            packed = self.pack(weight.float())
            assert isinstance(packed, Tensor)
            weight = packed
        if is_packed(weight):
            return self._multiply_packed(x, weight, bias)
        if x.dtype != torch.float32:
            return _other_linear(x, weight, bias)
        output = self.logits(x, weight)
        return output if bias is None else output.add_(bias)

    def _multiply_packed(self, x: Tensor, packed: Tensor, bias: Tensor | None = None, *, gate: bool = False) -> Tensor:
        depth = packed.shape[1] * (packed.shape[3] if packed.dim() == 4 else 1)
        columns = packed.numel() // depth // (2 if gate else 1)
        _require(x.dtype == packed.dtype and x.is_contiguous() and x.shape[1] == depth and packed.is_contiguous())
        output = x.new_empty(len(x), columns)
        added = None if bias is None else bias.to(x.dtype).contiguous()
        self._multiply[x.dtype](
            x.data_ptr(), packed.data_ptr(), None if added is None else added.data_ptr(), output.data_ptr(),
            *output.shape, depth, gate,
        )  # fmt: skip
        return output

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """x [rows, in] @ head.T → float32 [rows, out]. head: [out, in], not packed. Raises what linear() raises."""
        if x.dtype != torch.float32:
            return _other_linear(x, head, None).float()
        head = head.float() if head.dtype == torch.float16 else head
        _require(x.is_contiguous() and x.shape[1] == head.shape[1] and head.is_contiguous())
        output = x.new_empty(len(x), len(head))
        self._multiply_by_rows(
            x.data_ptr(), head.data_ptr(), output.data_ptr(), *output.shape, x.shape[1], _dtype(head)
        )  # fmt: skip
        return output

    def _multiply_by_int8(
        self, x: Tensor, weight: PackedInt8, bias: Tensor | None = None, *, gate: bool = False
    ) -> Tensor:
        _require(x.is_contiguous() and x.shape[1] == weight.inputs)
        output = x.new_empty(len(x), weight.columns // (2 if gate else 1))
        wide = None if bias is None else bias.float().contiguous()
        failed = self._multiply_int8(
            x.data_ptr(), weight.inputs, ctypes.byref(weight.record), None if wide is None else wide.data_ptr(),
            output.data_ptr(), len(x), _dtype(x), gate,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory to quantise activations")
        return output

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]."""
        weight = weight.to(hidden.dtype).contiguous()
        if delta is None:
            hidden = hidden.contiguous()
        _require(hidden.is_contiguous() and (delta is None or (delta.is_contiguous() and delta.shape == hidden.shape)))
        _require(delta is None or delta.dtype == hidden.dtype)
        normed = torch.empty_like(hidden)
        other = None if delta is None else delta.data_ptr()
        self._add_norm(
            hidden.data_ptr(), other, weight.data_ptr(), normed.data_ptr(), *hidden.shape, eps, _dtype(hidden)
        )  # fmt: skip
        return normed

    def gated_linear(self, x: Rows, gate_up: Weight) -> Tensor:
        """SwiGLU gate of a product: gate(linear(x, gate_up)), bit by bit. Raises what linear() raises."""
        x = self.normed(x)
        if isinstance(gate_up, PackedInt8) and gate_up.columns % (2 * self._int8_lanes) == 0:
            return self._multiply_by_int8(x, gate_up, gate=True)
        if isinstance(gate_up, Int8Weight | Float8Weight) or not is_packed(gate_up) or len(gate_up) % 2:
            return self.gate(self.linear(x, gate_up))
        return self._multiply_packed(x, gate_up, gate=True)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place; rows may be strided. cos, sin: float32 [rows, 1, width] of
        rotary_tables."""
        rows, heads, width = x.shape
        _require(cos.dtype == sin.dtype == torch.float32 and x.stride()[1:] == (width, 1))
        _require(cos.is_contiguous() and sin.is_contiguous() and cos.numel() == sin.numel() == rows * width)
        self._rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, x.stride(0), heads, width, _dtype(x))

    def gate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU gate: gate_up [rows, 2 * width] → silu(first half) * second half [rows, width]."""
        _require(gate_up.is_contiguous())
        rows, both = gate_up.shape
        activated = gate_up.new_empty(rows, both // 2)
        self._gate(gate_up.data_ptr(), activated.data_ptr(), rows, both // 2, _dtype(gate_up))
        return activated

    def write_slots(self, x: Tensor, slots: Tensor, pool: Tensor, page_size: int) -> None:
        """Write keys and values x [rows, 2 * kv_heads, width], or latents [rows, 1, width], to a layer of pool.slots
        [slots, width], each in float32 or bfloat16; rows of x may be strided. slots: int64 [rows], of the first head;
        the others are page_size further on each. They are not checked."""
        rows, heads, width = x.shape
        _require(x.stride()[1:] == (width, 1) and pool.is_contiguous() and pool.shape[1] == width)
        _require(slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == rows)
        self._write_slots(
            x.data_ptr(), x.stride(0), slots.data_ptr(), pool.data_ptr(), rows, heads, width, page_size, _dtype(x),
            _dtype(pool),
        )  # fmt: skip

    def whole_panels(self, weight: Weight) -> int:
        """How many panels of columns a weight from pack() has, all whole; 0 for one that run_layers() does not take."""
        if isinstance(weight, PackedInt8):
            return weight.columns // self._lanes if self.runs_int8 and weight.columns % self._lanes == 0 else 0
        return len(weight) if isinstance(weight, Tensor) and is_packed(weight) else 0

    @property
    def runs_int8(self) -> bool:
        """Whether run_layers() multiplies by weights in 8 bits: not where vectors of 512 bits have no instructions for
        that."""
        return self._int8_lanes == self._lanes

    def runs(self, dtype: torch.dtype) -> bool:
        """Whether run_layers() computes in a dtype."""
        return dtype in self._run

    def run_layers(self, dtype: torch.dtype, stack: StackRecord, batch: BatchRecord) -> None:
        """A pass over layers in one call (graph.h), in a dtype for which runs() is true. The records are not checked.
        Raises MemoryError."""
        if self._run[dtype](ctypes.byref(stack), ctypes.byref(batch)):
            raise MemoryError("no memory for a forward pass")

    def attends(self, record: PassRecord, query: Tensor, scoring: ScoringRecord) -> bool:
        """Whether attend() takes queries of this dtype over the pool of a pass."""
        if query.dtype == torch.float32:
            return True
        keys, values = record.keys, record.values
        if query.dtype not in self._attend or record.dtype != POOL_DTYPES[query.dtype] or scoring.cap:
            return False
        return values.memory is not None and values.width == keys.width and keys.width % STEP == 0

    def attend(self, record: PassRecord, layer: int, query: Tensor, scoring: ScoringRecord) -> Tensor:
        """Attention of a pass over what the pool holds; query and result as in AttentionPass.attend, the result in the
        width of the values.

        query: rows may be strided; of a dtype for which attends() is true. Raises ValueError, and MemoryError when the
        kernel has no memory.
        """
        width = query.shape[-1]
        _require(self.attends(record, query, scoring) and query.stride()[1:] == (width, 1))
        _require(width == record.keys.width and query.shape[1] == record.kv_heads * record.group)
        output = query.new_empty(*query.shape[:2], record.values.width)
        failed = self._attend[query.dtype](
            ctypes.byref(record), layer, query.data_ptr(), query.stride(0), output.data_ptr(), ctypes.byref(scoring)
        )
        if failed:
            raise MemoryError("no memory for attention")
        return output


@cache
def load_kernels(*, wide: bool, bfloat16: bool, vnni: bool = False, emulate: bool = False) -> Kernels | None:
    """The kernels, or None where they were not compiled or the CPU lacks AVX2. torch has to be imported first: its
    OpenMP runtime is shared.

    wide: with vectors of 512 bits. bfloat16: with attention in bfloat16. vnni: with AVX512-VNNI for products in 8 bits.
    All only where the CPU has the instructions. emulate: with the slow emulation of those of bfloat16.
    """
    library = load_library(Path(__file__).parent, "kernels")
    if library is None:
        log.warning(
            "the native kernels were not compiled at installation because no C compiler was found: forward passes are "
            "slower"
        )
    if library is None or not library.headrace_has_256():
        return None
    attend = "headrace_attend_bfloat16" if bfloat16 and library.headrace_has_bfloat16() else ""
    bits: Literal[256, 512] = 512 if wide and library.headrace_has_512() else 256
    int8_bits: Literal[256, 512] = 512 if vnni and library.headrace_has_512_vnni() else 256
    # The tiles of AMX are faster, by oneDNN.
    products = bool(attend) and bits == 512 and not emulate and not onednn.sums_by_rows()
    attend = "headrace_attend_bfloat16_emulated" if emulate else attend
    return Kernels(library, bits, int8_bits, attend, bfloat16=products)


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in a layout of pack() that our own products take."""
    return weight.dim() > 2


def _other_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """A product in 16 bits by oneDNN, or by weights in 8 bits that are not packed. The sums of a row do not depend on
    the rows beside it, whichever kernel oneDNN takes."""

    def multiply(rows: Tensor) -> Tensor:
        if isinstance(weight, Tensor) and weight.is_mkldnn:
            return onednn.linear(rows, weight, bias)
        return linear(rows, weight, bias)

    if x.dtype != torch.float32 and onednn.sums_by_rows():
        if isinstance(weight, Tensor) and not weight.is_mkldnn:
            weight = onednn.whole_depth(weight)
        return onednn.in_pieces(x, multiply)
    if len(x) == 1:  # as one of two: oneDNN has a kernel for one that sums in another order
        return multiply(torch.cat((x, x)))[:1]
    return multiply(x)


def _dtype(rows: Tensor) -> int:
    """Number of the dtype in simd.h. Raises ValueError for one that it does not compute with."""
    _require(rows.dtype in (torch.float32, torch.bfloat16))
    return POOL_DTYPES[rows.dtype]


def _require(condition: bool) -> None:
    """Check what the kernels do not: with a wrong stride they would write anywhere. Raises ValueError."""
    if not condition:
        raise ValueError("a tensor has a dtype, shape or stride that the native kernels do not take")
