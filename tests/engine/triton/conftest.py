"""The arithmetic in Triton, its kernels run by Triton's interpreter on the CPU."""

import sys
from importlib import import_module
from unittest.mock import patch

import pytest

from headrace.engine import triton as package
from headrace.engine.model.arithmetic import TorchArithmetic

OURS = f"{package.__name__}."


@pytest.fixture(scope="session")
def interpreted() -> TorchArithmetic:
    """A TritonArithmetic for tensors on the CPU.

    Triton decides whether to interpret when it is imported, for its own functions, too. So it is imported once more for
    this, and so are our kernels.
    """
    again = [name for name in sys.modules if f"{name}.".startswith(("triton.", OURS)) and "._C" not in name]
    with patch.dict(sys.modules), patch.dict(vars(package)), pytest.MonkeyPatch.context() as monkeypatch:
        for name in {*again} - {package.__name__}:
            del sys.modules[name]
        for name in ("arithmetic", "kernels"):
            vars(package).pop(name, None)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        made: TorchArithmetic = import_module(f"{OURS}arithmetic").TritonArithmetic()
    return made
