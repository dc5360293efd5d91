"""What a stage says at its start of the GPU that it found, of the rates that it reaches, and of what was chosen for it.

Two lines of the log, from which to tell why a server is as fast as it is. The rates are those of one large matrix
product and of one copy: what a forward pass can come near to, on this machine, as it is clocked and shared now.
"""

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

SIDE = 4096  # rows and columns of the matrices
BUFFER_BYTES = 256 << 20  # for three of them; a copy of a half of it to the other is far beyond any cache
ROUNDS = 3  # after one to warm up; the fastest counts


class Rates(NamedTuple):
    """What a GPU reaches."""

    product: float
    """FLOP/s of a matrix product."""
    memory: float
    """Bytes/s that a copy within its memory reads and writes."""


class Chosen(NamedTuple):
    """How a stage computes on a GPU."""

    computed_by: str
    """Kernels and dtypes, in words."""
    pass_tokens: int
    """Of the largest forward pass."""
    kv_tokens: int
    """Token positions of the KV pool."""
    kv_bytes: int


def log_device(device: torch.device, dtype: torch.dtype, available_bytes: int, chosen: Chosen) -> None:
    """Log what was found and chosen. dtype: of products. available_bytes: that were free before the stage took any."""
    found, total = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)[1]
    rates = measure_rates(device, dtype)
    reached = "no memory is left to measure its rates in"
    if rates is not None:
        name = str(dtype).removeprefix("torch.")
        reached = (
            f"it reaches {rates.product / 1e12:.0f} TFLOP/s in {name} and {rates.memory / 1e9:,.0f} GB/s of memory"
        )
    log.info(
        "%s is %s, compute capability %d.%d; %s of %s MiB were free; %s",
        device, found.name, found.major, found.minor, f"{available_bytes >> 20:,}", f"{total >> 20:,}", reached,
    )  # fmt: skip
    log.info(
        "%s; passes of up to %s tokens; KV of %s tokens in %.1f%% of its memory",
        chosen.computed_by, f"{chosen.pass_tokens:,}", f"{chosen.kv_tokens:,}", 100 * chosen.kv_bytes / total,
    )  # fmt: skip


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates | None:
    """The rates of a GPU for products in this dtype, in some milliseconds; None where memory is too little for that."""
    try:
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        numbers = buffer.view(dtype).normal_()  # zeros would take less power, and so be multiplied faster
        one, other, product = (numbers[at * SIDE * SIDE :][: SIDE * SIDE].view(SIDE, SIDE) for at in range(3))
        half = BUFFER_BYTES // 2
        return Rates(
            2.0 * SIDE**3 / fastest_seconds(device, lambda: torch.mm(one, other, out=product)),
            2.0 * half / fastest_seconds(device, lambda: buffer[:half].copy_(buffer[half:])),
        )
    except torch.OutOfMemoryError:
        return None


def fastest_seconds(device: torch.device, compute: Callable[[], object]) -> float:
    """Of the device, in the fastest of some rounds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 2)]  # type: ignore[no-untyped-call]
    for event in events[:-1]:
        event.record()
        compute()
    events[-1].record()
    torch.cuda.synchronize(device)
    return min(float(begun.elapsed_time(ended)) for begun, ended in pairwise(events[1:])) / 1e3
