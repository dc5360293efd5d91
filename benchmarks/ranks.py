"""Processes that are joined by Gloo, as the ranks of a server on one machine are, for benchmarks of what they do."""

import multiprocessing
import signal
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but typed here only

from headrace.core.types.errors import ConfigError
from headrace.server.launch.free_port import free_port

TIMEOUT_S = 120.0
Answer = Callable[[Any], Any]


class Rank(NamedTuple):
    """One process of a world."""

    number: int
    size: int
    port: int
    """Of the rendezvous."""
    threads: int


def _serve(rank: Rank, make: Callable[..., Answer], given: tuple[Any, ...], orders: Connection) -> None:
    """Answer orders until None comes."""
    torch.set_num_threads(rank.threads)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", rank.port, rank.size, is_master=rank.number == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size, timeout=timeout)
    try:
        answer = make(rank, *given)
    except ConfigError as error:
        orders.send(str(error))
        return
    orders.send("")  # ready
    while (order := orders.recv()) is not None:
        orders.send(answer(order))
    dist.destroy_process_group()


class Ranks:
    """A world of processes. A context manager, which ends them."""

    def __init__(self, size: int, make: Callable[..., Answer], *given: Any, threads: int = 1) -> None:
        """Start them and wait until they are ready. make(rank, *given), a function of a module, is called in each, and
        returns what answers its orders. threads: of each process. Raises ConfigError when make does."""
        spawn = multiprocessing.get_context("spawn")
        port = free_port()
        self._ends: list[Connection] = []
        self._processes = []
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process alone
        for number in range(size):
            end, other = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(Rank(number, size, port, threads), make, given, other), daemon=True
            )
            process.start()
            other.close()  # so that a process that ends is noticed
            self._ends.append(end)
            self._processes.append(process)
        signal.signal(signal.SIGINT, interrupt)
        for refused in [end.recv() for end in self._ends]:
            if refused:
                raise ConfigError(refused)

    def ask(self, order: Any) -> list[Any]:
        """The answers of all processes to an order that is not None, in order."""
        for end in self._ends:
            end.send(order)
        return [end.recv() for end in self._ends]

    def post(self, number: int, order: Any) -> None:
        """Give an order to one process, whose answer done() returns. It may have others already."""
        self._ends[number].send(order)

    def done(self, timeout_s: float | None) -> list[Any]:
        """Answers that have come; waits for the first of them, at most so long."""
        return [end.recv() for end in wait(self._ends, timeout_s) if isinstance(end, Connection)]

    def __enter__(self) -> "Ranks":
        """The world itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the processes, after a failure at once."""
        for end, process in zip(self._ends, self._processes, strict=True):
            if kind is None:
                end.send(None)
            else:
                process.terminate()
        for process in self._processes:
            process.join()
