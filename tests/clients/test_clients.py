"""Official clients, each a program that ends with status 0 where all of its requests were answered as it expects.

They run in an environment of their own (requirements/clients.txt), against a decode server that has its prompts
computed by a prefill server. tests/server/api/test_clients_of_today.py has what clients send, field by field.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Server, pair

pytestmark = pytest.mark.clients
PYTHON = Path(os.environ.get("HEADRACE_CLIENTS", ".venv-clients")).absolute() / "bin" / "python"
PROGRAMS = Path(__file__).with_name("programs")
STUB = ("--model", "stub:layers=2,hidden=32", "--max-model-len", "4096", "--kv-pages", "512", "--threads", "1")
NAMED = ("--served-model-name", "org/tested", "--tool-parser", "hermes")
DEADLINE_S = 300


@pytest.fixture(scope="module")
def decode() -> Iterator[Server]:
    with pair((*STUB, *NAMED), (*STUB, *NAMED)) as (_, decode):
        yield decode


def run(command: list[str], decode: Server, folder: Path) -> None:
    """A program with the server's URL and its model's name; a home folder of its own, and no proxies."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [*command, decode.url, "org/tested"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}\n{decode.log[-4000:]}"
    assert decode.process.poll() is None


@pytest.mark.parametrize("name", sorted(path.name for path in PROGRAMS.glob("*_client.py")))
def test_a_client_is_served(name: str, decode: Server, tmp_path: Path) -> None:
    run([str(PYTHON), str(PROGRAMS / name)], decode, tmp_path)


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is installed (javac)")
def test_the_jdks_client_is_served(decode: Server, tmp_path: Path) -> None:
    subprocess.run(["javac", "-d", str(tmp_path), str(PROGRAMS / "JdkClient.java")], check=True, timeout=DEADLINE_S)
    run(["java", "-cp", str(tmp_path), "JdkClient"], decode, tmp_path)
