"""Signals to a server: the first one that asks it to end drains it, the second one ends it at once; SIGUSR2 has the
flight recorder write a file, where there is one; others change nothing."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.core.runtime.output import say
from headrace.core.runtime.signals import INTERRUPTED_BY, ending, meaningless, signal_name

log = logging.getLogger(__name__)


class StopSignals:
    """Counts the signals that end a server (core/runtime/signals.py), all together, from its creation on. Created in
    the main thread.

    Handlers of asyncio would leave moments before and after the event loop in which a signal ends the process before
    its temporary files are removed.
    """

    def __init__(self, most: int = 2) -> None:
        """most: signals that are counted; others after them are ignored."""
        self._most = most
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._taken: list[int] = []
        self._passed_over: set[int] = set()
        self.on_record: Callable[[], None] | None = None
        """Called for SIGUSR2, in the event loop."""

        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = ending()
        for number in self._ending:
            signal.signal(number, self._take)
        for other in meaningless():
            signal.signal(other, self._pass_over)

    @property
    def status(self) -> int:
        """Exit status of a server that was told to stop: 0 if it has drained, else that of the second signal."""
        return INTERRUPTED_BY + self._taken[1] if self.second.is_set() else 0

    def say_draining(self) -> None:
        """Say that the first signal drains this server."""
        say(f"{signal_name(self._taken[0])}: draining; a second signal ends open requests at once")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Set the events in the running event loop, also for signals that have come before. All signals are ignored
        afterwards: the process ends anyway."""
        self._loop = asyncio.get_running_loop()
        self._set()
        try:
            yield
        finally:
            for number in self._ending:
                signal.signal(number, signal.SIG_IGN)
            self._loop = None

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if len(self._taken) >= self._most:
            return
        self._taken.append(number)
        self._wake()

    def _pass_over(self, number: int, _frame: FrameType | None) -> None:
        self._passed_over.add(number)
        self._wake()

    def _wake(self) -> None:
        """A handler runs anywhere in the program, in the middle of a write to the log too: the event loop goes on."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        for event, _ in zip((self.first, self.second), self._taken, strict=False):
            event.set()
        while self._passed_over:
            number = self._passed_over.pop()
            if number == signal.SIGUSR2 and self.on_record is not None:
                self.on_record()
            else:
                log.info("%s changes nothing here", signal_name(number))
