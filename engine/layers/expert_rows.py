"""Counters of the experts of a rank, over its layers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class ExpertRows(NamedTuple):
    """Rows computed by each expert of a rank in each of its layers that has experts. The compute thread counts; other
    threads may read."""

    layers: tuple[int, ...]
    """Counted from the model's first."""
    first: int
    """The first of this rank's experts."""
    by_layer: tuple[Tensor, ...]
    """The counters: int64 [experts] for each layer."""

    def counts(self) -> NDArray[np.int64]:
        """A copy: int64 [layers, experts]."""
        return np.stack([rows.numpy() for rows in self.by_layer])
