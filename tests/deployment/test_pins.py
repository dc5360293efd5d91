"""The requirements are pinned, complete, and name no place to fetch from."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deployment.files import ROOT

LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.]+)")
FILES = ("requirements/server.txt", "requirements/dev.txt")
PEERS = (
    "requirements/nixl.txt",
    "requirements/openvino.txt",
    "requirements/ray.txt",
    "requirements/routers.txt",
    "requirements/vllm.txt",
)  # for environments of their own
# torch's CUDA build brings libraries that its CPU build does not have; their versions are torch's own pins.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")


def pins(name: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found: dict[str, str] = {}
    for line in filter(None, lines):
        if line.startswith("-r "):
            found |= pins(str(Path(name).parent / line.removeprefix("-r ")))
            continue
        match = LINE.fullmatch(line)
        assert match, f"{name}: {line!r} is no exact pin"
        key = canonicalize_name(match["name"])
        assert key not in found, f"{name}: {key} is pinned twice"
        found[key] = match["version"]
    return found


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_torch_is_pinned_by_the_plain_name() -> None:
    assert "torch==2.13.0" in (ROOT / "requirements/server.txt").read_text().splitlines()


def test_every_dependency_of_the_project_is_pinned_within_its_bounds() -> None:
    pinned = pins("requirements/server.txt")
    table = project()
    for text in [*table["dependencies"], *table["optional-dependencies"]["server"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("name", FILES)
def test_pins_are_closed(name: str) -> None:
    """What a pinned package needs is pinned too, in a version that suits it."""
    pinned = pins(name)
    for package in pinned:
        try:
            needed = requires(package) or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            other = canonicalize_name(requirement.name)
            if other.startswith(BROUGHT_BY_TORCH):
                continue
            assert other in pinned, f"{package} needs {other}, which {name} does not pin"
            assert requirement.specifier.contains(pinned[other], prereleases=True), f"{package} needs {requirement}"


@pytest.mark.parametrize("name", PEERS)
def test_other_programs_are_pinned(name: str) -> None:
    assert len(pins(name)) > 1


def test_installed_versions_are_the_pinned_ones() -> None:
    """Else the tests would be about another program than the one that the files describe. torch may be another build
    of it."""
    for package, pinned in pins("requirements/server.txt").items():
        if package not in ("torch", "setuptools"):
            assert version(package) == pinned, package


@pytest.mark.parametrize(
    "name", [*FILES, *PEERS, "pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml", "Dockerfile"]
)
def test_nothing_names_a_package_index(name: str) -> None:
    text = (ROOT / name).read_text()
    hosts = set(re.findall(r"(?:https?|git\+\w+|ssh|file)://([^/:'\"\s]+)", text))
    assert hosts <= {"127.0.0.1"}
    assert not re.search(r"--(extra-)?index-url[= ](?!\.\.\.)|--find-links[= ]", text)
