"""Servers with data-parallel replicas: texts, handoff between replicas, and deaths of ranks."""

import signal
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import NAME, both
from tests.e2e.strikes import come_back, ranks_of, strike
from tests.e2e.texts import text_of

FULL = pytest.mark.full
FLAGS = ("--dp", "2", "--peer-timeout", "3", "--kv-pages", "1024", "--max-model-len", "2048")
[STUB] = [each.values[0] for each in both(us_per_token=20) if not each.marks]


def ask(server: Server, prompt: tuple[int, ...], **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"model": NAME, "prompt": prompt, "temperature": 0, **fields})


def orders(server: Server) -> float:
    """Orders to the replica that got fewer."""
    found = [value for name, value in server.metrics().items() if "stage_orders_total" in name]
    return min(found) if len(found) == 2 else 0


@pytest.mark.full
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


@FULL
@pytest.mark.parametrize(
    ("number", "rank", "pinned"),
    [
        pytest.param(signal.SIGKILL, 3, {}, id="killed"),
        pytest.param(signal.SIGSTOP, 3, {}, id="stopped"),
        pytest.param(signal.SIGKILL, 1, {"data_parallel_rank": 0}, id="killed, of the idle replica"),
        pytest.param(signal.SIGSTOP, 1, {"data_parallel_rank": 0}, id="stopped, of the idle replica"),
    ],
)
def test_death_and_silence_of_a_rank(number: int, rank: int, pinned: dict[str, int]) -> None:
    """It ends the requests of all replicas, also when it had none itself; all ranks come back."""
    prompt = STUB.story()[:900]
    body = {"model": NAME, "temperature": 0, "max_tokens": 1100, **pinned}  # longer than the stage timeout
    with serving("--role", "colocated", "--pp", "2", "--stage-timeout", "4", *FLAGS, *STUB.flags) as server:
        old = ranks_of(server)
        assert len(old) == 4
        name = f"rank {rank} (stage {rank // 2}, replica {rank % 2}, shard 0)"
        bodies = [{**body, "prompt": prompt[first:]} for first in range(4)]
        strike(server, bodies, lambda: old[rank].send_signal(number), name)
        come_back(server, old)
        assert text_of(ask(server, prompt[:100], max_tokens=6)) == STUB.greedy_text(prompt[:100], 6)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()
