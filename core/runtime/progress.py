"""What a thread has done so far, which other threads read: a thread that works is told from one that hangs. And what it
need not go on with."""

import threading
from array import array


class PassProgress:
    """Steps of forward passes, and which of the passes were cancelled. One thread computes; any may read and cancel."""

    def __init__(self) -> None:
        self._shared = array("q", [0, 0])
        self.address = self._shared.buffer_info()[0]
        """Of two int64: the count, which native code may increase instead, and whether this pass was cancelled."""
        self._changed = threading.Condition()
        self._pass = 0
        self._cancelled: set[int] = set()  # passes that have not begun

    @property
    def steps(self) -> int:
        """So far."""
        return self._shared[0]

    def step(self) -> None:
        """Count a step: a layer, or what comes before or after all layers."""
        self._shared[0] += 1

    def begin(self, number: int) -> None:
        """The pass with this number begins. Numbers increase; 0: a pass that nobody cancels."""
        with self._changed:
            self._pass = number
            self._shared[1] = number in self._cancelled
            self._cancelled = {each for each in self._cancelled if each > number}

    def cancel(self, number: int) -> None:
        """Nobody needs the pass with this number any more. No effect on one that has ended."""
        with self._changed:
            if number > self._pass:
                self._cancelled.add(number)
            elif number == self._pass:
                self._shared[1] = 1
                self._changed.notify_all()

    @property
    def cancelled(self) -> bool:
        """The pass that has begun last was cancelled."""
        return bool(self._shared[1])

    def sleep(self, seconds: float) -> None:
        """Sleep for so long, or until the pass is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self.cancelled, seconds)


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
