"""The pairs that cases run on, one at a time. A pair whose case has failed is not used again."""

from contextlib import ExitStack

from tests.faults import invariants
from tests.faults.cells import BenchName
from tests.faults.pair import Pair, relayed_pair
from tests.faults.servers import shared_files


class Benches:
    def __init__(self) -> None:
        self._name: BenchName | None = None
        self._stack = ExitStack()
        self._pair: Pair | None = None
        self._files: set[str] = set()

    def pair(self, name: BenchName) -> Pair:
        """The pair of this name, started if it is not there."""
        if name != self._name or self._pair is None:
            self.end()
            self._files = shared_files()
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
                invariants.check_gone(pair, self._files)
        finally:
            self.drop()


def _made(name: BenchName):  # type: ignore[no-untyped-def]
    return relayed_pair()
