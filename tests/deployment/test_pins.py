"""The requirements are pinned, complete, and name no place to fetch from."""

import hashlib
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deployment.files import ROOT

LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!]+)(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)")
FILES = ("requirements/server.txt", "requirements/dev.txt")
TRACING = "requirements/tracing.txt"  # a part of dev.txt
PEERS = (
    "requirements/audit.txt",
    "requirements/charts.txt",
    "requirements/clients.txt",
    "requirements/cuda.txt",
    "requirements/dynamo.txt",
    "requirements/evaluation.txt",
    "requirements/gemma3.txt",
    "requirements/nixl.txt",
    "requirements/openapi.txt",
    "requirements/openvino.txt",
    "requirements/ray.txt",
    "requirements/routers.txt",
    "requirements/sglang.txt",
    "requirements/vllm.txt",
    "requirements/vllm-0.30.0.txt",
    "requirements/vllm-0.31.0.txt",
    "requirements/vllm-0.33.0.txt",
    "requirements/vllm-dynamo.txt",
)  # for environments of their own
# torch's CUDA build brings libraries that its CPU build does not have; their versions are torch's own pins.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")


def pins(name: str) -> dict[str, str]:
    """Versions by package. Each has a hash: torch alone is checked by requirements/install-torch."""
    text = re.sub(r" \\\n *", " ", (ROOT / name).read_text())
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found: dict[str, str] = {}
    for line in filter(None, lines):
        if line.startswith("-r "):
            found |= pins(str(Path(name).parent / line.removeprefix("-r ")))
            continue
        match = LINE.fullmatch(line)
        assert match, f"{name}: {line!r} is no exact pin"
        key = canonicalize_name(match["name"])
        assert match["hashes"] or key == "torch", f"{name}: {key} has no hash"
        assert key not in found, f"{name}: {key} is pinned twice"
        found[key] = match["version"]
    return found


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_torch_is_pinned_by_the_plain_name() -> None:
    assert pins("requirements/torch.txt") == {"torch": "2.13.0"}


def test_builds_of_torch_have_hashes() -> None:
    lines = (ROOT / "requirements/torch.sha256").read_text().splitlines()
    builds = [line for line in lines if not line.startswith("#")]
    for line in builds:
        assert re.fullmatch(r"[0-9a-f]{64}  torch-2\.13\.0(\+cpu)?-cp3\d\d-cp3\d\dt?-[a-z0-9_]+\.whl", line), line
    assert len(set(builds)) == len(builds) > 1


@pytest.mark.parametrize(("content", "status"), [(b"a build that is listed", 0), (b"a build that is not", 1)])
def test_torch_is_installed_from_a_listed_file_alone(tmp_path: Path, content: bytes, status: int) -> None:
    """requirements/install-torch, with a pip that offers a file of this content."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    listed = hashlib.sha256(b"a build that is listed").hexdigest()
    (tmp_path / "requirements" / "torch.sha256").write_text(f"{listed}  torch-2.13.0+cpu-x.whl\n")
    calls = tmp_path / "calls"
    pip = tmp_path / "python"
    pip.write_text(
        f"""#!/bin/sh
case "$*" in
*download*) while [ "$1" != --dest ]; do shift; done; printf %s '{content.decode()}' > "$2/torch-2.13.0+cpu-x.whl" ;;
*install*) echo "$@" >> {calls} ;;
*) exit 1 ;;
esac
"""
    )
    pip.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "requirements" / "install-torch", pip], check=False, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert calls.exists() == (status == 0)
    assert ("does not list this file" in done.stderr) == (status == 1)


def test_every_dependency_of_the_project_is_pinned_within_its_bounds() -> None:
    pinned = pins("requirements/server.txt") | pins("requirements/torch.txt") | pins(TRACING)
    table = project()
    extras = table["optional-dependencies"]
    for text in [*table["dependencies"], *extras["server"], *extras["tracing"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("name", FILES)
def test_pins_are_closed(name: str) -> None:
    """What a pinned package needs is pinned too, in a version that suits it."""
    pinned = pins(name) | pins("requirements/torch.txt")
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
    assert pins(name)


def test_installed_versions_are_the_pinned_ones() -> None:
    """Else the tests would be about another program than the one that the files describe."""
    for package, pinned in (pins("requirements/server.txt") | pins(TRACING)).items():
        if package != "setuptools":
            assert version(package) == pinned, package


@pytest.mark.parametrize(
    "name", [*FILES, TRACING, *PEERS, "pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml", "Dockerfile"]
)
def test_nothing_names_a_package_index(name: str) -> None:
    text = (ROOT / name).read_text()
    hosts = set(re.findall(r"(?:https?|git\+\w+|ssh|file)://([^/:'\"\s]+)", text))
    assert hosts <= {"127.0.0.1"}
    assert not re.search(r"--(extra-)?index-url[= ](?!\.\.\.)|--find-links[= ]", text)


def test_accepted_vulnerabilities_are_explained_and_their_functions_unused() -> None:
    (line,) = re.findall(r"^ACCEPTED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    explained = (ROOT / "docs/security.md").read_text()
    assert [name for name in line.split() if name not in explained] == []
    unsafe = re.compile(r"\btorch\.(?:load|jit|export)\b|^\s*(?:import|from) pickle\b", re.MULTILINE)
    sources = [path for package in (ROOT / "src/headrace").iterdir() for path in package.resolve().rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if unsafe.search(path.read_text())] == []
