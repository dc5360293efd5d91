"""The systemd unit: valid, confined, and with time to drain."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import commands as cli
from headrace.core.config import ServerConfig
from headrace.core.runtime.process import MISTAKE
from tests.deployment.files import ROOT

FOLDER = ROOT / "deploy/systemd"
UNIT = FOLDER / "headrace@.service"
MOST_EXPOSED = 2.0  # of ten, by systemd-analyze security; what the server needs is 1.4


def service() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed (it comes with systemd)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit as an instance, whose program exists."""
    path = tmp_path / "headrace@prefill.service"
    path.write_text(UNIT.read_text().replace("/opt/headrace/bin/headrace", sys.executable))
    return path


def test_systemd_takes_every_line(installed: Path) -> None:
    done = analyze("verify", "--man=no", str(installed))
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "headrace" in line]
    assert not ours, "\n".join(ours)


def test_a_wrong_line_is_found(installed: Path) -> None:
    installed.write_text(installed.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    assert "ProtectSytem" in analyze("verify", "--man=no", str(installed)).stderr


def test_it_is_confined(installed: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED * 10:.0f}", str(installed))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze judges no files")
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_a_drain_fits_into_the_time_to_stop() -> None:
    assert float(service()["TimeoutStopSec"]) >= ServerConfig().drain_timeout_s + 10
    assert service()["KillMode"] == "mixed", "SIGTERM is for the first process, which drains"


def test_a_wrong_configuration_is_not_started_again() -> None:
    assert service()["RestartPreventExitStatus"] == str(MISTAKE)


def test_the_command_is_the_server_s() -> None:
    words = service()["ExecStart"].replace("%i", "prefill").split()
    given = cli.build_parser().parse_args(words[1:])
    assert (given.command, given.config) == ("serve", "/etc/headrace/prefill.toml")
    assert (ROOT / "configs/prefill.toml").exists(), "the example that the unit names"


def test_the_user_is_made() -> None:
    made = re.search(r"^u (\S+)", (FOLDER / "headrace.conf").read_text(), re.MULTILINE)
    assert made is not None
    assert made[1] == service()["User"]
