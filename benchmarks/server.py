"""The server under test, and the requests that benchmarks time."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.report import console
from headrace.server.launch.local_server import LocalServer

_PLAN_SECONDS = re.compile(r"^headrace_plan_duration_seconds_sum (\S+)$", re.MULTILINE)


@contextmanager
def serving(*flags: str, status: str = "starting a server") -> Iterator[LocalServer]:
    """A ready `headrace serve` with these flags for the length of a with block. Raises ServerFailed."""
    server = LocalServer(*flags)
    try:
        with console.status(status):
            server.wait_ready()
        yield server
    finally:
        server.end()
        server.close()


def prefill_body(ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Body of POST /v1/prefill for a prompt whose KV is sent to no peer; fields replace or extend it."""
    return {"prompt_token_ids": list(ids), "handoff": "none", "temperature": 0, "max_tokens": 1, **fields}


def prefill_seconds(server: LocalServer, ids: Sequence[int], **fields: Any) -> float:
    """Seconds from the request to the answer with the first token; the KV is sent to no peer."""
    body = prefill_body(ids, **fields)
    started = time.perf_counter()
    answer = server.request("POST", "/v1/prefill", body)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


def prefill_all_seconds(server: LocalServer, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from requesting all prompts at once to the last first token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda ids: prefill_seconds(server, ids), prompts))
    return time.perf_counter() - started


def first_event_ms(lines: Iterable[str], started: float) -> float:
    """Milliseconds from started to the first event of a token stream (server-sent events).

    The stream is read to its end, so that nothing of it runs into the next measurement.
    """
    first: float | None = None
    for line in lines:
        if line.startswith("data: {"):
            first = first or 1000 * (time.perf_counter() - started)
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
    assert first is not None, "the stream ended without a token"
    return first


def plan_seconds(server: LocalServer) -> float:
    """Seconds that the server's only stage has spent on plans so far, by its own clock."""
    match = _PLAN_SECONDS.search(server.request("GET", "/metrics").text)
    assert match is not None
    return float(match[1])
