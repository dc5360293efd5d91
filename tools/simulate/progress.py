"""Progress of a sweep: one line on a terminal, nothing where stderr is none."""

import time
from typing import TextIO

LEAST_S = 0.2  # between two updates


class ReplayProgress:
    """Shows which replay runs and how many of its requests have ended."""

    def __init__(self, stream: TextIO, replays: int, requests: int) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._replays = replays
        self._requests = requests
        self._replay = 0
        self._next_at = 0.0

    def begin(self) -> None:
        """The next replay starts."""
        self._replay += 1
        self._next_at = 0.0
        self.update(0)

    def update(self, ended: int) -> None:
        """So many requests of the replay have ended."""
        if self._shown and (now := time.monotonic()) >= self._next_at:
            self._next_at = now + LEAST_S
            share = 100 * ended // self._requests
            self._stream.write(f"\r\x1b[Kreplay {self._replay} of {self._replays}: {ended:,} requests, {share} %")
            self._stream.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
