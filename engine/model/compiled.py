"""The arithmetic of a layer in kernels that torch.compile makes: by Triton on CUDA, in C++ on the CPU.

What torch does by a kernel per operation, nine for a norm in bfloat16, is one call here. Each is compiled once for the
widths that it meets and any number of rows, and called without the guards of torch.compile: those take longer than the
launches that are saved, and what they look at is the same in every pass of a model.
"""

import logging
from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from headrace.core.config import Compile
from headrace.core.types.errors import ConfigError
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic, add_norm, gate
from headrace.engine.model.rope import rotate

log = logging.getLogger(__name__)

EXAMPLE_ROWS = 64  # what a kernel is laid out for; it is right for any number
LARGEST = (1 << 31) - 1  # elements that a kernel's index reaches


class CompiledArithmetic(TorchArithmetic):
    """Compiles at the first call with new widths: after one forward pass nothing is left to compile. Rounds where
    TorchArithmetic does, on backend "inductor"."""

    def __init__(self, backend: str = "inductor") -> None:
        """backend: of torch.compile."""
        self._backend = backend
        self._options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
        self._kernels: dict[Hashable, Callable[..., Any]] = {}

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._run(add_norm, (hidden.shape[1], delta is None, eps), hidden, delta, weight, eps)
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._run(rotate, (x.shape[1:], x.stride(0)), x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        activated: Tensor = self._run(gate, gate_up.shape[1], gate_up)
        return activated

    def _run(self, function: Callable[..., Any], fixed: Hashable, x: Tensor, *others: object) -> Any:
        """function(x, *others) by the kernel for x's dtype and what is `fixed` in it."""
        if x.shape[0] * x.stride(0) > LARGEST:
            return function(x, *others)
        key = (function, x.dtype, fixed)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._compile(function, x, *others)
        return kernel(x, *others)

    def _compile(self, function: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
        examples = tuple(_example(each) if isinstance(each, Tensor) else each for each in arguments)
        compiled: Any = torch.compile(
            function, fullgraph=True, dynamic=False, backend=self._backend, options=self._options
        )
        ahead = compiled.aot_compile((examples, {}))
        ahead.disable_guard_check()
        kernel: Callable[..., Any] = ahead
        return kernel


def choose_arithmetic(wanted: Compile, device: str, plain: Arithmetic) -> Arithmetic:
    """plain: the one to use where nothing is to be compiled. wanted "auto" compiles on CUDA where Triton is installed
    and works. Raises ConfigError for "on" where nothing can be compiled."""
    if wanted == "off" or (wanted == "auto" and (device == "cpu" or find_spec("triton") is None)):
        return plain
    compiled = CompiledArithmetic()
    try:
        compiled.gate(torch.zeros(1, 2, device=device))  # the smallest kernel shows whether there is a compiler
    except (RuntimeError, OSError, AttributeError) as error:  # the last from a torch before 2.12
        reason = str(error).partition("\n")[0]
        if wanted == "on":
            raise ConfigError(f"nothing can be compiled for {device}: {reason}; write --compile off") from error
        log.warning("layers are not compiled, so small chunks will take longer: %s", reason)
        return plain
    return compiled


def _example(tensor: Tensor) -> Tensor:
    """A tensor like this one of any number of rows; a weight [width] as it is."""
    if tensor.dim() == 1:
        return tensor
    shape = (EXAMPLE_ROWS, *tensor.shape[1:])
    example = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    torch._dynamo.mark_dynamic(example, 0)
    return example
