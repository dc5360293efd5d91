"""How many rows each expert of a mixture-of-experts model has computed, as ranks report it. Pure arithmetic."""

from array import array
from collections.abc import Iterable, Sequence

import msgspec

ITEM_BYTES = 8  # of a count


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Rows computed by the experts of one rank since its stage was ready."""

    stage: int
    """Pipeline position of the rank."""
    layers: tuple[int, ...]
    """Its layers that have experts, counted from the model's first."""
    first: int
    """The first of its experts; they are consecutive."""
    rows: bytes
    """int64 [layers, experts], little-endian."""

    def matrix(self) -> list[list[int]]:
        """Rows by layer and by expert of this rank."""
        counts = array("q", self.rows).tolist()
        width = len(counts) // max(1, len(self.layers))
        return [counts[index * width : (index + 1) * width] for index in range(len(self.layers))]


def total_rows(loads: Iterable[ExpertLoad]) -> dict[int, list[int]]:
    """Rows of every expert of every layer, by layer, added up over the ranks that hold the expert."""
    found: dict[int, list[int]] = {}
    for load in loads:
        for layer, counts in zip(load.layers, load.matrix(), strict=True):
            rows = found.setdefault(layer, [])
            rows += [0] * (load.first + len(counts) - len(rows))
            for expert, count in enumerate(counts, load.first):
                rows[expert] += count
    return dict(sorted(found.items()))


def imbalance(layers: Iterable[Sequence[int]]) -> float:
    """Rows of the busiest expert over the mean, averaged over layers: 1 when all experts have the same work, or none.

    layers: rows of each expert of a layer.
    """
    ratios = [max(rows) * len(rows) / sum(rows) for rows in layers if any(rows)]
    return sum(ratios) / len(ratios) if ratios else 1.0
