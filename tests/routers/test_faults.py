"""What a client gets through a router when a side refuses, is full, or is down; no server keeps pages of it."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, wait_until
from tests.routers.fleet import KINDS, Router, Site, routed

pytestmark = pytest.mark.routers

SHORT = ("--hold-lease", "3", "--bootstrap-timeout", "3")
STUB = ("--model", "stub:layers=4,hidden=32", "--max-model-len", "512", "--served-model-name", "tested", *SHORT)
BODY = {"model": "tested", "prompt": "x y z", "max_tokens": 8, "temperature": 0}
BOUND_S = 20.0  # sglang-router tries five times
# xpyd-proxy reads a refusal as an answer without kv_transfer_params; sglang-router has a status of its own for what it
# has tried again in vain, unless it is a stream; the small balancers stream an error under 200.
REFUSED = {"xpyd": 502}
OVERLOADED = {"xpyd": 502, "sglang": 500}
SILENT = ("xpyd", "dynamo")  # of why a prefill server is overloaded
OVERLOADED_STREAM = {"xpyd": 502, "vllm-mini-lb": 200, "sglang-mini-lb": 200}


class Fleet:
    """A pair whose servers can be killed and started again where they were."""

    def __init__(self) -> None:
        self.bootstrap_port = free_port()
        flags = ("--bootstrap-port", str(self.bootstrap_port), "--max-queued-requests", "1")
        self._prefill = ("--role", "prefill", *STUB, *flags)
        self.prefill = Server(*self._prefill)
        self._decode = ("--role", "decode", "--prefill", self.prefill.url, *STUB)
        self.decode = Server(*self._decode)
        self.prefill.started()
        self.decode.started()

    @property
    def site(self) -> Site:
        return Site(self.prefill, self.decode, self.bootstrap_port, "tested")

    @contextmanager
    def without_prefill(self) -> Iterator[None]:
        self.prefill.kill()
        yield
        self.prefill = Server(*self._prefill, port=self.prefill.port).started()
        wait_until(self.decode.ready, 20, "the decode server has found it again")

    @contextmanager
    def without_decode(self) -> Iterator[None]:
        self.decode.kill()
        yield
        self.decode = Server(*self._decode, port=self.decode.port).started()

    @contextmanager
    def full(self) -> Iterator[None]:
        """One request is open at the prefill server, which is all that may be."""
        body = {"prompt": "z", "ticket": "occupied", "rid": "occupied"}
        with ThreadPoolExecutor(1) as pool:
            open_request = pool.submit(self.prefill.post, "/v1/prefill", body)
            wait_until(lambda: self.prefill.metrics()["headrace_open_requests"] == 1, 10, "it is open")
            yield
            self.prefill.request("DELETE", "/v1/prefill/occupied")
            open_request.result()

    def close(self) -> None:
        for server in (self.prefill, self.decode):
            if server.process.poll() is None:
                server.kill()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def ask(router: Router, **changes: object) -> httpx.Response:
    started = time.monotonic()
    response = router.post("/v1/completions", {**BODY, **changes})
    assert time.monotonic() - started < BOUND_S
    return response


def until_served(router: Router, fleet: Fleet) -> None:
    expected = fleet.decode.post("/v1/completions", BODY).json()["choices"][0]["text"]
    served = lambda: (found := ask(router)).status_code == 200 and found.json()["choices"][0]["text"] == expected  # noqa: E731
    wait_until(served, 90, f"{router.name} serves again\n{router.log}")


@pytest.mark.parametrize("kind", KINDS)
def test_refusals_overload_and_outages(fleet: Fleet, kind: str) -> None:
    with routed(kind, fleet.site) as router:
        for wrong in ({"min_p": 7.0}, {"prompt": "x " * 600}):
            assert ask(router, **wrong).status_code == REFUSED.get(kind, 400)
        with fleet.full():
            for stream, expected in ((False, OVERLOADED), (True, OVERLOADED_STREAM)):
                response = ask(router, stream=stream)
                assert response.status_code == expected.get(kind, 429), response.text
                assert kind in SILENT or "1 requests are open" in response.text
        fleet.site.quiet()
        with fleet.without_prefill():
            assert ask(router).status_code >= 500
            fleet.site.quiet()
        until_served(router, fleet)
        with fleet.without_decode():
            assert ask(router).status_code >= 500
            fleet.site.quiet()
        until_served(router, fleet)
        fleet.site.quiet()
