"""Vector clocks over CUDA streams, events and the host: which uses of memory are ordered, and which race.

Every stream and the host is an agent with a clock (Mattern, Virtual Time and Global States of Distributed Systems,
1989). An event carries the clock of the stream that recorded it; who waits for the event takes that clock over. Two
uses of the same memory, at least one of them a write, race unless the later one's agent knows of the earlier one.
"""

from collections.abc import Iterable
from typing import NamedTuple

HOST = "host"

Clock = dict[str, int]
Unit = tuple[int, int]
"""A storage, and a part of it: a page of a pool, 0 where it is not divided."""


class Use(NamedTuple):
    """A read or write that has happened."""

    agent: str
    time: int
    line: str


class Race(NamedTuple):
    """Two uses of the same memory without an order between them."""

    what: str
    """such as "write after read"."""
    first: Use
    second: Use

    def __str__(self) -> str:
        first, second = self.first, self.second
        return f"{self.what}: {first.agent} at {first.line}, then {second.agent} at {second.line}, without an event"


class _Uses:
    """The last uses of one unit of memory."""

    def __init__(self) -> None:
        self.written: Use | None = None
        self.read: dict[str, Use] = {}  # since then, by agent


class Clocks:
    """Clocks of all agents, and the last uses of every unit of memory."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: dict[str, Clock] = {}
        self._uses: dict[int, dict[int, _Uses]] = {}  # by storage and part

    def clock(self, agent: str) -> Clock:
        """A copy of an agent's clock."""
        return dict(self._of(agent))

    def join(self, agent: str, other: Clock) -> None:
        """An agent has waited for what another clock stands for."""
        mine = self._of(agent)
        for name, time in other.items():
            mine[name] = max(mine.get(name, 0), time)

    def use(self, agent: str, reads: Iterable[Unit], writes: Iterable[Unit], line: str) -> None:
        """An agent begins to read and write these units."""
        mine = self._of(agent)
        mine[agent] += 1
        now = Use(agent, mine[agent], line)
        for unit in reads:
            uses = self._at(unit)
            self._check("read after write", uses.written, now)
            uses.read[agent] = now
        for unit in writes:
            uses = self._at(unit)
            self._check("write after write", uses.written, now)
            for read in uses.read.values():
                self._check("write after read", read, now)
            uses.written, uses.read = now, {}

    def free(self, storage: int, owner: str) -> None:
        """A storage has ended, whose memory its owner may use again at once."""
        for uses in self._uses.pop(storage, {}).values():
            for use in (*filter(None, (uses.written,)), *uses.read.values()):
                self._check("use again after use", use, Use(owner, self._of(owner)[owner], "the end of the tensor"))

    def forget(self, storage: int) -> None:
        """This storage is new memory."""
        self._uses.pop(storage, None)

    def _of(self, agent: str) -> Clock:
        return self._clocks.setdefault(agent, {agent: 0})

    def _at(self, unit: Unit) -> _Uses:
        return self._uses.setdefault(unit[0], {}).setdefault(unit[1], _Uses())

    def _check(self, what: str, earlier: Use | None, now: Use) -> None:
        if earlier is None or earlier.agent == now.agent:
            return
        if self._of(now.agent).get(earlier.agent, 0) < earlier.time:
            self.races.append(Race(what, earlier, now))
