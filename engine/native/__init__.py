"""kernels.c, built when the package is installed: a forward pass on the CPU, each part in one parallel region. Where it
was not built, or the CPU lacks AVX2, torch does the same work."""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.runtime.native_library import load_library
from headrace.engine.model.arithmetic import linear
from headrace.engine.native import onednn

log = logging.getLogger(__name__)

LANES = 16  # of kernels.c
POOL_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_I, _P, _F = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class SpanRecord(ctypes.Structure):
    """struct span of kernels.c. pages: address of int64 page ids."""

    _fields_ = (("start", _I), ("count", _I), ("row", _I), ("pages", _P))


class ItemRecord(ctypes.Structure):
    """struct item of kernels.c: queries of `count` tokens, from `first` on in their span, for one KV head."""

    _fields_ = (("span", _I), ("head", _I), ("first", _I), ("count", _I))


class PassRecord(ctypes.Structure):
    """struct pass of kernels.c. pool, spans and items are addresses; whoever makes it keeps alive what is there."""

    _fields_ = (
        ("pool", _P),
        *((name, _I) for name in ("dtype", "page_size", "page_stride", "kv_heads", "group", "width")),
        ("spans", _P),
        ("items", _P),
        ("item_count", _I),
        ("most_tokens", _I),
    )


class Kernels:
    """Calls into the library. Tensors are on the CPU, in float32, or but for attend() in bfloat16, which is rounded
    where torch rounds it; rows may be apart, elements of a row may not."""

    def __init__(self, library: ctypes.CDLL, multiply: bool) -> None:
        """multiply: matrices in float32, too; else they are left to torch."""
        self._add_norm = library.headrace_add_norm
        self._add_norm.argtypes, self._add_norm.restype = (_P, _P, _P, _P, _I, _I, _F, _I), None
        self._rotate = library.headrace_rotate
        self._rotate.argtypes, self._rotate.restype = (_P, _P, _P, _I, _I, _I, _I, _I), None
        self._gate = library.headrace_gate
        self._gate.argtypes, self._gate.restype = (_P, _P, _I, _I, _I), None
        self._multiply = library.headrace_multiply
        self._multiply.argtypes, self._multiply.restype = (_P, _P, _P, _I, _I, _I), None
        self._multiplies = multiply
        self._attend = library.headrace_attend
        self._attend.argtypes = (ctypes.POINTER(PassRecord), _I, _P, _I, _P, _I, _P, _F)

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] → [out / LANES, in, LANES] for the kernel, which multiplies float32; bfloat16 is for oneDNN. What
        neither multiplies here is left as it is, for torch."""
        if weight.dtype == torch.bfloat16 and onednn.has_bfloat16():
            return onednn.pack(weight)
        if not self._multiplies or weight.dtype != torch.float32 or weight.shape[0] % LANES:
            return weight
        return weight.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in], a matrix from pack(), bias [out]: [rows, out]."""
        if weight.is_mkldnn:
            return onednn.linear(x, weight, bias)
        if weight.dim() == 2:
            return linear(x, weight, bias)
        panels, depth, _ = weight.shape
        _require(x.dtype == torch.float32 and x.is_contiguous() and x.shape[1] == depth and weight.is_contiguous())
        output = x.new_empty(len(x), panels * LANES)
        self._multiply(x.data_ptr(), weight.data_ptr(), output.data_ptr(), len(x), panels * LANES, depth)
        return output if bias is None else output.add_(bias)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta, in place; returns RMSNorm of it times weight [width]."""
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
        """headrace.engine.model.rope.rotate, of x [rows, heads, width] whose heads are dense."""
        rows, heads, width = x.shape
        _require(cos.dtype == sin.dtype == torch.float32 and x.stride()[1:] == (width, 1))
        _require(cos.is_contiguous() and sin.is_contiguous() and cos.numel() == sin.numel() == rows * width)
        self._rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, x.stride(0), heads, width, _dtype(x))

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of each row [rows, 2 * width], times the second: [rows, width]."""
        _require(gate_up.is_contiguous())
        rows, both = gate_up.shape
        activated = gate_up.new_empty(rows, both // 2)
        self._gate(gate_up.data_ptr(), activated.data_ptr(), rows, both // 2, _dtype(gate_up))
        return activated

    def attend(self, record: PassRecord, layer: int, query: Tensor, keys_values: Tensor, scale: float) -> Tensor:
        """Attention of a pass; shapes as in AttentionPass.attend. scale: of the scores, times log2(e)."""
        width = query.shape[-1]
        for rows in (query, keys_values):
            _require(rows.dtype == torch.float32 and rows.stride()[1:] == (width, 1))
        output = torch.empty(query.shape)
        failed = self._attend(
            ctypes.byref(record), layer, query.data_ptr(), query.stride(0),
            keys_values.data_ptr(), keys_values.stride(0), output.data_ptr(), scale,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for attention")
        return output


@cache
def load_kernels(*, multiply: bool) -> Kernels | None:
    """None where there are none for this machine. torch has to be imported first: its OpenMP runtime is shared.
    multiply: see Kernels."""
    library = load_library(Path(__file__).with_name("kernels.c"))
    if library is None:
        log.warning("kernels.c was not compiled at the installation, for want of a C compiler: torch takes longer")
    return Kernels(library, multiply) if library is not None and library.headrace_usable() else None


def _dtype(rows: Tensor) -> int:
    """What kernels.c calls the dtype of rows that it computes with."""
    _require(rows.dtype in (torch.float32, torch.bfloat16))
    return POOL_DTYPES[rows.dtype]


def _require(condition: bool) -> None:
    """What the kernels take on trust is checked here, for a wrong stride would have them write anywhere."""
    if not condition:
        raise ValueError("a tensor is not as the kernels need it")
