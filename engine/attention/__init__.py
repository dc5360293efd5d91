"""Attention over the paged KV pool: one interface, an implementation per device and dtype."""

import logging
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from headrace.core.config import AttentionChoice
from headrace.core.types.errors import ConfigError
from headrace.engine.attention.cpu import CpuPass
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.native import NativePass, NativeWork
from headrace.engine.attention.paged import Attention
from headrace.engine.attention.work import MakeWork
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.native.kernel_calls import Kernels

log = logging.getLogger(__name__)
FLASHINFER_HEAD_DIMS = (64, 128, 256)  # for which it has kernels on every GPU


class ChosenAttention(NamedTuple):
    """How rows attend over a pool."""

    begin: Attention
    name: str
    """What computes it, in words."""


def choose_attention(
    pool: KVPool,
    *,
    native_units: bool,
    kernels: Kernels | None = None,
    wanted: AttentionChoice = "auto",
    heads: int = 0,
) -> ChosenAttention:
    """The fastest attention for the pool's device and dtype.

    native_units: the device multiplies matrices of the pool's dtype in hardware. kernels: the native ones, where they
    work. wanted: on a GPU. heads: of queries; 0: as many as of keys. Raises ConfigError when FlashInfer is wanted and
    does not work here.
    """
    dtype, device = pool.tensor.dtype, pool.tensor.device
    heads = heads or pool.geometry.kv_heads
    reason = "it is not wanted" if wanted == "torch" else _no_flashinfer(pool, heads)
    if not reason:
        from_pages, reason = _try_flashinfer(pool, heads)
        if from_pages is not None:
            return ChosenAttention(from_pages, "FlashInfer")
        if wanted == "auto":
            log.warning("attention is not computed by FlashInfer, so every pass is slower: %s", reason)
    if wanted == "flashinfer":
        raise ConfigError(f"--attention flashinfer does not work on {device}: {reason}; write --attention torch")
    if _on_cpu(pool):
        if kernels is not None:
            return ChosenAttention(partial(NativePass, pool, kernels), "native kernels")
        return ChosenAttention(partial(CpuPass, pool, compute_dtype=dtype if native_units else torch.float32), "torch")
    if dtype == torch.float32:
        return ChosenAttention(partial(SdpaPass, pool), "torch, row by row")
    from headrace.engine.attention.varlen import VarlenPass

    name = f"torch's flash kernel behind a gather (FlashInfer: {reason})"
    return ChosenAttention(partial(VarlenPass, pool), name)


def choose_work(kernels: Kernels | None, arithmetic: Arithmetic) -> MakeWork | None:
    """What attends to pages in passes of models whose layers differ: native kernels or our own in Triton; None where
    there are neither."""
    if kernels is not None:
        return partial(NativeWork, kernels)
    if not arithmetic.compiled:
        return None
    from headrace.engine.attention.triton_work import TritonWork

    return TritonWork


def _on_cpu(pool: KVPool) -> bool:
    return pool.tensor.device.type == "cpu"


def _no_flashinfer(pool: KVPool, heads: int) -> str:
    """Why FlashInfer cannot attend over a pool; "" where it may."""
    geometry = pool.geometry
    if _on_cpu(pool):
        return "it is for GPUs"
    if pool.tensor.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in bfloat16 and float16, not in {geometry.dtype}"
    if geometry.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has no kernels for heads of {geometry.head_dim}"
    if heads % geometry.kv_heads:
        return f"{heads} query heads cannot share {geometry.kv_heads} KV heads evenly"
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'headrace[flashinfer]'"
    return ""


def _try_flashinfer(pool: KVPool, heads: int) -> tuple[Attention | None, str]:
    """FlashInfer over a pool, or None and why not."""
    try:
        from headrace.engine.attention.flashinfer import try_flashinfer

        return try_flashinfer(pool, heads), ""
    except Exception as error:  # its compilers and bindings raise errors of many kinds
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]
