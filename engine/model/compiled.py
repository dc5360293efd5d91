"""Layer arithmetic in kernels fused by torch.compile: Triton on CUDA, C++ on the CPU.

Eager torch launches a kernel per operation, nine for an RMSNorm in bfloat16; here each function is one launch. A kernel
is compiled once per row width, for any number of rows, and called without torch.compile's guards: checking them takes
longer than the launches that are saved, and what they check is the same in every pass of a model. A torch before 2.12
has no such call: there they are checked, and one more kernel is compiled for a single row.
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

EXAMPLE_ROWS = 64  # rows that a kernel is tuned for; it takes any number
GUARDED_KERNELS = 64  # of one function, where there is a limit: for each width, and each again for one row
LARGEST = (1 << 31) - 1  # elements: kernels index with 32 bits


class CompiledArithmetic(TorchArithmetic):
    """Arithmetic in compiled kernels, each compiled at the first call with a new width: all of them by the first
    forward pass. With backend "inductor" it rounds where TorchArithmetic does."""

    def __init__(self, backend: str = "inductor") -> None:
        """backend: the backend of torch.compile."""
        self._backend = backend
        self._options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
        self._kernels: dict[Hashable, Callable[..., Any]] = {}

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See Arithmetic."""
        normed: Tensor = self._run(add_norm, (hidden.shape[1], delta is None, eps), hidden, delta, weight, eps)
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Arithmetic."""
        self._run(rotate, (x.shape[1:], x.stride(0)), x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        """See Arithmetic."""
        activated: Tensor = self._run(gate, gate_up.shape[1], gate_up)
        return activated

    def _run(self, function: Callable[..., Any], fixed: Hashable, x: Tensor, *others: object) -> Any:
        """function(x, *others) by its compiled kernel. fixed: widths and constants that the kernel is compiled for."""
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
        if not hasattr(compiled, "aot_compile"):
            torch._dynamo.config.recompile_limit = GUARDED_KERNELS
            compiled(*examples)
            guarded: Callable[..., Any] = compiled
            return guarded
        ahead = compiled.aot_compile((examples, {}))
        ahead.disable_guard_check()
        kernel: Callable[..., Any] = ahead
        return kernel


def choose_arithmetic(wanted: Compile, device: str, plain: Arithmetic) -> Arithmetic:
    """Compiled arithmetic where it is wanted and works, else plain.

    wanted: "auto" compiles on CUDA where Triton is installed and works. plain: arithmetic without compilation. Raises
    ConfigError when wanted is "on" and nothing can be compiled.
    """
    if wanted == "off" or (wanted == "auto" and (device == "cpu" or find_spec("triton") is None)):
        return plain
    compiled = CompiledArithmetic()
    try:
        compiled.gate(torch.zeros(1, 2, device=device))  # compiling the smallest kernel shows whether a compiler works
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        if wanted == "on":
            raise ConfigError(f"nothing can be compiled for {device}: {reason}; write --compile off") from error
        log.warning("layers are not compiled, so small chunks are slower: %s", reason)
        return plain
    return compiled


def _example(tensor: Tensor) -> Tensor:
    """A tensor [EXAMPLE_ROWS, ...] with the strides of this one and a dynamic number of rows; a weight [width]
    unchanged."""
    if tensor.dim() == 1:
        return tensor
    shape = (EXAMPLE_ROWS, *tensor.shape[1:])
    example = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    torch._dynamo.mark_dynamic(example, 0)
    return example
