"""Faults of limits: a process that may open no more files, and ports with more connections than are served."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

from tests.e2e.crowd import crowd
from tests.faults.cells import Strike
from tests.faults.pair import Pair
from tests.faults.processes import found


def no_descriptors(place: str, victim: str = "") -> Strike:
    """The process can open nothing. victim: is killed meanwhile, so that something has to be opened."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        with ExitStack() as stack:
            for process in found(pair, (place,)):
                stack.enter_context(_full(process))
            for process in found(pair, (victim,)) if victim else ():
                process.send_signal(signal.SIGKILL)
            for relay in pair.relays.values():
                relay.reset()  # connections have to be made anew
            yield

    return strike


def crowded(count: int, link: str) -> Strike:
    """So many idle connections to the prefill server's port of a link."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        ports = dict(zip(pair.relays, pair.prefill.ports, strict=True))
        with crowd(count, *(port for name, port in ports.items() if name.startswith(link))):
            yield

    return strike


@contextmanager
def _full(process: psutil.Process) -> Iterator[None]:
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        if process.is_running():
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
