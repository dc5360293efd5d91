"""What a cell of the fault matrix can be."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.pair import Pair
from tests.faults.phases import Phase

PLACES = (
    "decode front end", "decode scheduler", "decode stage", "prefill front end", "prefill scheduler",
    "prefill stage 0", "prefill stage 1", "a whole server", "both servers", "HTTP", "control", "data", "files",
)  # fmt: skip
BenchName = Literal["pair", "shm", "network", "disks", "clock"]
Need = Literal["", "freezer", "memory", "pids", "namespaces", "mounts", "compiler", "descriptors"]
Strike = Callable[[Pair], AbstractContextManager[None]]  # the fault lasts for the length of its with block
EACH: tuple[Phase, ...] = ("waiting", "computing", "transferring", "generating", "idle")
AT_ONCE: tuple[Phase, ...] = ("all at once", "idle")


@dataclass(frozen=True)
class Struck:
    """Real processes are struck, in each of these phases."""

    strike: Strike
    phases: Sequence[Phase] = AT_ONCE
    hold_s: float = 0.0
    """How long the fault lasts."""
    bench: BenchName = "pair"
    quick: Sequence[Phase] = ()
    """Phases that `make test` runs, too."""
    needs: Need = ""
    """What the machine has to have."""
    ends_within_s: float = 0.0
    """Honest requests that were open when it began have ended so soon; 0: not looked at."""
    breaks: bool = False
    """Connections of clients may be cut, though the server that they are connected to lives."""


@dataclass(frozen=True)
class Proven:
    """Tests elsewhere show it; `make faults` runs them, too."""

    tests: Sequence[str]


@dataclass(frozen=True)
class NotApplicable:
    why: str


Cell = Struck | Proven | NotApplicable


@dataclass(frozen=True)
class Fault:
    """A row of the matrix: a cell for every place. how: how it is made."""

    name: str
    how: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Group:
    title: str
    faults: Sequence[Fault] = field(default_factory=tuple)


def fault(name: str, how: str, cells: Mapping[str, Cell], otherwise: str | Mapping[str, str]) -> Fault:
    """otherwise: why it does not apply to the places without a cell, for all of them or by place."""
    full = dict(cells)
    for place in PLACES:
        if place not in full:
            full[place] = NotApplicable(otherwise if isinstance(otherwise, str) else otherwise[place])
    assert set(full) == set(PLACES), set(full) - set(PLACES)
    return Fault(name, how, full)


@dataclass(frozen=True)
class Case:
    """One strike: a fault at a place in a phase."""

    fault: str
    place: str
    phase: Phase
    struck: Struck

    @property
    def name(self) -> str:
        return f"{self.fault}: {self.place}: {self.phase}"
