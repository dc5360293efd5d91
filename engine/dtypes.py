"""What torch calls the dtypes of a configuration."""

from typing import NamedTuple

import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision(NamedTuple):
    """model: of hidden states between stages and of the KV pool; weights are rounded to it, too. held: what weights are
    kept in. compute: what a stage multiplies and adds in."""

    model: torch.dtype
    held: torch.dtype
    compute: torch.dtype
