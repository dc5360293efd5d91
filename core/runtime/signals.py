"""What signals mean to the processes of a server. By default most of them end a process where it stands."""

import signal

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
    """As people write it."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
