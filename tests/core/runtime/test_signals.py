"""What each signal means: none that ends a process by default is forgotten."""

import os
import signal
import subprocess
import sys

import pytest

from headrace.core.runtime import signals

# What the kernel does with a signal that a process says nothing about: signal(7).
DEFAULT_IS_TO_END = {
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM"),
    *("TERM", "STKFLT", "XCPU", "XFSZ", "VTALRM", "PROF", "IO", "PWR", "SYS"),
}
CRASHES = {"ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS"}


def test_every_signal_that_ends_a_process_has_a_meaning() -> None:
    decided = {*signals.ENDING, *signals.meaningless()}
    by_default = {getattr(signal, f"SIG{name}") for name in DEFAULT_IS_TO_END - CRASHES - {"KILL", "PIPE", "XFSZ"}}
    real_time = set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    assert decided == by_default | real_time
    assert not {*signals.ENDING} & {*signals.meaningless()}
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert signal.getsignal(number) is signal.SIG_IGN, "Python does that"


@pytest.mark.parametrize(("ignored", "stays"), [("SIGHUP", True), ("SIGQUIT", True), ("SIGTERM", False)])
def test_what_a_process_was_started_to_ignore_stays_so(ignored: str, stays: bool) -> None:
    """By nohup, or by a shell for a program in the background."""
    code = f"from headrace.core.runtime.signals import *; print({ignored!r} in [each.name for each in ending()])"
    number = getattr(signal, ignored)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        answer = subprocess.check_output([sys.executable, "-c", code], text=True, env=dict(os.environ))
    finally:
        signal.signal(number, before)
    assert answer == f"{not stays}\n"


def test_names() -> None:
    assert signals.signal_name(signal.SIGHUP) == "SIGHUP"
    assert signals.signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"
