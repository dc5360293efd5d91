"""Attention over the paged KV pool: one interface, an implementation per device and dtype."""

from functools import partial

import torch

from headrace.engine.attention.cpu import CpuPass
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import Attention
from headrace.engine.kv.pool import KVPool
from headrace.engine.native.kernel_calls import Kernels


def choose_attention(pool: KVPool, *, native_units: bool, kernels: Kernels | None = None) -> Attention:
    """The fastest attention for the pool's device and dtype.

    native_units: the device multiplies matrices of the pool's dtype in hardware. kernels: the native ones, where they
    work.
    """
    dtype = pool.tensor.dtype
    if pool.tensor.device.type == "cpu":
        if kernels is not None:
            return partial(NativePass, pool, kernels)
        return partial(CpuPass, pool, compute_dtype=dtype if native_units else torch.float32)
    if dtype == torch.float32:
        return partial(SdpaPass, pool)
    from headrace.engine.attention.varlen import VarlenPass

    return partial(VarlenPass, pool)
