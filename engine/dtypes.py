"""torch dtypes by their names in the configuration, and the precision of a stage."""

from typing import NamedTuple

import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Precision(NamedTuple):
    """Dtypes in which a stage stores and computes."""

    model: torch.dtype
    """Of the KV pool; weights are rounded to it."""
    held: torch.dtype
    """In which weights are kept in memory."""
    compute: torch.dtype
    """In which a stage multiplies and adds, and of hidden states between stages."""
    int8: bool = False
    """Linear layers are in 8 bits; the embedding and the output head are held in `held`."""
    float8: bool = False
    """Linear layers whose weights are published in FP8 keep these."""
