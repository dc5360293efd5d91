"""SIGTERM and SIGINT: the first one drains the server, the second one ends it at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED_BY = 128  # plus the number of a signal: exit status of a program that a signal has ended


class StopSignals:
    """Counts both signals, together, from its creation on. Created in the main thread.

    Handlers of asyncio would leave moments before and after the event loop in which a signal ends the process before
    its temporary files are removed.
    """

    def __init__(self, most: int = 2) -> None:
        """most: signals that are counted; others after them are ignored."""
        self._most = most
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._taken: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        for number in STOPPING:
            signal.signal(number, self._take)

    @property
    def status(self) -> int:
        """Exit status of a server that was told to stop: 0 if it has drained, else that of the second signal."""
        return INTERRUPTED_BY + self._taken[1] if self.second.is_set() else 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Set the events in the running event loop, also for signals that have come before. Both signals are ignored
        afterwards: the process ends anyway."""
        self._loop = asyncio.get_running_loop()
        self._set()
        try:
            yield
        finally:
            for number in STOPPING:
                signal.signal(number, signal.SIG_IGN)
            self._loop = None

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if len(self._taken) >= self._most:
            return
        self._taken.append(number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        for event, _ in zip((self.first, self.second), self._taken, strict=False):
            event.set()
