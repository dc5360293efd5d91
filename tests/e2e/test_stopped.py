"""Processes that are stopped (SIGSTOP) and go on, on live servers: within the bounds every request waits and ends well;
beyond them the stopped one counts as dead. A killed one is known at once."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import StubOracle
from tests.e2e.strikes import come_back, ranks_of

SIZES = "stub:layers=4,hidden=64"
PROMPT = "All rivers run to the sea. " * 20
TOKENS = 40
PEER_S, STAGE_S = 1.0, 6.0
FLAGS = (
    "--model", f"{SIZES},us_per_token=2000", "--chunk-tokens", "64", "--max-model-len", "2000",
    "--peer-timeout", f"{PEER_S:g}", "--stage-timeout", f"{STAGE_S:g}",
)  # fmt: skip
SOON_S = 2.0
SCHEDULER = "headrace.server.launch.scheduler_process"
SALTS = count()


@pytest.fixture(scope="module")
def text() -> str:
    return StubOracle(SIZES, 2000).greedy_text(list(PROMPT.encode()), TOKENS)


def body() -> dict[str, Any]:
    """A request that finds nothing of those before in the prefix cache."""
    return {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "cache_salt": f"{next(SALTS)}"}


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def asked(pool: ThreadPoolExecutor, server: Server) -> "Future[httpx.Response]":
    """A request that is being computed."""
    answer = pool.submit(server.post, "/v1/completions", body())
    wait_until(lambda: pages_in_use(server) > 0, 20, "work in flight")
    return answer


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["text"]
    assert isinstance(found, str)
    return found


def reason(server: Server) -> str:
    """Why it is not ready; "" if it is."""
    answer = server.get("/ready")
    return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])


@pytest.mark.full
def test_whichever_process_is_stopped_for_a_while_no_request_fails(text: str) -> None:
    """Each for longer than --peer-timeout, which is what a silence was measured by before."""
    with serving("--role", "colocated", "--pp", "2", *FLAGS) as server, ThreadPoolExecutor(1) as pool:
        victims = [*ranks_of(server), server.child(SCHEDULER), psutil.Process(server.process.pid)]
        names = ("stage 0 is stopped (SIGSTOP)", "stage 1 is stopped (SIGSTOP)", "the scheduler is stopped (SIGSTOP)")
        for victim, name in zip(victims, (*names, ""), strict=True):
            answer = asked(pool, server)
            with stopped(victim):
                if name:
                    wait_until(lambda name=name: reason(server).startswith(name), 20, f"{name}\n{server.log}")
                    assert server.get("/health").status_code == 200
                time.sleep(2 * PEER_S)
            assert text_of(answer.result()) == text
            wait_until(lambda: reason(server) == "", 10, f"ready again\n{server.log}")
        assert ranks_of(server) == victims[:2], "none was started again"
        assert server.total("headrace_stage_silences_total") == 2
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
def test_a_stage_that_is_stopped_for_longer_than_its_bound_is_started_again(text: str) -> None:
    with serving("--role", "colocated", "--pp", "2", *FLAGS) as server, ThreadPoolExecutor(1) as pool:
        for rank in (0, 1):
            old = ranks_of(server)
            answer = asked(pool, server)
            began = time.monotonic()
            old[rank].send_signal(signal.SIGSTOP)
            failed = answer.result()
            assert failed.status_code == 503, failed.text
            assert f"stage {rank} failed: stage {rank} is stopped (SIGSTOP) for " in failed.text
            assert STAGE_S - 1 < time.monotonic() - began < STAGE_S + 10
            come_back(server, old)
            assert text_of(server.post("/v1/completions", body())) == text
        server.started()


@pytest.mark.full
def test_a_killed_process_is_known_at_once() -> None:
    with closing(Server("--role", "colocated", "--pp", "2", *FLAGS)) as server, ThreadPoolExecutor(1) as pool:
        server.started()
        for rank in (0, 1):
            old = ranks_of(server)
            answer = asked(pool, server)
            old[rank].kill()
            killed = time.monotonic()
            assert answer.result().status_code == 503
            assert time.monotonic() - killed < SOON_S
            come_back(server, old)
        server.started()
        server.child(SCHEDULER).kill()
        killed = time.monotonic()
        assert server.ended() == 1, "a server without a scheduler ends"
        assert time.monotonic() - killed < SOON_S


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "stages", "status"),
    [
        pytest.param(8, 1, 200, id="a long pass"),
        pytest.param(16, 2, 200, id="a long pass of a stage for which another one waits"),
        pytest.param(1, 1, 503, id="a hang"),
    ],
)
def test_a_pass_that_comes_on_may_take_longer_than_the_bound(layers: int, stages: int, status: int) -> None:
    """Four seconds of one forward pass: in steps of half a second, or in one during which nothing is done."""
    flags = ("--stage-timeout", "2", "--peer-timeout", "1", "--max-model-len", "500")
    stub = f"stub:layers={layers},us_per_plan={4000000 * stages}"
    with serving("--role", "colocated", "--model", stub, "--pp", f"{stages}", *flags) as server:
        answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0})
        assert answer.status_code == status, answer.text
        assert status == 200 or "stage 0 has not finished a plan in 2 s" in answer.text
        if status == 503:
            wait_until(lambda: server.get("/ready").status_code == 200, 60, "back again")
            server.started()


@pytest.mark.full
def test_processes_of_a_pair_are_stopped_for_a_while(text: str) -> None:
    """Schedulers for less than --peer-timeout, which is what their peers measure; everything else for longer."""
    flags = (*FLAGS[:-4], "--peer-timeout", "3", "--stage-timeout", "20")
    with pair(flags, flags) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        for server in (prefill, decode):
            stage, scheduler = ranks_of(server)[0], server.child(SCHEDULER)
            for victim, seconds in ((stage, 5.0), (psutil.Process(server.process.pid), 5.0), (scheduler, 1.5)):
                answer = pool.submit(decode.post, "/v1/completions", body())
                wait_until(lambda: pages_in_use(prefill) + pages_in_use(decode) > 0, 20, "work in flight")
                with stopped(victim):
                    time.sleep(seconds)
                assert text_of(answer.result()) == text, f"{victim}\n{prefill.log}\n{decode.log}"
            assert server.child(SCHEDULER) == scheduler
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages back")
            assert server.total("headrace_peers_gone_total") == 0


@pytest.mark.full
def test_a_peer_that_is_stopped_for_longer_than_its_bound_is_gone_and_comes_back(text: str) -> None:
    """The prefill server's scheduler is judged by its decode peer, and judges no peer when it wakes up."""
    flags = (*FLAGS[:-4], "--peer-timeout", "2", "--stage-timeout", "20")
    with pair(flags, flags) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode.post, "/v1/completions", body())
        wait_until(lambda: pages_in_use(decode) > 0, 20, "work in flight")
        began = time.monotonic()
        with stopped(prefill.child(SCHEDULER)):
            assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (504, "peer_gone")
            assert time.monotonic() - began < 2 + 3
        wait_until(lambda: decode.get("/ready").status_code == 200, 20, f"a session again\n{decode.log}")
        assert text_of(decode.post("/v1/completions", body())) == text
        assert prefill.total("headrace_scheduler_paused_seconds_total") > 1
