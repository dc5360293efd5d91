"""The pairs that cases run on, one at a time. A pair whose case has failed is not used again."""

import resource
import shutil
from contextlib import AbstractContextManager, ExitStack

from tests.faults import clocks, disks, groups, invariants, network
from tests.faults.cells import BenchName, Case
from tests.faults.pair import Pair, relayed_pair

CROWD = 4000  # descriptors that a crowd of connections takes here


class Benches:
    """Hands out pairs by name."""

    def __init__(self) -> None:
        self._name: BenchName | None = None
        self._stack = ExitStack()
        self._pair: Pair | None = None

    def pair(self, name: BenchName) -> Pair:
        """The pair of this name, started if it is not there."""
        if name != self._name or self._pair is None:
            self.end()
            self._pair = self._stack.enter_context(_made(name))
            self._name = name
        return self._pair

    def drop(self) -> None:
        """Kill the pair."""
        self._pair, self._name = None, None
        self._stack.close()

    def end(self) -> None:
        """An orderly end of the pair, after which nothing is left."""
        pair = self._pair
        try:
            if pair is not None:
                invariants.check_gone(pair)
        finally:
            self.drop()


def reason_to_skip(case: Case) -> str:
    """Why a case cannot run on this machine; "" where it can."""
    need = case.struck.needs
    if need in ("freezer", "memory", "pids"):
        return groups.missing(need)
    if need == "namespaces":
        return network.missing()
    if need == "mounts":
        return disks.missing()
    if need == "compiler":
        return "" if shutil.which("gcc") else "there is no gcc"
    if need == "descriptors":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return "" if hard == resource.RLIM_INFINITY or hard >= CROWD else f"this process may open {hard} files"
    return ""


def _made(name: BenchName) -> AbstractContextManager[Pair]:
    match name:
        case "pair":
            return relayed_pair()
        case "shm":
            return relayed_pair(backends="shm,zmq")
        case "network":
            return network.networked_pair()
        case "disks":
            return disks.confined_pair()
        case "clock":
            return clocks.skewed_pair()
