"""The package for vLLM's environment: complete, and without names that could be somebody else's."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace.integrations.vllm.setup import NAME, package
from tests.deployment.files import ROOT

# What vLLM itself requires, as its modules are called.
VLLMS_OWN = {"torch", "numpy", "zmq", "msgspec", "safetensors", "transformers", "tokenizers", "huggingface_hub", "vllm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("package")
    package(made)
    return made


def test_every_module_is_imported_from_the_package_alone(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == [NAME]
    modules = sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
        if path.name != "connector.py"  # needs vLLM
    )
    assert f"{NAME}.peer.loop" in modules
    script = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        f"for name in {modules!r}: __import__(name)\n"
        "ours = {'core', 'transfer', 'engine', 'server', 'scheduler', 'integrations'}\n"
        "assert not ours & {name.split('.')[0] for name in sys.modules}, sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_connector_and_all_else_need_what_vllm_has_and_what_is_declared(folder: Path) -> None:
    declared = tomllib.loads((ROOT / "integrations/vllm/pyproject.toml").read_text())["project"]["dependencies"]
    names = {Requirement(text).name for text in declared}
    needed = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                needed.add((node.module or "").split(".")[0])
    assert needed - set(sys.stdlib_module_names) - {NAME} <= VLLMS_OWN | names
    assert not {"torch", "pyzmq", "msgspec", "numpy"} & names, "those are vLLM's, in the versions that it has"
