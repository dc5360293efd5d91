"""Launch an SGLang from its wheel, unchanged, on a CPU for which it has no kernels: flags of sglang.launch_server.

The wheel is made for CUDA. Three things keep it from a CPU without AMX that has PyTorch's build for CPUs, and they are
seen to here, in this process and in those that it spawns, which import this file first.
"""

import sys
from types import ModuleType
from typing import Any

import torch

PACKAGE = "sgl_kernel"
NO_BUILD = "is built for GPUs only"


class NoKernels(ModuleType):
    """Stands for the package of CUDA kernels, of which SGLang imports some names on every machine. Where it computes
    with PyTorch it calls none of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_arguments: Any, **_options: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} {NO_BUILD}")

        return kernel


def name_operators_of_torchvision() -> torch.library.Library:
    """Its library does not load without CUDA's, and its Python part expects that two operators are known. The library
    object has to be kept, or they are forgotten."""
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return operators


def register_kv_as_host_memory() -> None:
    """A pool of SGLang's is memory of a GPU to it, whatever its device is, and NIXL does not register host memory as
    that."""
    from sglang.srt.disaggregation.nixl import conn

    conn._normalize_kv_mem_kinds = lambda _kinds, buffers: ["DRAM"] * buffers


sys.modules[PACKAGE] = NoKernels(PACKAGE)
OPERATORS = name_operators_of_torchvision()
register_kv_as_host_memory()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
