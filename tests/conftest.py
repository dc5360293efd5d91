"""For all tests."""

import os
import signal
import ssl
import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from headrace.core.runtime.signals import ENDING
from headrace.server.config.load import CPUINFO_VARIABLE
from tests.cpus import KINDS, cpuinfo, other_kind

if TYPE_CHECKING:
    from tests.scheduler.recordings import FailedSchedules

FAILED: "pytest.StashKey[FailedSchedules]" = pytest.StashKey()

settings.register_profile("headrace", deadline=None)  # how fast a machine is, and how busy, is no failure
settings.load_profile("headrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    kinds = (*KINDS, "other")
    parser.addoption("--cpu", choices=kinds, help="run as on this kind of CPU, or the one that this machine is not")


def pytest_configure(config: pytest.Config) -> None:
    """Servers that tests start inherit the variable; runners in this process get it from make_runner()."""
    kind = config.getoption("cpu")
    if kind is not None:
        os.environ[CPUINFO_VARIABLE] = cpuinfo(other_kind() if kind == "other" else kind)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests simulate schedules, those that break a guarantee are recorded when their test fails."""
    if "headrace.testing.simulator" in sys.modules:
        from tests.scheduler.recordings import FailedSchedules

        session.stash[FAILED] = failed = FailedSchedules()
        failed.watch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (failed := item.session.stash.get(FAILED, None)) is not None:
        failed.forget()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    failed = item.session.stash.get(FAILED, None)
    if failed is not None and call.when == "call" and report.failed and (paths := failed.save()):
        report.sections.append(("recordings, for headrace replay", "\n".join(map(str, paths))))


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """httpx reads those of the machine for every client and every request without one, which takes 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def signals_of_a_foreground() -> None:
    """nohup and a shell's `&` have signals ignored, which tests and the processes they start would inherit."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A server that has run in this process leaves signals ignored, and processes that are started later would inherit
    that."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
