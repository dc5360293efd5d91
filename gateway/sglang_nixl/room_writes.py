"""Writes of rooms that are under way, over the writers of all decode ranks."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from headrace.gateway.sglang_nixl.aux_row import aux_row
from headrace.gateway.sglang_nixl.decode_rank import DecodeRank
from headrace.gateway.sglang_nixl.pool_runs import PoolRuns, Runs
from headrace.gateway.sglang_nixl.records import WriteKv, WriteRow
from headrace.transfer.backends.base import RemoteWrite

log = logging.getLogger(__name__)

MAKERS = 2  # threads that make writers, which takes a NIXL agent seconds


class RankWriter(Protocol):
    """Writes into the memory of one decode rank. Used by one thread, and no call waits for the other side."""

    def write_kv(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its KV."""
        ...

    def write_row(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its metadata buffers."""
        ...

    def close(self) -> None:
        """End all writing: no byte arrives at the rank any more, and none of the pool is read."""
        ...


MakeWriter = Callable[[DecodeRank], RankWriter]  # raises OSError or ValueError


@dataclass(slots=True)
class _Part:
    """One rank's part of a room's writes."""

    agent: str
    writer: "Future[RankWriter]"
    begin: Callable[[RankWriter], RemoteWrite]
    write: RemoteWrite | None = None  # None until the writer is there


class RoomWrites:
    """Begins writes, and tells which have ended. Used by one thread; a rank's writer is made by another one."""

    def __init__(self, pool: memoryview, runs: PoolRuns, make_writer: MakeWriter) -> None:
        self._pool = pool
        self._runs = runs
        self._make_writer = make_writer
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="headrace-sglang-agents")
        self._writers: dict[str, Future[RankWriter]] = {}  # by agent
        self._open: dict[str, list[_Part]] = {}  # by load
        self._given_up: set[str] = set()  # loads that were written to a rank of stop()

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._open)

    def prepare(self, rank: DecodeRank) -> None:
        """Begin to make the writer of a rank, so that its first room need not wait for it."""
        self._writer(rank)

    def write_kv(self, order: WriteKv) -> None:
        """Begin to write KV."""
        parts = self._open[order.load] = []
        for one in order.ranks:
            runs = self._runs.kv(one, order.first_page, order.tokens)
            begin = lambda writer, runs=runs: writer.write_kv(runs)  # noqa: E731
            parts.append(_Part(one.target.agent, self._writer(one.rank), begin))

    def write_row(self, order: WriteRow) -> None:
        """Begin to write a metadata row."""
        self._pool[self._runs.row(order.first_page)] = aux_row(order.first, order.room)
        parts = self._open[order.load] = []
        for one in order.ranks:
            runs = self._runs.aux(one, order.first_page)
            begin = lambda writer, runs=runs: writer.write_row(runs)  # noqa: E731
            parts.append(_Part(one.target.agent, self._writer(one.rank), begin))

    def stop(self, agents: tuple[str, ...]) -> None:
        """End all writing to these ranks; what was under way to them is lost."""
        for agent in agents:
            writer = self._writers.pop(agent, None)
            if writer is not None and not writer.cancel():
                writer.add_done_callback(_close)  # at once, if it has been made
        self._given_up |= {load for load, parts in self._open.items() if any(part.agent in agents for part in parts)}

    def ended(self) -> list[tuple[str, str]]:
        """Loads whose writes have ended since the last call, or cannot; and why they cannot, or \"\"."""
        found = []
        for load, parts in list(self._open.items()):
            lost = "writing to the decode engine was given up" if load in self._given_up else _lost(load, parts)
            if lost or all(part.write is not None and part.write.done for part in parts):
                found.append((load, lost))
                del self._open[load]
        self._given_up.clear()
        return found

    def close(self) -> None:
        """End all writing."""
        self.stop(tuple(self._writers))
        self._makers.shutdown(wait=False, cancel_futures=True)

    def _writer(self, rank: DecodeRank) -> "Future[RankWriter]":
        agent = rank.registration.agent
        made = self._writers.get(agent)
        if made is None or (made.done() and made.exception() is not None):
            made = self._writers[agent] = self._makers.submit(self._make_writer, rank)
        return made


def _lost(load: str, parts: list[_Part]) -> str:
    """Why the writes of a load cannot end; \"\" if they can. Begins those whose writer has been made."""
    for part in parts:
        if part.write is None and part.writer.done():
            try:
                part.write = part.begin(part.writer.result())
            except (OSError, ValueError) as error:
                log.warning("%s: %s", load, error)
                return str(error)
        if part.write is not None and part.write.lost:
            return part.write.lost
    return ""


def _close(writer: "Future[RankWriter]") -> None:
    with contextlib.suppress(OSError, ValueError, CancelledError):
        writer.result().close()
