"""What a thread has done so far, which other threads read: a thread that works is told from one that hangs."""

import threading
from array import array


class PassProgress:
    """Steps of a computation. Counted by one thread, read by any."""

    def __init__(self) -> None:
        self._steps = array("q", [0])
        self.address = self._steps.buffer_info()[0]
        """Of the count, an int64 that native code may increase instead."""

    @property
    def steps(self) -> int:
        """So far."""
        return self._steps[0]

    def step(self) -> None:
        """Count a step: a layer, or what comes before or after all layers."""
        self._steps[0] += 1


class LoadProgress:
    """How far a rank is with loading its model. Counted by several threads, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights = self._read = 0
        self.total_bytes = 0
        """Bytes that the weights take; 0 until that is known."""
        self.loaded = False
        """All weights are loaded; what follows is warming up."""

    def begin(self, weights: int, weight_bytes: int) -> None:
        """So many weights are to be read, and take so many bytes."""
        self._weights, self.total_bytes = weights, weight_bytes

    def read(self, weights: int) -> None:
        """So many more were read."""
        with self._lock:
            self._read += weights

    def end(self) -> None:
        """All are read."""
        self.loaded = True

    @property
    def done_bytes(self) -> int:
        """How many of total_bytes are read. A tensor kept in part counts as whole, so this may be early at the end."""
        share = min(1.0, self._read / self._weights) if self._weights else 0.0
        return round(share * self.total_bytes)
