"""Every command of the README is run by a test; files that it goes with agree with it."""

import ast
import re
import tomllib

import pytest

from tests.deployment.files import ROOT
from tests.deployment.readme import DECODE, PREFILL, RUN_BY, commands


def test_every_command_is_in_the_table_of_tests() -> None:
    assert set(commands()) == set(RUN_BY)


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_the_tests_are_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    if name:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {found.name for found in ast.walk(tree) if isinstance(found, ast.FunctionDef)}


@pytest.mark.parametrize("command", [command for command in RUN_BY if command.startswith("make ")])
def test_targets_of_make(command: str) -> None:
    """Those that make the test run, or run longer than tests do."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)


def test_configurations_have_the_ports_of_the_readme() -> None:
    for command, name in ((PREFILL, "prefill"), (DECODE, "decode")):
        config = tomllib.loads((ROOT / f"configs/{name}.toml").read_text(encoding="utf-8"))
        flags = command.split()
        assert str(config["port"]) == flags[flags.index("--port") + 1]
        assert config["role"] == name
        if name == "decode":
            assert config["prefill"] == [flags[flags.index("--prefill") + 1]]
