"""Process set-up: how child processes are started, and what every process of a server does at its start."""

import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this installation in a child process.

    The working directory stays off the child's import path (python -P): a core.py or torch.py that lies there is
    neither
    imported nor in the way.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux; elsewhere a no-op). parent: its
    process id, as it has told it: who asks for it here may ask too late.

    Also leaves SIGINT to the parent, which ends its children in order.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


def freeze_loaded() -> None:
    """Keep what has been loaded so far out of all garbage collections. Modules and classes never become garbage, and
    going through hundreds of thousands of objects would now and then hold up a request for tens of milliseconds."""
    gc.freeze()


def keep_freed_memory() -> None:
    """Have free() keep what it gets for the next malloc() (glibc; elsewhere a no-op). Large tensors would otherwise be
    mapped and unmapped for every operation, and the kernel's clearing of their pages is up to a third of a prefill."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, -1)
