"""A function run in a forked child (copy on write: it sees the process's memory as it was), whose bytes come back.

    parent ── fork ──► goes on at once ────────── fileno() readable ──► result()
                └────► child: function() ──► bytes ──► pipe ──► ends

The child has its own copy of all objects for as long as it runs, so it may read state that the parent goes on to
change, and may change it. What fork() costs the parent: a copy of the page tables, and of each page that it writes to
while the child lives.
"""

import gc
import os
import resource
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

MAX_RESULT_BYTES = 64 << 20
NICENESS = 10
_PIECE_BYTES = 1 << 16
_PIECES = 16  # that one call of result() reads at most: the caller's loop goes on meanwhile
_GRACE_S = 1.0  # beyond the limit, in which the child ends itself
_LENGTH_BYTES = 8
_DONE, _RAISED = b"\0", b"\1"


class ForkFailed(RuntimeError):
    """The child has raised, was killed, or took too long: there is no result. Its text says which."""


class Forked:
    """One run of a function in a forked child process.

    The child runs at a lower priority and without garbage collection, is the first that the kernel kills when memory
    is short, and ends itself at its limit. All descriptors but the standard ones are closed in it. It ends without
    running the exit handlers or destructors of the parent. The function must not log, and must not use sockets,
    threads or locks of the parent.

    No call but wait() blocks. Threads of the parent do not exist in the child.
    """

    def __init__(self, function: Callable[[], bytes], limit_s: float, niceness: int = NICENESS) -> None:
        """Fork. limit_s: seconds that the child may take. niceness: by how much its priority is lower. Raises OSError
        where no process or pipe can be had."""
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s + _GRACE_S
        self._received = bytearray()
        self._result: bytes | None = None
        self._failure = ""
        self._reaped = False
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            self._process = _fork()
        except OSError:
            os.close(self._pipe)
            os.close(writing)
            raise
        if self._process == 0:
            _run(function, limit_s, writing, niceness)
        os.close(writing)

    def fileno(self) -> int:
        """Descriptor that is readable when result() has something to do; until close()."""
        return self._pipe

    def result(self) -> bytes | None:
        """What the function has returned; None while it runs. Raises ForkFailed when there is no result, or one beyond
        MAX_RESULT_BYTES."""
        if self._result is None and not self._failure:
            self._read()
        if self._failure:
            raise ForkFailed(self._failure)
        return self._result

    def close(self) -> None:
        """Kill the child if it still runs, and have it reaped. May be called again."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        if not self._reap():
            if self._result is None:
                os.kill(self._process, signal.SIGKILL)
            with suppress(RuntimeError):  # no thread to be had
                threading.Thread(target=os.waitpid, args=(self._process, 0), name="reap", daemon=True).start()

    def wait(self) -> None:
        """Wait until the child has ended: blocks for as long as its limit, unless its result is here."""
        if not self._reaped:
            os.waitpid(self._process, 0)
            self._reaped = True

    def _read(self) -> None:
        for _ in range(_PIECES):
            try:
                piece = os.read(self._pipe, _PIECE_BYTES)
            except BlockingIOError:
                if time.monotonic() > self._ends_at:
                    self._fail(f"took longer than {self._limit_s:g} s")
                return
            self._received += piece
            if len(self._received) > MAX_RESULT_BYTES:
                self._fail(f"its result has more than {MAX_RESULT_BYTES >> 20} MiB")
                return
            if not piece:
                self._conclude()
                return

    def _conclude(self) -> None:
        """The child has closed its end of the pipe."""
        head = 1 + _LENGTH_BYTES
        size = int.from_bytes(self._received[1:head], "little")
        if len(self._received) < head or len(self._received) != head + size:
            self._fail(f"was killed, or took longer than {self._limit_s:g} s")
        elif self._received[:1] == _RAISED:
            self._fail(self._received[head:].decode(errors="replace"))
        else:
            self._result = bytes(self._received[head:])
        self._received.clear()

    def _fail(self, reason: str) -> None:
        self._failure = f"a forked child has failed: {reason}"

    def _reap(self) -> bool:
        """Whether the child has ended. Its number is not used again before this has returned True."""
        if not self._reaped:
            self._reaped = os.waitpid(self._process, os.WNOHANG)[0] != 0
        return self._reaped


def run_forked(function: Callable[[], bytes], limit_s: float) -> bytes:
    """Run a function in a forked child of equal priority, and wait for what it returns. Raises as Forked does."""
    child = Forked(function, limit_s, niceness=0)
    try:
        while (result := child.result()) is None:
            select.select((child,), (), (), limit_s + _GRACE_S)
        child.wait()
        return result
    finally:
        child.close()


def _fork() -> int:
    with warnings.catch_warnings():  # of threads, whose locks the child does not touch
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run(function: Callable[[], bytes], limit_s: float, writing: int, niceness: int) -> NoReturn:
    """The child."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        signal.set_wakeup_fd(-1)
        gc.disable()
        os.nice(niceness)
        os.closerange(3, writing)
        os.closerange(writing + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        _write(writing, _DONE, function())
    except BaseException:
        with suppress(OSError):
            _write(writing, _RAISED, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _write(writing: int, kind: bytes, data: bytes) -> None:
    left = memoryview(kind + len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    while left:
        left = left[os.write(writing, left) :]
