"""Process set-up: starting child processes, dying with the parent, garbage collection and malloc settings."""

import ctypes
import errno
import gc
import os
import resource
import signal
import sys
from contextlib import suppress

from headrace.core.runtime.signals import ending, meaningless

RESERVED_DESCRIPTORS = 256  # for the process's own files, pipes and connections
ZMQ_LISTENERS = 4  # the most that one process has: control endpoint, joining stages, KV events, their replay
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN))  # trying again may help
MISTAKE = 2  # exit status of a command for a wrong flag, file or model
# Exit statuses of the processes that a server starts, and of `headrace stage`. Numbers of sysexits.h that no library
# ends a process with: oneMKL does with 2, others with 1 and 3.
CONFIGURATION_MISTAKE = 78  # it cannot run with its configuration, however often it is started
GROUP_ENDED_STATUS = 75  # a rank whose server shares experts with another one that has ended
MAX_SESSIONLESS = 1024
NEW_OBJECTS = 1_000_000  # between two collections of a process that makes no garbage
MAX_HTTP_CONNECTIONS = 16_384
MAX_INT_DIGITS = 640

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this installation in a child process.

    python -P keeps the working directory off the child's import path, so that a torch.py there is not imported.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux; elsewhere a no-op).

    Also ignores SIGINT: the parent ends its children in order.

    Args:
        parent: process id, as given by the parent itself; os.getppid() is wrong if the parent has died already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Have signals do nothing, after die_with_parent() has SIGINT: a service manager may send them to all processes of
    a server, and the parent drains it before it ends its children.

    A handler, since child processes of this one would inherit that the signals are ignored.
    """
    for number in (*ending(), *meaningless()):
        if number != signal.SIGINT:
            signal.signal(number, lambda _number, _frame: None)


def freeze_loaded() -> None:
    """Exclude all objects loaded so far from garbage collection, and have it go through all others seldom.

    Modules and classes never become garbage, and scanning them delays a request by tens of milliseconds now and then.
    Scanning what 2,000 open requests hold takes 0.3 s, and hardly any of it would be left over without that
    (tests/server/api/test_garbage.py).
    """
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)


def collect_seldom() -> None:
    """Have the garbage collector look at objects after a million new ones instead of 700.

    A process that keeps what it has made for a while, as a scheduler with a long queue does or one whose calls are
    recorded, would walk over it for nothing: with 10,000 prompts that takes up to a sixth of its time, and 25 ms at
    once. What it lets go of has no cycles, but for a cache that is dropped as a whole.
    """
    gc.set_threshold(NEW_OBJECTS, 1, 1)


def keep_freed_memory() -> None:
    """Have free() keep memory for the next malloc() instead of unmapping it (glibc; elsewhere a no-op).

    Otherwise large tensors are mapped and unmapped for every operation, and the kernel's zeroing of their pages takes
    up to a third of a prefill.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, -1)


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open descriptors to the hard one. The usual 1,024 is meant for users of select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports "unlimited" and refuses it; the old limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_integers() -> None:
    """Limit the digits of integers in JSON to the least that Python takes, since the time to read one grows with their
    square."""
    sys.set_int_max_str_digits(MAX_INT_DIGITS)


def max_sessionless() -> int:
    """Limit of connections without a session for each listening ZMQ socket of this process."""
    return max(8, min(_spare_descriptors() // ZMQ_LISTENERS, MAX_SESSIONLESS))


def max_http_connections() -> int:
    """Limit of HTTP connections to this process; as many descriptors are left for its calls to prefill servers."""
    return max(16, min(_spare_descriptors() // 2, MAX_HTTP_CONNECTIONS))


def _spare_descriptors() -> int:
    """Descriptors that connections of others may take."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2 * MAX_HTTP_CONNECTIONS
    return max(soft - RESERVED_DESCRIPTORS, soft // 2)
