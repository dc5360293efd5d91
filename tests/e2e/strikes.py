"""Deaths and silences of ranks under load: all in flight fails within seconds, and all ranks come back."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from tests.e2e.harness import Server, pages_in_use, wait_until

SOON_S = 8.0  # within which everything in flight has failed: a stopped rank after its --stage-timeout


def ranks_of(server: Server) -> list[psutil.Process]:
    """The processes of the ranks that a server has started, in order."""
    children = [child for child in server.children() if "headrace.engine.stage" in child.cmdline()]
    return sorted(children, key=lambda child: int(child.environ().get("RANK", "0")))


def strike(server: Server, bodies: Sequence[dict[str, Any]], blow: Callable[[], object], name: str) -> None:
    """Kill or stop a rank by blow() while these completions are computed: each fails within seconds, with 503 and a
    message that names the rank."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        load = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        wait_until(lambda: pages_in_use(server) > 0, 20, "work in flight")
        blow()
        struck = time.monotonic()
        answers = [each.result() for each in load]
    assert time.monotonic() - struck < SOON_S
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert name in answer.json()["error"]["message"], answer.text


def come_back(server: Server, old: Sequence[psutil.Process]) -> None:
    """Wait until the server would serve again; none of the processes of the ranks before is left."""
    wait_until(lambda: server.get("/ready").status_code == 200, 60, f"back again\n{server.log}")
    assert not [process for process in old if process.is_running()]
