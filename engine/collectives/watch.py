"""What is under way among ranks on GPUs, for the thread that waits for the ends of plans.

With NCCL the host waits for no other rank: wait() orders streams, and a rank that is gone shows as a device that never
gets done. torch's own watchdog would end the process then, in place of the group; it is told not to.
"""

import contextlib
import logging
import os
import threading
from collections.abc import MutableMapping
from typing import Protocol

import torch.distributed as dist

log = logging.getLogger(__name__)

# What has torch's watchdog, and the thread that watches it, end the process. The second name of each is an older one.
_HANDLING = (
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_ENABLE_MONITORING",),
)


class WatchedWork(Protocol):
    """What is asked of a dist.Work."""

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        ...

    def exception(self) -> object:
        """Why it has failed; None where it has not."""
        ...


class OperationWatch:
    """The last operation of each group and link of a rank. Any thread.

    Earlier ones are not kept: an operation holds its result in the memory of the device, and a group does its
    operations in their order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, WatchedWork]] = {}  # by group

    def add(self, operation: str, group: str, work: WatchedWork) -> None:
        """An operation has begun, such as "all_reduce" of the group "tp"."""
        with self._lock:
            self._last[group] = operation, work

    def unfinished(self) -> list[str]:
        """Operations that are not done, such as "all_reduce of tp"; in no order of their own."""
        return [f"{operation} of {group}" for operation, group, work in self._each() if not work.is_completed()]

    def failure(self) -> str:
        """Which operation has failed, and why; "" where none has."""
        for operation, group, work in self._each():
            if work.is_completed() and (error := work.exception()) is not None:
                return f"{operation} of {group} has failed: {error}"
        return ""

    def drop_done(self) -> None:
        """Forget those that are done, and so their results."""
        done = [work for _, _, work in self._each() if work.is_completed() and work.exception() is None]
        with self._lock:
            self._last = {group: last for group, last in self._last.items() if last[1] not in done}

    def _each(self) -> list[tuple[str, str, WatchedWork]]:
        with self._lock:
            return [(operation, group, work) for group, (operation, work) in self._last.items()]


def leave_errors_to_us(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's watchdog end no process for an operation that fails or takes too long, unless the environment says
    otherwise. Before groups are made, which read it."""
    for names in _HANDLING:
        if not any(name in environment for name in names):
            environment[names[0]] = "0"


def abort_groups() -> None:
    """End what all groups have under way on the device, so that it gets done, and leave them. Any thread."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):  # another thread is leaving them
            dist.distributed_c10d._abort_process_group()
