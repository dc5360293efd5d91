"""Standard output and error of a process that serves: no write to them ever waits for a reader.

    print(), logging, tracebacks ──► queue, bounded ──► thread ──► pipe, file, terminal

A pipe that is not read (a stalled log driver, a pager, a terminal after Ctrl-S) takes 64 KiB and then stops every
process that writes to it. Here lines are left out once LIMIT_BYTES wait. When there is room again a line says how many
were, in their place. What waits at the exit of the process is written as long as there is a reader.

Where the system allows it (Linux: pipes, terminals), the descriptors do not block either, for libraries that write to
them by themselves; what does not fit is then lost.
"""

import atexit
import io
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from select import POLLOUT, poll
from typing import TYPE_CHECKING, NoReturn, TextIO

from headrace.core.runtime.rate_limit import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LIMIT_BYTES = 1 << 20  # that wait for a reader, of each stream
EXIT_WAIT_S = 1.0  # at the exit, for a reader that takes nothing meanwhile
LOST = "{} lines were left out here: nobody read this output"
_BUFFER_BYTES = 1 << 16  # a text up to this is written in one piece, tracebacks included


@dataclass(frozen=True)
class _Piece:
    """What is written at once. lines: that it has, or that it says were left out (told)."""

    data: bytes
    lines: int
    told: bool = False


class QueuedOutput(io.RawIOBase):
    """The bytes of an output stream: write() queues them, a thread of its own writes them to the descriptor."""

    def __init__(self, descriptor: int, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__()
        self.lost_lines = 0
        """Left out so far, in all."""
        self.lost_text: Callable[[int], str] = lambda lines: LOST.format(lines) + "\n"
        """What is written in the place of lines that were left out."""
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._gap = 0  # lines left out since the last one in the queue
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Queue a piece, or leave it out. Never waits."""
        piece = _Piece(bytes(data), max(1, bytes(data).count(b"\n")))
        if os.getpid() != self._process:  # forked: the thread is in the parent
            with suppress(OSError):
                os.write(self._descriptor, piece.data)
            return len(piece.data)
        with self._changed:
            if self._gap and not self._waiting:
                self._tell()
            if self._gap or self._waiting_bytes + len(piece.data) > self._limit_bytes:
                self._leave_out(piece)
            else:
                self._put(piece)
        return len(piece.data)

    def drain(self, wait_s: float = EXIT_WAIT_S) -> None:
        """Wait until all is written, but not for a reader that takes nothing for wait_s seconds."""
        with self._changed:
            while self._waiting and self._process == os.getpid():
                before = self._waiting_bytes
                if not self._changed.wait(wait_s) and self._waiting_bytes == before:
                    return

    def _put(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._waiting_bytes += len(piece.data)
        self._changed.notify_all()

    def _leave_out(self, piece: _Piece) -> None:
        self._gap += piece.lines
        self.lost_lines += 0 if piece.told else piece.lines

    def _tell(self) -> None:
        """Say how many lines are missing here."""
        lines, self._gap = self._gap, 0
        self._put(_Piece(self.lost_text(lines).encode("ascii", "backslashreplace"), lines, told=True))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                piece = self._waiting[0]
            written = self._write(piece.data)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(piece.data)
                if not written:
                    self._leave_out(piece)
                elif self._gap and self._waiting_bytes <= self._limit_bytes // 2:
                    self._tell()
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Write all of it, however long that takes. False: the descriptor does not take it, as on a full disk."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                room = poll()
                room.register(self._descriptor, POLLOUT)
                room.poll()
            except OSError:
                return False
        return True


def never_block_output() -> None:
    """Have standard output and error of this process queue what is written to them, from now on. Streams that were
    replaced by others (in tests) stay as they are."""
    sys.stdout, sys.stderr = _queued(sys.stdout, 1), _queued(sys.stderr, 2)


def exit_now(status: int) -> NoReturn:
    """End the process from any thread, without cleaning up, once what it has said is written."""
    for stream in (sys.stdout, sys.stderr):
        if (queued := queued_output(stream)) is not None:
            queued.drain()
    os._exit(status)


def queued_output(stream: TextIO | None) -> QueuedOutput | None:
    """What is behind a standard stream; None if it was not changed by never_block_output()."""
    raw = stream.buffer.raw if isinstance(stream, _QueuedText) else None
    return raw if isinstance(raw, QueuedOutput) else None


def lost_lines() -> int:
    """Lines that were left out of standard output and error so far."""
    streams = (queued_output(sys.stdout), queued_output(sys.stderr))
    return sum(queued.lost_lines for queued in streams if queued is not None)


def say(text: str) -> None:
    """Print lines to standard output, in one piece."""
    print(f"{printable_lines(text)}\n", end="", flush=True)


def complain(problem: object) -> None:
    """Print why the program ends to standard error, after its name."""
    print(f"headrace: {printable_lines(str(problem))}\n", end="", file=sys.stderr, flush=True)


def printable_lines(text: str) -> str:
    """Text with names and messages of others, for a terminal: what would move its cursor or set its title is shown as
    \\xNN."""
    return "\n".join(map(printable, text.split("\n")))


def prepare_output() -> None:
    """Have standard output and error write characters that their encoding does not have as \\N escapes, instead of
    raising UnicodeEncodeError. Where one of the descriptors 0 to 2 is closed, no file or socket gets its number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout, sys.stderr = _lenient(sys.stdout, 1), _lenient(sys.stderr, 2)


def _lenient(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # its descriptor was closed when Python started
        return open(descriptor, "w", errors="backslashreplace", closefd=False)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


class _QueuedText(io.TextIOWrapper):
    """Text on QueuedOutput."""

    buffer: io.BufferedWriter


def _queued(stream: TextIO, descriptor: int) -> TextIO:
    """The stream that takes the place of one of Python's own."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, _QueuedText) or not _is_at(stream, descriptor):
        return stream
    with suppress(OSError, ValueError):
        stream.flush()
    _unblock(descriptor)
    raw = QueuedOutput(descriptor)
    atexit.register(raw.drain)
    return _QueuedText(
        io.BufferedWriter(raw, _BUFFER_BYTES), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
    )


def _is_at(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # it has none, or is closed
        return False


def _unblock(descriptor: int) -> None:
    """Give a descriptor of a pipe or terminal a description of its own that does not block: O_NONBLOCK is a property of
    the description, which other programs have, too. Files keep theirs, and with it their position."""
    with suppress(OSError):  # no /proc, or one that may not be opened
        if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
            return
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(own, descriptor)
        os.close(own)
