"""What signals mean to the processes of a server, and an init that passes them on. By default most of them end a
process where it stands.

What the first process of a container has to do besides its own work is done by a process of its own, an init:

    PID 1: passes signals on, reaps ──fork──► the command, with children of its own
       ▲                                                │
       └── orphans, which the kernel gives to it ◄── processes that `exec` brings into the container

Without it what `kubectl exec` or a probe leaves behind stays a zombie for as long as the server runs, and signals whose
action is the default, as all are before a program says otherwise, do nothing to PID 1. The command itself must not reap
all that ends: asyncio and subprocess wait for their children by themselves.
"""

import os
import signal
import sys
from contextlib import suppress

# They ask a program to end, or announce that it will have to: a lost terminal, Ctrl-\, a power failure, the limit of
# CPU time after which the kernel kills.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGPWR", "SIGXCPU")
ENDING = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)
# nohup has SIGHUP ignored, a shell that of a program in the background SIGQUIT: they stay so.
_LEFT_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
_OWN = (
    *("SIGKILL", "SIGSTOP"),  # cannot be caught
    *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"),  # a bug: its place is to be seen
    *("SIGCHLD", "SIGCONT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH"),  # end nothing
    *("SIGPIPE", "SIGXFSZ"),  # ignored by Python: the write fails
)
FIRST = 1
INTERRUPTED_BY = 128  # plus the number of a signal: exit status of a program that the signal has ended


def ending() -> tuple[signal.Signals, ...]:
    """Signals that end this process, in order: those of ENDING, but for what it was started to ignore."""
    return tuple(
        number for number in ENDING if number not in _LEFT_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    )


def meaningless() -> tuple[int, ...]:
    """Signals that end a program by default, and mean nothing to this one: SIGUSR1, SIGALRM, real-time signals."""
    others = {signal.Signals[name] for name in _OWN if name in signal.Signals.__members__}
    return tuple(sorted(signal.valid_signals() - others - set(ENDING)))


def signal_name(number: int) -> str:
    """The name of a signal, as people write it."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def fork_from_init() -> int | None:
    """Where this process is the first one of its namespace: fork, and be an init until the other process ends. Returns
    its exit status, or None in that process, which is to run the command. Call it before anything starts a thread."""
    return be_init() if os.getpid() == FIRST else None


def be_init() -> int | None:
    """fork_from_init(), whatever the id of this process."""
    passed_on = {*ENDING, *meaningless()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    command = os.fork()
    if command == 0:
        _lead_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while True:
        number = signal.sigwait({*passed_on, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(command, number)
        elif (status := _reap(command)) is not None:
            return status


def _reap(command: int) -> int | None:
    """Reap all that have ended. Returns the exit status of the command if it is among them."""
    found = None
    with suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                status = os.waitstatus_to_exitcode(ended[1])
                found = status if status >= 0 else INTERRUPTED_BY - status
    return found


def _lead_terminal() -> None:
    """Make this process the leader of a group, and that group the one that Ctrl-C of a terminal reaches: the init would
    pass on what the command has got already."""
    os.setpgid(0, 0)
    if sys.stdin is None or not sys.stdin.isatty():
        return
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with suppress(OSError):  # it is not the controlling terminal
        os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
    signal.signal(signal.SIGTTOU, ignored)
