"""Queues Triton kernels, with little work for the host.

Triton finds the kernel for some arguments anew at every call, and takes the host about twice as long for that as for
the launch. Here a compiled kernel is kept for all arguments that Triton would compile alike.
"""

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
"""Kernels, and the values of their constants, by device and by what Triton looks at."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Queue a kernel on the current stream of the device of its first argument. arguments: of the kernel, in order,
    before its constants."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            _launch(kernel, grid, first.device, arguments, constants)
    else:
        _launch(kernel, grid, first.device, arguments, constants)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: tuple[object, ...],
    constants: dict[str, object],
) -> None:
    key = (kernel.fn, device, *map(_form, arguments), *constants.items())
    found = _compiled.get(key)
    if found is not None:
        made, values = found
        made[(*grid, 1, 1)[:3]](*arguments, *values)
        return
    made = kernel[grid](*arguments, **constants)
    if made is not None:  # by Triton's interpreter there is nothing to keep
        _compiled[key] = made, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _form(argument: object) -> object:
    """What Triton compiles a kernel for of an argument: a tensor's dtype and whether 16 bytes divide its address;
    whether 16 divides an integer, whether it is 1, and how many bits it takes."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument % 16 == 0, argument == 1, argument >> 31
    return type(argument)


def power_of_2(count: int) -> int:
    """The least power of two that is not below a count, from 1 on. Triton's own takes the host 2 µs, a fifth of a
    launch."""
    return 1 << max(0, count - 1).bit_length()
