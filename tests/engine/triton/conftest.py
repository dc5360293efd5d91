"""The arithmetic and attention in Triton, their kernels run by Triton's interpreter on the CPU."""

import sys
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

import pytest

from headrace.engine import attention, triton
from headrace.engine.attention.work import MakeWork
from headrace.engine.model.arithmetic import TorchArithmetic

FRESH = {
    triton: ("arithmetic", "kernels", "latents", "launch", "product_kernels", "products"),
    attention: ("triton_work",),
}
"""Modules that import kernels, by their packages."""


@pytest.fixture(scope="session")
def modules() -> dict[str, ModuleType]:
    """Modules of FRESH by their names.

    Triton decides whether to interpret when it is imported, for its own functions, too. So it is imported once more for
    this, and so are these.
    """
    ours = [f"{package.__name__}.{name}" for package, names in FRESH.items() for name in names]
    again = [name for name in sys.modules if f"{name}.".startswith("triton.") and "._C" not in name]
    with (
        patch.dict(sys.modules),
        patch.dict(vars(triton)),
        patch.dict(vars(attention)),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        for name in (*again, *ours):
            sys.modules.pop(name, None)
        for package, names in FRESH.items():
            for name in names:
                vars(package).pop(name, None)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return {name.rpartition(".")[2]: import_module(name) for name in ours}


@pytest.fixture(scope="session")
def interpreted(modules: dict[str, ModuleType]) -> TorchArithmetic:
    """A TritonArithmetic for tensors on the CPU."""
    made: TorchArithmetic = modules["arithmetic"].TritonArithmetic()
    return made


@pytest.fixture(scope="session")
def interpreted_work(modules: dict[str, ModuleType]) -> MakeWork:
    """TritonWork for tensors on the CPU."""
    made: MakeWork = modules["triton_work"].TritonWork
    return made
