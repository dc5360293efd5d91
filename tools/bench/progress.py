"""Progress of a measurement: one line on a terminal, nothing where stderr is none."""

from typing import TextIO

from headrace.core.runtime.clock import Clock

LEAST_S = 0.5  # between two updates, each of which takes time from the client


class BenchProgress:
    """Shows how many requests have ended."""

    def __init__(self, stream: TextIO, requests: int, clock: Clock) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._requests = requests
        self._clock = clock
        self._next_at = 0.0

    def update(self, ended: int) -> None:
        """So many requests have ended."""
        if self._shown and (now := self._clock.now()) >= self._next_at:
            self._next_at = now + LEAST_S
            self._stream.write(f"\r\x1b[K{ended:,} of {self._requests:,} requests")
            self._stream.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
