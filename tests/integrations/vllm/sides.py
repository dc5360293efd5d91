"""What a prefill server is asked for, and how a request to vLLM names it."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from benchmarks.vllm_server import Vllm
from tests.e2e import gold
from tests.e2e.harness import Server, wait_until

# For a vLLM that has neighbours. One thread: threads that wait for one another would wait for the neighbours, too. Half
# of the cores: while it waits it calls sched_yield() without a pause, and some versions of Linux then give it all cores
# that it may use, for seconds (docs/operations.md, "Neighbours that take all cores").
_CORES = sorted(os.sched_getaffinity(0))
BESIDE_OTHERS: dict[str, Any] = {
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    "cores": _CORES[: max(1, len(_CORES) // 2)],
}
LEASE_S = 6.0
FLAGS = ("--role", "prefill", "--dtype", "float32", "--max-model-len", "4096", "--threads", "1")
FLAGS = (*FLAGS, "--hold-lease", str(LEASE_S))


class Curve(NamedTuple):
    """flags: of a prefill server. config: kv_connector_extra_config of a vLLM that it allows."""

    flags: tuple[str, ...]
    config: dict[str, Any]


def prompt(length: int, at: int = 0) -> list[int]:
    return list(gold.story_ids()[at : at + length])


def named(server: Server, ticket: str, **more: Any) -> dict[str, Any]:
    """kv_transfer_params of a ticket."""
    control_port = server.get("/v1/handoff").json()["control_port"]
    return {
        "do_remote_prefill": True,
        "ticket": ticket,
        "remote_host": "127.0.0.1",
        "remote_port": control_port,
        **more,
    }


def post(server: Server, ticket: str, ids: list[int], **more: Any) -> httpx.Response:
    return server.post("/v1/prefill", {"prompt_token_ids": ids, "ticket": ticket, "temperature": 0, **more})


def hold(server: Server, ticket: str, ids: list[int]) -> dict[str, Any]:
    """kv_transfer_params of a prompt that is computed and held."""
    answer = post(server, ticket, ids, handoff="hold")
    assert answer.status_code == 200, answer.text
    return named(server, ticket)


@contextmanager
def loads(vllm: Vllm, tokens: int) -> Iterator[None]:
    """So many tokens come through the connector meanwhile."""
    before = vllm.loaded_tokens()
    yield
    if not tokens:
        time.sleep(0.5)  # the metric is behind by a step
    wait_until(lambda: vllm.loaded_tokens() - before >= tokens, 5, f"{tokens} tokens, {vllm.loaded_tokens() - before}")
    assert vllm.loaded_tokens() - before == tokens


@contextmanager
def says(vllm: Vllm, words: str) -> Iterator[None]:
    """vLLM logs these words meanwhile."""
    before = vllm.log.count(words)
    yield
    wait_until(lambda: vllm.log.count(words) > before, 5, f"{words!r} in the log:\n{vllm.log[-4000:]}")


@contextmanager
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def leave(url: str, body: dict[str, Any], when: threading.Event) -> None:
    """Post a body to /v1/completions, and hang up at that moment."""
    content = msgspec.json.encode(body)
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    head = "\r\n".join((*lines, "", ""))
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as connection:
        connection.sendall(head.encode() + content)
        when.wait(60)
