"""Attention over the paged KV pool: one interface, an implementation per device and dtype."""

import torch

from headrace.engine.attention.cpu import CpuAttention
from headrace.engine.attention.gpu import SdpaAttention, VarlenAttention
from headrace.engine.attention.native import NativeAttention
from headrace.engine.attention.paged import Attention
from headrace.engine.kv.pool import KVPool
from headrace.engine.native import Kernels


def choose_attention(pool: KVPool, *, native_units: bool, kernels: Kernels | None = None) -> Attention:
    """The fastest attention for the pool's device and dtype.

    native_units: the device multiplies matrices of the pool's dtype in hardware. kernels: the native ones, where they
    work.
    """
    dtype = pool.tensor.dtype
    if pool.tensor.device.type == "cpu":
        if kernels is not None:
            return NativeAttention(pool, kernels)
        return CpuAttention(pool, dtype if native_units else torch.float32)
    if dtype == torch.float32:
        return SdpaAttention(pool)
    return VarlenAttention(pool)
