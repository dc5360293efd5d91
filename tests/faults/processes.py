"""Faults of processes: killed, stopped, frozen."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from tests.faults.cells import Strike
from tests.faults.pair import Pair
from tests.faults.servers import Supervised


def found(pair: Pair, places: Sequence[str]) -> list[psutil.Process]:
    """Processes by place: "decode stage", "prefill stage 0", "prefill" and "decode" for all of one server."""
    processes = []
    for place in places:
        side, _, what = place.partition(" ")
        server: Supervised = {"prefill": pair.prefill, "decode": pair.decode}[side]
        if not what:
            processes += server.processes()
        else:
            processes.append(server.named("stage 0" if what == "stage" else what))
    return processes


def killed(*places: str) -> Strike:
    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        _signal(found(pair, places), signal.SIGKILL)
        yield

    return strike


def killed_again(place: str, times: int, pause_s: float) -> Strike:
    """Killed as soon as it is there again, several times."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        for _ in range(times):
            with suppress(StopIteration, IndexError, psutil.NoSuchProcess):
                _signal(found(pair, (place,)), signal.SIGKILL)
            time.sleep(pause_s)
        yield

    return strike


def stopped(*places: str) -> Strike:
    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        processes = found(pair, places)
        _signal(processes, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(processes, signal.SIGCONT)

    return strike


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
