"""How late this machine's Linux wakes a process that sleeps, beside a program that calls sched_yield() all the time.

`python -m benchmarks.starvation`, which takes two minutes of a machine with nothing else to do. The program does as a
vLLM on a CPU that waits for KV. It runs in the session of the process that sleeps, and in one of its own: sessions are
given cores as groups (autogroups, see sched(7)), and so are containers. A kernel that starves the sleeper only in the
second case has the fault of docs/operations.md, "Neighbours that take all cores".
"""

import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Event, Process
from multiprocessing.synchronize import Event as EventType
from pathlib import Path
from typing import NoReturn

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import console, print_table, run

SLEEP_S = 0.02
LONG_S = 0.25  # more than a wakeup takes on a busy machine
PAIRS = 3  # processes that wake each other: each wakeup changes the load by which cores are shared out
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("starvation", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each measurement")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    late: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(given.rounds):
        for apart, found in late.items():
            with _program(apart), console.status("sleeping"):
                found += _lateness(given.seconds)
    autogroups = AUTOGROUPS.read_text().strip() if AUTOGROUPS.exists() else "0"
    print_table(
        f"Linux {platform.release()}, {_cores()} cores, sched_autogroup_enabled={autogroups}: lateness of a "
        f"process that sleeps, {given.rounds} times {given.seconds:g} s",
        ("the program is", "longest, ms", f"more than {1000 * LONG_S:g} ms"),
        [
            (
                "in another session" if apart else "in the same session",
                f"{1000 * max(found, default=0.0):,.0f}",
                f"{sum(each > LONG_S for each in found)} of {len(found):,}",
            )
            for apart, found in late.items()
        ],
    )
    return 0


def _lateness(seconds: float) -> list[float]:
    """Seconds by which a process that sleeps again and again was woken late."""
    found: list[float] = []
    now = time.monotonic()
    end = now + seconds
    while now < end:
        time.sleep(SLEEP_S)
        before, now = now, time.monotonic()
        found.append(now - before - SLEEP_S)
    return found


@contextmanager
def _program(apart: bool) -> Iterator[None]:
    """The program runs meanwhile. apart: in a session of its own."""
    leads = Event()
    leader = Process(target=_lead, args=(apart, leads))
    leader.start()
    leads.wait()
    try:
        yield
    finally:
        assert leader.pid is not None
        os.killpg(leader.pid, signal.SIGKILL)
        leader.join()


def _lead(apart: bool, leads: EventType) -> NoReturn:
    if apart:
        os.setsid()
    else:
        os.setpgid(0, 0)
    leads.set()
    for target in [_yield] * (_cores() - 1) + [_wake] * PAIRS:
        if os.fork() == 0:
            target()
    _yield()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _yield() -> NoReturn:
    while True:
        os.sched_yield()


def _wake() -> NoReturn:
    """Two processes that send each other a byte, to and fro."""
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        while True:
            os.write(answer, os.read(asked, 1))
    while True:
        os.write(ask, b"?")
        os.read(answered, 1)


if __name__ == "__main__":
    run(main)
