"""Device errors of the stub model, for tests: certain prompts make a stage run out of device memory, or hang."""

import time
from collections.abc import Sequence
from typing import Literal

import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed

DeviceFault = Literal["memory", "hang"]
# By what the second token of a prompt is above the first, which is --model stub:fault_token=N: the fault, and whether
# the first or the last stage has it.
_FAULTS: tuple[tuple[DeviceFault, bool], ...] = (("memory", True), ("memory", False), ("hang", True), ("hang", False))
_ASLEEP_S = 3600.0


def fault_in(rows: Sequence[PlanRow], token: int, first: bool, last: bool) -> DeviceFault | None:
    """The device fault that a forward pass is to have in a stage; None for most. token: as the model's name has it."""
    for row in rows if token else ():
        ids = packed.unpack(row.tokens)[:2].tolist() if row.start == 0 and row.count > 1 else []
        if len(ids) == 2 and ids[0] == token and 0 <= ids[1] - token < len(_FAULTS):
            fault, at_first = _FAULTS[ids[1] - token]
            if (at_first and first) or (not at_first and last):
                return fault
    return None


def have_fault(fault: DeviceFault | None) -> None:
    """Raise torch.OutOfMemoryError, as a device does, or never return."""
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory (of the stub model, as its name asks for)")
    while fault == "hang":
        time.sleep(_ASLEEP_S)
