"""The vLLM behind the gateway is a stock one: make test-vllm."""

import subprocess

import psutil
import pytest

from benchmarks.vllm_server import Vllm

pytestmark = pytest.mark.vllm


def test_nothing_of_headrace_is_in_vllms_environment(vllm: Vllm) -> None:
    """What the process itself would find, from where it runs, and what its workers have mapped."""
    for code in ("import headrace", "import importlib.metadata as m; m.version('headrace')", "import transfer"):
        command = [vllm.process.args[0], "-c", code]  # type: ignore[index]
        done = subprocess.run(command, env=vllm.environment, cwd=vllm.folder, capture_output=True, text=True)
        assert "Error: " in done.stderr, f"{code} works\n{done.stderr}"
    here = psutil.Process(vllm.process.pid)
    for process in (here, *here.children(recursive=True)):
        assert not [each.path for each in process.memory_maps() if "headrace" in each.path]
