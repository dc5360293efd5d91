"""A GPU that is not there, for every test of this folder."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.cuda.fake_gpu import FakeGpu


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library made of guard.cpp, as pip makes the other extensions: with the machine's compiler."""
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    torch_path = Path(torch.__file__).parent
    compiled = subprocess.run(
        ["c++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch_path / 'include'}", "-o", library,
         Path(__file__).with_name("guard.cpp"), f"-L{torch_path / 'lib'}", "-lc10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr
    return str(library)


@pytest.fixture
def gpu(guard: str) -> Iterator[FakeGpu]:
    """One that has not been entered."""
    made = FakeGpu(guard)
    yield made
    assert not made.races, "\n".join(map(str, made.races))
