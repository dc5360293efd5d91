"""Pages of the prefix cache whose KV no result has shown to be finite: those that failed fetches have left."""

from collections.abc import Iterable, Sequence

from headrace.scheduler.kv.node import Node


class Unproven:
    """By numbers of nodes, all of which leases use. A result that was computed from a lease's pages proves them."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._doubts = 0  # how often some were added

    def clear(self) -> None:
        """Forget all: the pool is another."""
        self._numbers.clear()

    def doubt(self, nodes: Iterable[Node]) -> None:
        """Nothing shows that the KV of these pages is finite."""
        self._numbers.update(node.number for node in nodes)
        self._doubts += 1

    def prove(self, path: Sequence[Node], last: int) -> int:
        """What was computed from the pages of a path is finite. last: what this has returned for the path before, or
        -1. Takes no time where nothing was added since."""
        if self._numbers and last != self._doubts:
            self.forget(path)
        return self._doubts

    def forget(self, nodes: Iterable[Node]) -> None:
        """These pages are proven, or have left the tree."""
        self._numbers.difference_update(node.number for node in nodes)

    def proven(self, path: Sequence[Node]) -> int:
        """How many of the first pages of a path are known to be finite, as far as pages are."""
        if not self._numbers:
            return len(path)
        return next((index for index, node in enumerate(path) if node.number in self._numbers), len(path))

    def stray(self, used: Iterable[int]) -> set[int]:
        """Numbers of those that are not among the nodes that leases use."""
        return self._numbers.difference(used)
