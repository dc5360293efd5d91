"""Queues Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Queue a kernel on the current stream of the device of its first argument."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    run: Callable[..., Any] = kernel[grid]
    if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            run(*arguments, **constants)
    else:
        run(*arguments, **constants)
