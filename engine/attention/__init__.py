"""Attention over the KV pool: one interface, small implementations."""

import torch

from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.sdpa import SdpaAttention
from engine.pool import KVPool


def choose_attention(pool: KVPool, *, native_units: bool) -> Attention:
    """native_units: the device multiplies matrices of the pool's dtype in hardware."""
    dtype = pool.tensor.dtype
    if pool.tensor.device.type == "cpu":
        return CpuAttention(pool, dtype if native_units else torch.float32)
    if dtype == torch.float32:
        return SdpaAttention(pool)
    from engine.attention.cuda import VarlenAttention  # the kernel's module is not in every torch

    return VarlenAttention(pool)
