"""Signals to `headrace stage`: it says which one ended it, also while its main thread is in a library."""

import signal
import subprocess
from pathlib import Path

from headrace.core.runtime.process import module_command
from tests.e2e.harness import wait_until

FLAGS = ("--scheduler", "tcp://127.0.0.1:1", "--rank", "0", "--world-size", "1", "--join-timeout", "120")


def test_a_hangup_ends_a_rank_with_a_line_and_other_signals_do_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        rank = subprocess.Popen(
            module_command("headrace.cli.main", "stage", *FLAGS), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: "joining tcp://127.0.0.1:1" in log.read_text(), 60, "it joins")
        rank.send_signal(signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1 changes nothing here" in log.read_text(), 20, "it says so")
        rank.send_signal(signal.SIGHUP)
        assert rank.wait(20) == 128 + signal.SIGHUP
        assert "SIGHUP ends this rank" in log.read_text()
    finally:
        rank.kill()
        rank.wait()
