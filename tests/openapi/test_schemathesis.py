"""Running servers against their own /openapi.json: statuses, media types, schemas of responses, methods, keys."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.harness import Server, pair, serving

pytestmark = pytest.mark.openapi
PROGRAM = Path(os.environ.get("HEADRACE_OPENAPI", ".venv-openapi")).absolute() / "bin" / "schemathesis"
CONFIG = Path(__file__).with_name("schemathesis.toml")
MODEL = "stub:layers=2,us_per_token=0,vocab=1000,max_len=2048"
FLAGS = ("--model", MODEL, "--kv-pages", "512", "--threads", "1", "--api-key", "k", "--bootstrap-timeout", "1")
ROLES = ("prefill", "decode", "colocated")
EXAMPLES = 40  # of each route
FUZZING_S = 180
DEADLINE_S = 1200


@pytest.fixture(scope="module", params=ROLES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """In each role; the decode server has a prefill server."""
    with ExitStack() as servers:
        if request.param == "colocated":
            yield servers.enter_context(serving("--role", "colocated", *FLAGS))
        else:
            key = ("--prefill-api-key", "k")
            both = servers.enter_context(pair(FLAGS, (*FLAGS, *key)))
            yield both[ROLES.index(request.param)]


def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    command = [str(PROGRAM), "--config-file", str(CONFIG), "run", f"{server.url}/openapi.json"]
    command += ["-H", "Authorization: Bearer k", "--max-examples", str(EXAMPLES), "--max-time", str(FUZZING_S)]
    command += ["--phases", "examples,coverage,fuzzing", "--no-shrink", "--continue-on-failure"]
    # Not two: ast of CPython 3.11 raises SystemError for deep expressions in threads.
    command += ["--workers", "1", "--request-timeout", "30", "--warnings", "off", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert "Errors" not in done.stdout
    assert server.process.poll() is None
