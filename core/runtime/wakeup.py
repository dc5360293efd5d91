"""Wakes a thread that polls sockets, from other threads."""

import contextlib
import socket


class Wakeup:
    """A descriptor that is readable once it was set. The waiting thread polls fileno(), clears it, and closes it."""

    def __init__(self) -> None:
        self._send, self._receive = socket.socketpair()
        for end in (self._send, self._receive):
            end.setblocking(False)

    def fileno(self) -> int:
        """To be polled for reading."""
        return self._receive.fileno()

    def set(self) -> None:
        """Wake the thread. Called by any thread, also after close()."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: the thread is awake; closed: it has ended
            self._send.send(b"\0")

    def clear(self) -> None:
        """Wait for the next set(). Before the thread looks at what it was woken for."""
        with contextlib.suppress(BlockingIOError):
            self._receive.recv(4096)

    def close(self) -> None:
        """Close the descriptor."""
        self._send.close()
        self._receive.close()
