"""The wheel: it brings headrace alone, its base needs four packages, a pair runs among modules of other projects."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deployment.files import PACKAGES, ROOT

BASE = ("msgspec", "numpy", "numpy.libs", "zmq", "pyzmq.libs", "xxhash")  # folders of what the base depends on
FOREIGN = 'raise ImportError("this module is of another project")\n'

PAIR = """
import headrace, sys
from headrace.server.launch.local_server import LocalServer
model = ("--model", "stub", "--dtype", "float32", "--max-model-len", "512", "--kv-pages", "64", "--threads", "1")
prefill = LocalServer("--role", "prefill", *model)
decode = LocalServer("--role", "decode", *model, "--prefill", prefill.url)
alone = LocalServer("--role", "colocated", *model)
servers = (prefill, decode, alone)
try:
    for server in servers:
        server.wait_ready(120)
    body = {"model": "stub", "prompt": "Who owns this folder?", "max_tokens": 8, "temperature": 0}
    answers = [server.request("POST", "/v1/completions", body).json() for server in (decode, alone)]
finally:
    for server in servers:
        server.end()
print(headrace.__file__)
print(answers[0]["headrace"]["handoff"]["bytes"] > 0, answers[0]["choices"] == answers[1]["choices"])
"""

EVERY_MODULE = """
import importlib, pkgutil, sys
names = []
for room in ("headrace.core", "headrace.transfer", "headrace.peer"):
    package = importlib.import_module(room)
    names += [found.name for found in pkgutil.walk_packages(package.__path__, room + ".")]
compiled = "headrace.transfer.backends.streaming"  # a shared library, loaded by ctypes
extra = "headrace.transfer.backends.nixl"
names = sorted(set(names) - {compiled, extra})
for name in names:
    importlib.import_module(name)
packages = {name.split(".")[1] for name in sys.modules if name.startswith("headrace.")}
assert packages == {"core", "transfer", "peer"}, packages
print(len(names))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source distribution, which the wheel was built from."""
    folder = tmp_path_factory.mktemp("dist")
    compiler = (
        folder / "cc"
    )  # what these tests are about needs no fast code, which takes the compiler ten times as long
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "CC": str(compiler)})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def environment(folder: Path, wheel: Path, packages: Sequence[Path]) -> Path:
    """The Python of a new virtual environment that has the wheel, and the packages linked from this one."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    for package in packages:
        (site(folder) / package.name).symlink_to(package)
    return python


def site(folder: Path) -> Path:
    """Where packages of a virtual environment are."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def test_wheel_and_sdist_bring_nothing_but_headrace(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.split("/")[0] for name in names}
    if shutil.which("gcc") is not None:
        assert len([name for name in names if name.endswith(sysconfig.get_config_var("EXT_SUFFIX"))]) == 3, (
            "all are compiled"
        )
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}
    packages = {name.split("/")[1] for name in names if name.startswith("headrace/") and name.count("/") > 1}
    assert packages == set(PACKAGES)
    with tarfile.open(source) as archive:
        tops = {"/".join(member.name.split("/")[1:3]) for member in archive.getmembers() if member.isfile()}
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert {top for top in tops if top.startswith("src/")} == {"src/headrace", "src/headrace.egg-info"}


@pytest.mark.full
def test_a_pair_runs_among_modules_of_other_projects(built: Path, tmp_path: Path) -> None:
    """In a folder with core.py, server/, engine.py and zmq.py, beside an installed package that is called core."""
    (wheel,) = built.glob("*.whl")
    own = Path(sysconfig.get_path("purelib"))
    packages = [entry for entry in own.iterdir() if entry.suffix != ".pth" and "headrace" not in entry.name.lower()]
    python = environment(
        tmp_path / "env", wheel, [entry for entry in packages if entry.name not in ("pip", "__pycache__")]
    )
    (site(tmp_path / "env") / "core").mkdir()
    (site(tmp_path / "env") / "core" / "__init__.py").write_text(FOREIGN)
    folder = tmp_path / "work"
    (folder / "server").mkdir(parents=True)
    for name in ("core.py", "server/__init__.py", "engine.py", "zmq.py"):
        (folder / name).write_text(FOREIGN)
    done = subprocess.run([python, "-P", "-c", PAIR], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    where, equal = done.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert equal == "True True"
    helped = subprocess.run(
        [python.with_name("headrace"), "serve", "--help"], cwd=folder, capture_output=True, timeout=60
    )
    assert helped.returncode == 0


def test_the_base_is_a_peer_without_torch_and_fastapi(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    own = Path(sysconfig.get_path("purelib"))
    python = environment(tmp_path / "env", wheel, [own / name for name in BASE if (own / name).exists()])
    done = subprocess.run([python, "-I", "-c", EVERY_MODULE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60
    serve = subprocess.run([python.with_name("headrace"), "serve"], capture_output=True, text=True, timeout=60)
    assert serve.returncode == 2
    assert "pip install" in serve.stderr
    assert "headrace[server]" in serve.stderr
    assert len(serve.stderr.splitlines()) == 1
