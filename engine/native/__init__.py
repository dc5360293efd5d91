"""Native CPU kernels, called through ctypes: products, RMSNorm, rotary embedding, SwiGLU gate, attention.

Compiled when the package is installed. Where it was not, or the CPU lacks AVX2, torch does the same work.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.core.runtime.native_library import load_library
from headrace.engine.model.arithmetic import linear
from headrace.engine.native import onednn

log = logging.getLogger(__name__)

STEP = 8  # as in attention_bfloat16.h: head_dim has to be a multiple of it
POOL_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as numbered in simd.h
_I, _P, _F = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class SpanRecord(ctypes.Structure):
    """struct span of attention.h: rows [row, row + count) of a batch are positions [start, start + count) of a request.

    pages: address of int64 page ids covering [0, start + count).
    """

    _fields_ = (("start", _I), ("count", _I), ("row", _I), ("pages", _P))


class ItemRecord(ctypes.Structure):
    """struct item of attention.h: a work item, queries of `count` tokens from `first` of a span, for one KV head."""

    _fields_ = (("span", _I), ("head", _I), ("first", _I), ("count", _I))


class PassRecord(ctypes.Structure):
    """struct pass of attention.h: one forward pass. pool, spans and items are addresses; the caller keeps their memory
    alive."""

    _fields_ = (
        ("pool", _P),
        *((name, _I) for name in ("dtype", "page_size", "page_stride", "kv_heads", "group", "width")),
        ("spans", _P),
        ("items", _P),
        ("item_count", _I),
        ("most_tokens", _I),
    )


class Kernels:
    """An Arithmetic of native kernels, and attention. All methods but pack() and linear() raise ValueError for a tensor
    of the wrong dtype or strides.

    Tensors are on the CPU, in float32 or in bfloat16, which is rounded where torch rounds it.
    Rows may be strided where a method says so; the elements of a row are contiguous.
    """

    def __init__(self, library: ctypes.CDLL, bits: Literal[256, 512], attend_bfloat16: str = "") -> None:
        """library: the loaded kernels. bits: of the vectors that float32 and elementwise kernels use. attend_bfloat16:
        name of the attention kernel for bfloat16, if there is to be one."""

        def kernel(name: str, *arguments: Any) -> Any:
            function = library[name]
            function.argtypes = arguments
            return function

        self._lanes = bits // 16
        self._add_norm = kernel(f"headrace_add_norm_{bits}", _P, _P, _P, _P, _I, _I, _F, _I)
        self._rotate = kernel(f"headrace_rotate_{bits}", _P, _P, _P, _I, _I, _I, _I, _I)
        self._gate = kernel(f"headrace_gate_{bits}", _P, _P, _I, _I, _I)
        self._multiply = kernel(f"headrace_multiply_{bits}", _P, _P, _P, _I, _I, _I)
        self._multiply_by_rows = kernel(f"headrace_multiply_by_rows_{bits}", _P, _P, _P, _I, _I, _I)
        attend = (ctypes.POINTER(PassRecord), _I, _P, _I, _P, _F)
        self._attend = {torch.float32: kernel(f"headrace_attend_float32_{bits}", *attend)}
        if attend_bfloat16:
            self._attend[torch.bfloat16] = kernel(attend_bfloat16, *attend)

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the layout that linear() multiplies fastest.

        float32: [out / lanes, in, lanes], where lanes divides out. bfloat16: oneDNN's own layout, where it multiplies
        that. Otherwise unchanged.
        """
        if weight.dtype == torch.bfloat16 and onednn.has_bfloat16():
            return onednn.pack(weight)
        if weight.dtype != torch.float32 or weight.shape[0] % self._lanes:
            return weight
        return weight.view(-1, self._lanes, weight.shape[1]).transpose(1, 2).contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight.T + bias [out] → [rows, out]. weight: [out, in], or from pack(). Raises ValueError for
        a float32 x that is not dense."""
        if x.dtype != torch.float32:
            return _sixteen_bit_linear(x, weight, bias)
        weight = weight if weight.dtype == x.dtype else self.pack(weight.float())
        depth = weight.shape[1]
        _require(x.is_contiguous() and x.shape[1] == depth and weight.is_contiguous())
        columns = weight.numel() // depth
        output = x.new_empty(len(x), columns)
        multiply = self._multiply if weight.dim() == 3 else self._multiply_by_rows
        multiply(x.data_ptr(), weight.data_ptr(), output.data_ptr(), len(x), columns, depth)
        return output if bias is None else output.add_(bias)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]."""
        weight = weight.to(hidden.dtype).contiguous()
        _require(hidden.is_contiguous() and (delta is None or (delta.is_contiguous() and delta.shape == hidden.shape)))
        _require(delta is None or delta.dtype == hidden.dtype)
        normed = torch.empty_like(hidden)
        other = None if delta is None else delta.data_ptr()
        self._add_norm(
            hidden.data_ptr(), other, weight.data_ptr(), normed.data_ptr(), *hidden.shape, eps, _dtype(hidden)
        )  # fmt: skip
        return normed

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

    def attends(self, record: PassRecord, query: Tensor) -> bool:
        """Whether attend() takes queries of this dtype over the pool of a pass."""
        if query.dtype == torch.float32:
            return True
        same = query.dtype in self._attend and record.dtype == POOL_DTYPES[query.dtype]
        return same and record.width % STEP == 0

    def attend(self, record: PassRecord, layer: int, query: Tensor, scale: float) -> Tensor:
        """Causal attention of a pass over what the pool holds; query and result as in AttentionPass.attend.

        query: rows may be strided; of a dtype for which attends() is true. scale: of the scores, times
        log2(e). Raises ValueError, and MemoryError when the kernel has no memory.
        """
        width = query.shape[-1]
        _require(self.attends(record, query) and query.stride()[1:] == (width, 1))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        failed = self._attend[query.dtype](
            ctypes.byref(record), layer, query.data_ptr(), query.stride(0), output.data_ptr(), scale
        )
        if failed:
            raise MemoryError("no memory for attention")
        return output


@cache
def load_kernels(*, wide: bool, bfloat16: bool, emulate: bool = False) -> Kernels | None:
    """The kernels, or None where they were not compiled or the CPU lacks AVX2. torch has to be imported first: its
    OpenMP runtime is shared.

    wide: with vectors of 512 bits. bfloat16: with attention in bfloat16. Both only where the CPU has the instructions.
    emulate: with the slow emulation of those of bfloat16.
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
    return Kernels(library, bits, "headrace_attend_bfloat16_emulated" if emulate else attend)


def _sixteen_bit_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product by oneDNN. A single row is computed as one of two: oneDNN has a kernel for one that sums in another
    order."""
    if len(x) == 1:
        return _sixteen_bit_linear(torch.cat((x, x)), weight, bias)[:1]
    return onednn.linear(x, weight, bias) if weight.is_mkldnn else linear(x, weight, bias)


def _dtype(rows: Tensor) -> int:
    """Number of the dtype in simd.h. Raises ValueError for one that it does not compute with."""
    _require(rows.dtype in (torch.float32, torch.bfloat16))
    return POOL_DTYPES[rows.dtype]


def _require(condition: bool) -> None:
    """Check what the kernels do not: with a wrong stride they would write anywhere. Raises ValueError."""
    if not condition:
        raise ValueError("a tensor has a dtype, shape or stride that the native kernels do not take")
