"""Servers with a scheduler each that share experts: the texts of transformers, and the end of one of them."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.expert_models import FLAGS, TOKENS, Texts, text_after
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.strikes import ranks_of
from tests.e2e.texts import check_alone

pytestmark = pytest.mark.full  # each server loads torch three times
IDLE_S = 3.0
FAILS_S = 5.0  # within which requests in flight fail; beside it, what a request takes that is answered


Make = Callable[[int], Server]


def maker(experts: Path, size: int, *flags: str) -> Make:
    """Starts the servers of a group, by their ranks."""
    port = free_port()
    common = (
        "--model",
        str(experts),
        "--role",
        "colocated",
        "--expert-parallel",
        "--threads",
        "1",
        "--no-prefix-cache",
    )
    return lambda rank: Server(*common, *FLAGS, "--dp-external", f"{rank}/{size}@127.0.0.1:{port}", *flags)


@contextmanager
def group(make: Make, size: int) -> Iterator[list[Server]]:
    """All servers of a group, which must end cleanly. The last one ends first; the others then wait for it."""
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(make(rank))) for rank in range(size)]
        yield [stack.enter_context(running(server)) for server in servers]


def check_all(servers: list[Server], texts: Texts) -> None:
    """Each alone, while the others are idle; then all at once."""
    for server in servers:
        check_alone(server, texts, TOKENS)
    with ThreadPoolExecutor(len(servers) * len(texts)) as pool:
        asked = [
            (pool.submit(text_after, server, prompt), text) for server in servers for prompt, text in texts.items()
        ]
        assert [future.result() for future, _ in asked] == [text for _, text in asked]


def check_pages_back(servers: list[Server]) -> None:
    for server in servers:
        wait_until(lambda server=server: pages_in_use(server) == 0, 5, f"pages back\n{server.log}")


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(2, (), id="2 servers"),
        pytest.param(3, ("--exchange", "alltoall"), id="3 servers, alltoall"),
        pytest.param(2, ("--tp", "2"), id="2 servers, tp 2"),
    ],
)
def test_texts_are_those_of_transformers(experts: Path, expert_texts: Texts, size: int, flags: tuple[str, ...]) -> None:
    with group(maker(experts, size, *flags), size) as servers:
        check_all(servers, expert_texts)
        time.sleep(IDLE_S)  # votes without a token
        for server in servers[::-1]:
            check_alone(server, expert_texts, TOKENS)
        check_pages_back(servers)


def test_a_server_that_comes_late_is_waited_for(experts: Path, expert_texts: Texts) -> None:
    make = maker(experts, 2)
    with closing(make(1)) as second:
        wait_until(lambda: "waiting for server 0" in second.log, 60, f"it says what it waits for\n{second.log}")
        assert second.request("GET", "/ready").status_code == 503
        with running(make(0)) as first, running(second):
            check_all([first, second], expert_texts)


def in_flight(server: Server, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A request that is being decoded, and would be for long."""
    body = {"model": "experts", "prompt": [1, 2, 3], "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    answer = pool.submit(server.post, "/v1/completions", body)
    wait_until(lambda: pages_in_use(server) > 0, 20, "work in flight")
    return answer


def failed_with(answer: Future[httpx.Response], killed_at: float) -> str:
    """The message of a request that has failed in time."""
    response = answer.result(timeout=60)
    assert time.monotonic() - killed_at < FAILS_S
    assert response.status_code == 503, response.text
    error: dict[str, Any] = response.json()["error"]
    return str(error["message"])


def test_a_rank_that_is_killed_ends_the_group_and_all_servers_meet_again(experts: Path, expert_texts: Texts) -> None:
    with group(maker(experts, 2), 2) as servers, ThreadPoolExecutor(2) as pool:
        for killed in (1, 0):  # 0 serves the store
            answers = [in_flight(server, pool) for server in servers]
            old = [ranks_of(server)[0] for server in servers]
            old[killed].send_signal(signal.SIGKILL)
            at = time.monotonic()
            messages = [failed_with(answer, at) for answer in answers]
            assert "exited with status -9" in messages[killed]
            assert f"server {killed} of --dp-external {1 - killed}/2@" in messages[1 - killed]
            for server in servers:
                wait_until(lambda server=server: server.get("/ready").status_code == 200, 90, f"back\n{server.log}")
            assert not [process for process in old if process.is_running()]
            check_all(servers, expert_texts)
            check_pages_back(servers)
        for server in servers:
            server.started()  # nothing of the earlier ranks may stay behind


def test_a_server_that_is_killed_comes_back(experts: Path, expert_texts: Texts) -> None:
    """The other one fails what it has in flight, and is not ready until then. It is idle when that happens again."""
    make = maker(experts, 2)
    with closing(make(0)) as first, closing(make(1)) as second, running(first):
        second.started()
        with ThreadPoolExecutor(1) as pool:
            answer = in_flight(first, pool)
            second.kill()
            assert "server 1 of --dp-external 0/2@" in failed_with(answer, time.monotonic())
        wait_until(lambda: first.get("/ready").status_code == 503, 5, "not ready without the other")
        check_pages_back([first])
        with running(make(1)) as again:
            wait_until(lambda: first.get("/ready").status_code == 200, 90, f"back\n{first.log}")
            check_all([first, again], expert_texts)
        # It has ended in order while this one was idle.
        wait_until(lambda: first.get("/ready").status_code == 503, 10, "a vote finds out that the other has ended")
        with running(make(1)) as third:
            wait_until(lambda: first.get("/ready").status_code == 200, 90, f"back\n{first.log}")
            check_all([first, third], expert_texts)


def test_a_server_that_does_not_fit_is_refused_by_name(experts: Path, expert_texts: Texts) -> None:
    """The others wait for the right one."""
    make = maker(experts, 2)
    with closing(make(0)) as first, closing(make(1)) as second:
        member = second.process.args[-1]  # type: ignore[index]  # --dp-external is the last flag
        second.kill()
        other = ("--model", str(experts), "--role", "colocated", "--expert-parallel", "--threads", "1", *FLAGS)
        with closing(Server(*other, "--page-size", "32", "--dp-external", str(member))) as refused:
            assert refused.ended() == 2
            assert "server 1 does not fit server 0: --page-size is 32 here and 16 there" in refused.log
        with closing(Server(*other, "--dp-external", str(member))) as fitting, running(first), running(fitting):
            check_all([first, fitting], expert_texts)
