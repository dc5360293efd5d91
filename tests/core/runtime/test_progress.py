"""Passes that are cancelled: before they begin, while they run, and when they have ended."""

import threading
import time

from headrace.core.runtime.progress import PassProgress


def test_a_pass_is_cancelled_before_it_begins_or_while_it_runs_and_no_other_is() -> None:
    progress = PassProgress()
    progress.begin(3)
    progress.cancel(5)
    progress.cancel(2)
    assert not progress.cancelled
    progress.begin(4)
    assert not progress.cancelled
    progress.begin(5)
    assert progress.cancelled
    progress.begin(6)
    assert not progress.cancelled
    progress.cancel(6)
    assert progress.cancelled
    progress.begin(0)
    assert not progress.cancelled


def test_a_sleep_ends_when_the_pass_is_cancelled() -> None:
    progress = PassProgress()
    progress.begin(1)
    started = time.monotonic()
    progress.sleep(0.05)
    assert time.monotonic() - started >= 0.05
    threading.Timer(0.05, progress.cancel, (1,)).start()
    progress.sleep(60)
    assert progress.cancelled
    progress.sleep(60)
    assert time.monotonic() - started < 30
