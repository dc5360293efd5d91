"""A server that may open no more files: it says why it is not ready, and comes back by itself."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.harness import Server, serving, wait_until
from tests.e2e.models import stub

MODEL = stub(us_per_token=0)


@contextmanager
def no_descriptors(server: Server) -> Iterator[None]:
    """For its front end, which starts its processes."""
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.full
def test_stages_that_cannot_be_started_for_want_of_descriptors() -> None:
    with serving("--role", "colocated", *MODEL.flags) as server, httpx.Client(base_url=server.url) as http:

        def reason() -> str:
            """Why it is not ready, over a connection that is open already."""
            assert http.get("/health").status_code == 200
            answer = http.get("/ready")
            return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])

        assert reason() == ""
        with no_descriptors(server):
            server.child("headrace.engine.stage").send_signal(signal.SIGKILL)
            wait_until(lambda: "Too many open files; trying again" in reason(), 20, "says why")
        wait_until(lambda: reason() == "", 60, "the stage is back")
        MODEL.check(server, (1, 300), 8)
        assert "Traceback" not in server.log
        assert server.log.count("cannot be started") == 1
