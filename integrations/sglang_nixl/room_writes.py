"""Writes of rooms that are under way, over the writers of all decode ranks."""

import logging
from collections.abc import Callable

from headrace.integrations.sglang_nixl.aux_row import aux_row
from headrace.integrations.sglang_nixl.decode_rank import RankWrite
from headrace.integrations.sglang_nixl.pool_runs import PoolRuns
from headrace.integrations.sglang_nixl.records import WriteKv, WriteRow
from headrace.integrations.sglang_nixl.writer import MakeWriter, RankWriter
from headrace.transfer.backends.base import RemoteWrite

log = logging.getLogger(__name__)


class RoomWrites:
    """Begins writes, and tells which have ended. A rank's writer is made when it is first written to."""

    def __init__(self, pool: memoryview, runs: PoolRuns, make_writer: MakeWriter) -> None:
        self._pool = pool
        self._runs = runs
        self._make_writer = make_writer
        self._writers: dict[str, RankWriter] = {}  # by agent
        self._open: dict[str, list[tuple[str, RemoteWrite]]] = {}  # agents and writes, by load
        self._lost: dict[str, str] = {}  # loads that cannot complete, and why

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._open or self._lost)

    def write_kv(self, order: WriteKv) -> None:
        """Begin to write KV."""
        runs = {one.target.agent: self._runs.kv(one, order.first_page, order.tokens) for one in order.ranks}
        self._begin(order.load, order.ranks, lambda writer, agent: writer.write_kv(runs[agent]))

    def write_row(self, order: WriteRow) -> None:
        """Begin to write a metadata row."""
        self._pool[self._runs.row(order.first_page)] = aux_row(order.first, order.room)
        runs = {one.target.agent: self._runs.aux(one, order.first_page) for one in order.ranks}
        self._begin(order.load, order.ranks, lambda writer, agent: writer.write_row(runs[agent]))

    def stop(self, agents: tuple[str, ...]) -> None:
        """End all writing to these ranks; what was under way to them is lost."""
        for agent in agents:
            writer = self._writers.pop(agent, None)
            if writer is not None:
                writer.close()
        for load, writes in self._open.items():
            if any(agent in agents for agent, _ in writes):
                self._lost.setdefault(load, "writing to the decode engine was given up")

    def ended(self) -> list[tuple[str, str]]:
        """Loads whose writes have ended since the last call, or cannot; and why they cannot, or \"\"."""
        found = []
        for load, writes in list(self._open.items()):
            lost = self._lost.get(load, "") or next((write.lost for _, write in writes if write.lost), "")
            if lost or all(write.done for _, write in writes):
                found.append((load, lost))
                del self._open[load]
        found += [(load, lost) for load, lost in self._lost.items() if load not in dict(found)]
        self._lost.clear()
        return found

    def close(self) -> None:
        """End all writing."""
        self.stop(tuple(self._writers))

    def _begin(self, load: str, ranks: tuple[RankWrite, ...], write: Callable[[RankWriter, str], RemoteWrite]) -> None:
        writes = self._open[load] = []
        for one in ranks:
            agent = one.target.agent
            try:
                if agent not in self._writers:
                    self._writers[agent] = self._make_writer(one.rank)
                writes.append((agent, write(self._writers[agent], agent)))
            except (OSError, ValueError) as error:
                log.warning("%s: %s", load, error)
                self._lost[load] = str(error)
