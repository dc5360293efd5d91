"""Servers with data-parallel replicas: texts, handoff between replicas, and the death of one rank."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import NAME, both
from tests.e2e.test_pipeline import stages_of

FLAGS = ("--dp", "2", "--peer-timeout", "3", "--kv-pages", "1024", "--max-model-len", "2048")
[STUB] = [each.values[0] for each in both(us_per_token=20) if not each.marks]


def ask(server: Server, prompt: tuple[int, ...], **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"model": NAME, "prompt": prompt, "temperature": 0, **fields})


def orders(server: Server) -> float:
    """Orders to the replica that got fewer."""
    found = [value for name, value in server.metrics().items() if "stage_orders_total" in name]
    return min(found) if len(found) == 2 else 0


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_two_replicas_hand_over_to_two() -> None:
    """Each replica of the decode server is a peer of its own, and fetches from either replica of the prefill server,
    where no cached prefix draws all prompts to one."""
    with pair((*FLAGS, *STUB.flags, "--no-prefix-cache"), (*FLAGS, *STUB.flags)) as (prefill, decode):
        STUB.check(decode, (1, 16, 100, 333, 700, 701, 900, 1100), 12)
        story = STUB.story()
        for replica in (0, 1):
            prompt = story[replica * 50 : 400]
            assert text_of(ask(decode, prompt, max_tokens=5, data_parallel_rank=replica)) == STUB.greedy_text(prompt, 5)
            header = {"X-data-parallel-rank": str(replica)}
            body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 5}
            answer = httpx.post(f"{decode.url}/v1/completions", json=body, headers=header, timeout=30)
            assert text_of(answer) == STUB.greedy_text(prompt, 5)
        refused = ask(decode, story[:5], data_parallel_rank=2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")
        for server in (prefill, decode):
            wait_until(lambda server=server: orders(server) > 5, 10, "each replica has worked, as heartbeats say")
            wait_until(lambda server=server: pages_in_use(server) == 0, 5, "pages back")


def test_a_rank_that_is_killed_ends_all_and_all_come_back() -> None:
    prompt = STUB.story()[:1900]
    with serving("--role", "colocated", "--pp", "2", *FLAGS, *STUB.flags) as server:
        old = stages_of(server)
        assert len(old) == 4
        with ThreadPoolExecutor(4) as pool:
            load = [pool.submit(ask, server, prompt[first:], max_tokens=400) for first in range(4)]
            wait_until(lambda: pages_in_use(server) > 0, 20, "work in flight")
            old[3].send_signal(signal.SIGKILL)
            answers = [each.result() for each in load]
        for answer in answers:
            assert answer.status_code == 503
            assert "rank 3 (stage 1, replica 1, shard 0)" in answer.json()["error"]["message"], answer.text
        wait_until(lambda: server.get("/ready").status_code == 200, 60, f"back again\n{server.log}")
        assert not [process for process in old if process.is_running()]
        assert text_of(ask(server, prompt[:100], max_tokens=6)) == STUB.greedy_text(prompt[:100], 6)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()
