"""One search finds a request in the logs of both servers: X-Request-Id and traceparent cross from decode to prefill."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.harness import Server, pair, wait_until

MODEL = ("--model", "stub:layers=4,hidden=32", "--max-model-len", "30000")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with pair(MODEL, MODEL) as both:
        yield both


def lines(server: Server, request_id: str) -> list[str]:
    wait_until(lambda: f"request id={request_id} " in server.log, 10, f"{request_id} is logged")
    return [line for line in server.log.splitlines() if f"request id={request_id} " in line]


@pytest.mark.parametrize(
    ("request_id", "body", "ends"),
    [
        ("goes-well", {"prompt": "hello", "max_tokens": 4}, ("handed_over", "length")),
        ("streams", {"prompt": "hello again", "max_tokens": 4, "stream": True}, ("handed_over", "length")),
        ("too-late", {"prompt": "late " * 5000, "deadline_s": 0.4}, ("cancelled|disconnected", "deadline_exceeded")),
    ],
)
def test_both_logs_have_both_ids(
    servers: tuple[Server, Server], request_id: str, body: dict[str, object], ends: tuple[str, str]
) -> None:
    prefill, decode = servers
    headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    answer = httpx.post(f"{decode.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.headers["x-request-id"] == request_id
    (there,), (here,) = (lines(server, request_id) for server in servers)
    for line, end, peer in ((there, ends[0], "peer="), (here, ends[1], f"peer={prefill.url}")):
        assert f" trace={TRACE} " in line
        assert re.search(rf" outcome=({end}) ", line)
        assert (peer in line) == (answer.status_code == 200)
    rids = {part for line in (there, here) for part in line.split() if part.startswith("rid=")}
    assert len(rids) == 1
