"""Flags of `headrace up`: which are its own, and mistakes in them."""

import subprocess
import sys

import pytest

from headrace.cli.commands import main
from headrace.core.types.errors import ConfigError
from headrace.server.cluster.options import split


def test_the_remaining_flags_are_the_servers() -> None:
    options, rest = split(["--model", "stub", "--ray", "auto", "--pp", "2", "--rank-gpus=0.5", "--placement", "SPREAD"])
    assert (options.ray, options.rank_cpus, options.rank_gpus, options.strategy) == ("auto", 1.0, 0.5, "SPREAD")
    assert rest == ["--model", "stub", "--pp", "2"]


@pytest.mark.parametrize("flags", [["--rank-cpus", "-1"], ["--rank-gpus", "nan"]])
def test_numbers_are_checked(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]}: expected a number, at least 0"):
        split(["--ray", "auto", *flags])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "the following arguments are required: --ray"),
        (["--ray", "auto", "--placement", "TIGHT"], "invalid choice: 'TIGHT'"),
        (["--ray", "auto", "--polciy", "fcfs"], "unknown argument --polciy"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_without_ray_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; from headrace.cli.commands import main; sys.exit(main(sys.argv[1:]))"
    made = subprocess.run(
        [sys.executable, "-c", code, "up", "--ray", "auto", "--dtype", "float32"], capture_output=True, text=True
    )
    assert made.returncode == 2
    assert made.stderr.strip() == "headrace: ray is not installed; headrace up needs: pip install 'headrace[ray]'"
