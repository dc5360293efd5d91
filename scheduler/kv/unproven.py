"""Pages of the prefix cache whose KV no result has shown to be finite: those that failed fetches have left, and those
of requests whose results were not, as long as others use them."""

from collections.abc import Iterable, Iterator, Sequence

from headrace.scheduler.kv.node import Node


class Unproven:
    """By numbers of nodes. Leases use them, or copies that are under way use them or nodes below them. A result that
    was computed from a lease's pages proves them."""

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

    def paths(self, nodes: Iterable[Node]) -> Iterator[list[Node]]:
        """Those of nodes that are unproven then, each behind all that are below it, and behind those above it that
        are."""
        for node in sorted((node for node in nodes if node.number in self._numbers), key=_number, reverse=True):
            path = self._up_from(node)
            if path:
                yield path[::-1]

    def stray(self, nodes: Iterable[Node]) -> set[int]:
        """Numbers of those that are not in use. nodes: all of the tree that have a page."""
        used = (one.number for node in nodes if node.locks for one in self._up_from(node))
        return self._numbers.difference(used)

    def _up_from(self, node: Node | None) -> list[Node]:
        """A node and those above it, as long as they are unproven."""
        path = []
        while node is not None and node.number in self._numbers:
            path.append(node)
            node = node.parent
        return path


def _number(node: Node) -> int:
    return node.number
