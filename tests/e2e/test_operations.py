"""What happens to a server on a machine: signals that were not meant for it, a log that nobody reads, a temporary
folder that is emptied."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from headrace.core.runtime.process import module_command
from headrace.core.runtime.signals import ENDING, meaningless
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, running, wait_until

STUB = (
    *("--model", "stub:layers=4,vocab=1000,us_per_plan=5000", "--served-model-name", "m", "--dtype", "float32"),
    *("--role", "colocated", "--threads", "1"),
)
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
PATIENCE_S = 60.0


@contextmanager
def ignoring(number: signal.Signals) -> Iterator[None]:
    """For processes that are started meanwhile, as nohup does it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def streamed(server: Server, texts: list[str]) -> None:
    """Read a text of about half a second."""
    body = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE_S) as response:
        texts.extend(line for line in response.iter_lines() if line)


@pytest.mark.full
def test_signals_that_mean_nothing_change_nothing_and_a_hangup_drains() -> None:
    """Sent to all processes of a server, as a service manager may do it."""
    with closing(Server(*STUB)) as server:
        server.started()
        family = [psutil.Process(server.process.pid), *server.children()]
        for process in family:
            for number in meaningless():
                process.send_signal(number)
        for child in family[1:]:
            for number in ENDING:
                child.send_signal(number)
        wait_until(lambda: "SIGUSR1 changes nothing here" in server.log, 10, "it is said")
        assert server.post("/v1/completions", BODY).status_code == 200
        assert [psutil.Process(server.process.pid), *server.children()] == family
        texts: list[str] = []
        reader = threading.Thread(target=streamed, args=(server, texts))
        reader.start()
        wait_until(lambda: texts, PATIENCE_S, "the text has begun")
        server.process.send_signal(signal.SIGHUP)
        reader.join(PATIENCE_S)
        assert texts[-1] == "data: [DONE]"
        assert server.ended() == 0
        assert "SIGHUP: draining" in server.log


@pytest.mark.full
def test_a_hangup_is_survived_under_nohup() -> None:
    with ignoring(signal.SIGHUP):
        server = Server(*STUB)
    with running(server):
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert server.post("/v1/completions", BODY).status_code == 200


@pytest.mark.full
def test_a_log_that_nobody_reads_stops_nothing() -> None:
    reader, writer = os.pipe()
    url = f"http://127.0.0.1:{(port := free_port())}"
    flags = ("--port", str(port), "--log-level", "debug", *STUB)
    process = subprocess.Popen(module_command("headrace.cli.main", "serve", *flags), stdout=writer, stderr=writer)
    try:
        with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:

            def ready() -> bool:
                with suppress(httpx.TransportError):
                    return client.get("/ready").status_code == 200
                return False

            wait_until(ready, PATIENCE_S, "it is ready")
            fill(writer)
            for _ in range(200):
                assert client.post("/v1/completions", json=BODY).status_code == 200
            assert client.get("/health").status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def fill(writer: int) -> None:
    """The pipe to its end, as 64 KiB of a log do."""
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")


@pytest.mark.full
def test_a_server_comes_back_when_its_temporary_folder_has_gone() -> None:
    folder = Path(tempfile.mkdtemp())
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        server = Server(*STUB)
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
    with running(server):
        assert os.listdir(folder) == [], "it needs none"
        shutil.rmtree(folder)
        server.child("headrace.engine.stage").kill()
        wait_until(lambda: server.get("/ready").status_code == 503, 10, "the stage is gone")
        wait_until(lambda: server.get("/ready").status_code == 200, PATIENCE_S, "and is back")
        assert server.post("/v1/completions", BODY).status_code == 200
