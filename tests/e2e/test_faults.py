"""Killed processes, cancelled clients, bad frames, signals: every request ends, nothing leaks, the next one works."""

import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pages_in_use, pair, running, serving, wait_until
from tests.e2e.models import NAME, SIZES, Model, both, stub

TOKENS = 6


STATEFUL = pytest.param(stub(1000, f"{SIZES},states=1"), id="stub-states", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=[*both(us_per_token=1000), STATEFUL])
def model(request: pytest.FixtureRequest) -> Model:
    made: Model = request.param
    return msgspec.structs.replace(made, flags=(*made.flags, "--chunk-tokens", "256"))


@pytest.fixture(scope="module")
def servers(model: Model) -> Iterator[tuple[Server, Server]]:
    """A pair for tests that leave it as it was."""
    with pair(model.flags, model.flags) as both:
        yield both


def body(prompt: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, **more}


def settled(server: Server) -> bool:
    """No page leased, no request queued, nothing wrong with the books."""
    values = server.metrics()
    queued = sum(value for name, value in values.items() if name.startswith("headrace_queue_requests"))
    return pages_in_use(server) == 0 and queued == 0 and values.get("headrace_integrity_errors", 0) == 0


@pytest.mark.full
def test_storm_of_cancelled_requests(model: Model) -> None:
    """200 concurrent requests of mixed length, a third cancelled at random points: all end, the rest are right."""
    random.seed(1)
    story = model.story()
    lengths = [random.choice((1, 5, 17, 33, 64, 120, 200)) for _ in range(200)]
    starts = [random.choice((0, 0, 1000, 2000)) for _ in range(200)]
    prompts = [story[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    cancelled = set(random.sample(range(200), 66))
    answers: dict[int, str] = {}
    limits = httpx.Limits(max_connections=256)

    def run(index: int, url: str) -> None:
        patience = random.uniform(0.02, 3.0) if index in cancelled else 300.0
        try:
            with httpx.Client(timeout=patience, limits=limits) as client:
                response = client.post(f"{url}/v1/completions", json=body(prompts[index]))
        except httpx.TimeoutException:
            assert index in cancelled
            return
        assert response.status_code == 200, response.text
        answers[index] = response.json()["choices"][0]["text"]

    with pair(model.flags, (*model.flags, "--page-size", "64", "--threads", "1")) as (prefill, decode):
        with ThreadPoolExecutor(200) as pool:
            list(pool.map(lambda index: run(index, decode.url), range(200)))
        for server in (prefill, decode):
            wait_until(lambda server=server: settled(server), 60, f"pools empty\n{server.log}")
    assert set(range(200)) - cancelled <= set(answers)
    for index, text in answers.items():
        assert text == model.greedy_text(prompts[index], TOKENS), index


@pytest.mark.full
@pytest.mark.parametrize("moment", ["bootstrap", "forward", "late"])
def test_decode_killed(model: Model, moment: str) -> None:
    """The prefill request fails in seconds, its pages come back, and the next decode server is served."""
    prompt = model.story()[:3000]
    prefill = Server("--role", "prefill", *model.flags)
    decode = Server("--role", "decode", "--prefill", prefill.url, *model.flags)
    with running(prefill):
        decode.started()
        errors: list[Exception] = []

        def ask() -> None:
            try:
                decode.post("/v1/completions", body(prompt))
            except httpx.TransportError as error:
                errors.append(error)

        client = threading.Thread(target=ask)
        client.start()
        if moment != "bootstrap":
            wait_until(lambda: pages_in_use(prefill) > 0, 20, "the prefill has begun")
        if moment == "late":
            wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 20, "pages are on their way")
        decode.kill()
        client.join(30)
        assert errors, "the client of a killed server sees its connection end"
        wait_until(lambda: settled(prefill), 30, f"pages back\n{prefill.log}")
        assert prefill.get("/ready").status_code == 200
        with serving("--role", "decode", "--prefill", prefill.url, *model.flags) as successor:
            answer = successor.post("/v1/completions", body(prompt[:500]))
            assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt[:500], TOKENS)


@pytest.mark.full
def test_prefill_killed_and_replaced(model: Model) -> None:
    """The decode request fails in seconds with 502 or 503; a new prefill server at the same address is found."""
    prompt = model.story()[:3000]
    port = free_port()
    prefill = Server("--role", "prefill", *model.flags, port=port)
    with serving("--role", "decode", "--prefill", prefill.url, *model.flags) as decode:
        prefill.started()
        results: list[httpx.Response] = []
        client = threading.Thread(target=lambda: results.append(decode.post("/v1/completions", body(prompt))))
        client.start()
        wait_until(lambda: pages_in_use(prefill) > 0, 20, "the prefill has begun")
        prefill.kill()
        killed = time.monotonic()
        client.join(20)
        assert results[0].status_code in (502, 503), results[0].text
        assert "error" in results[0].json()
        assert time.monotonic() - killed < 8
        wait_until(lambda: settled(decode), 30, f"pages back\n{decode.log}")
        wait_until(lambda: decode.get("/ready").status_code == 503, 10, "not ready without a prefill server")
        assert decode.post("/v1/completions", body(prompt[:20])).status_code == 503
        replacement = Server("--role", "prefill", *model.flags, port=port).started()
        wait_until(lambda: decode.get("/ready").status_code == 200, 20, "the replacement is found")
        answer = decode.post("/v1/completions", body(prompt[:500]))
        assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt[:500], TOKENS)
        assert replacement.end() == 0
        replacement.close()


def test_fallback_local_computes_when_no_prefill_answers(model: Model) -> None:
    with serving(
        "--role", "decode", "--prefill", f"http://127.0.0.1:{free_port()}", "--fallback", "local", *model.flags
    ) as decode:
        prompt = model.story()[:100]
        answer = decode.post("/v1/completions", body(prompt))
        assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt, TOKENS)


@pytest.mark.full
def test_stage_killed_fails_requests_and_comes_back(model: Model) -> None:
    prompt = model.story()[:3000]
    with serving("--role", "colocated", *model.flags) as server:
        results: list[httpx.Response] = []
        client = threading.Thread(target=lambda: results.append(server.post("/v1/completions", body(prompt))))
        client.start()
        wait_until(lambda: pages_in_use(server) > 0, 20, "the prefill has begun")
        server.child("headrace.engine.stage").kill()
        client.join(30)
        assert results[0].status_code == 503
        assert "stage 0" in results[0].json()["error"]["message"]
        assert server.get("/health").status_code == 200
        wait_until(lambda: server.get("/ready").status_code == 200, 60, "the stage is back")
        answer = server.post("/v1/completions", body(prompt[:100]))
        assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt[:100], TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains(model: Model, sig: int) -> None:
    """Not ready at once, work in flight finishes, exit 0, nothing left behind."""
    prompt = model.story()[:1500]
    server = Server("--role", "colocated", *model.flags).started()
    results: list[httpx.Response] = []
    client = threading.Thread(target=lambda: results.append(server.post("/v1/completions", body(prompt))))
    client.start()
    wait_until(lambda: pages_in_use(server) > 0, 20, "the prefill has begun")
    server.process.send_signal(sig)
    wait_until(lambda: server.get("/ready").status_code == 503, 1, "not ready at once")
    assert server.get("/health").status_code == 200
    assert server.post("/v1/completions", body(prompt[:5])).status_code == 503
    client.join(30)
    assert server.ended() == 0, server.log
    assert results[0].status_code == 200
    assert results[0].json()["choices"][0]["text"] == model.greedy_text(prompt, TOKENS)
    assert "Traceback" not in server.log
    server.close()


def test_first_token_that_ends_the_request_moves_no_pages(model: Model, servers: tuple[Server, Server]) -> None:
    """The first requests of these servers, which have sent nothing before."""
    prompt = model.story()[:400]
    prefill, decode = servers
    answer = decode.post("/v1/completions", body(prompt, max_tokens=1)).json()
    assert answer["choices"][0]["text"] == model.greedy_text(prompt, 1)
    assert answer["choices"][0]["finish_reason"] == "length"
    first = model.greedy(prompt[:100], 1)[0]
    answer = decode.post("/v1/completions", body(prompt[:100], stop_token_ids=[first])).json()
    assert answer["choices"][0] | {"finish_reason": "stop", "text": ""} == answer["choices"][0]
    assert prefill.total("headrace_bytes_sent_total") == 0
    for server in (prefill, decode):
        wait_until(lambda server=server: settled(server), 30, "pools empty")


def test_garbage_at_the_control_endpoint_and_data_sockets_disturbs_no_session(
    model: Model, servers: tuple[Server, Server]
) -> None:
    random.seed(2)
    prompt = model.story()[:600]
    prefill, decode = servers
    ports = re.findall(r"(?:control endpoint|data)\s+tcp://127.0.0.1:(\d+)", prefill.log)
    assert len(ports) == 2
    with zmq.Context() as context:
        for port in ports:
            with context.socket(zmq.DEALER) as raw:
                raw.linger = 0
                raw.connect(f"tcp://127.0.0.1:{port}")
                for size in (0, 1, 7, 300, 70_000):
                    raw.send_multipart([random.randbytes(size), random.randbytes(size)])
                    raw.send(random.randbytes(size))
                answer = decode.post("/v1/completions", body(prompt))
                assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt, TOKENS)
    malformed = sum(v for k, v in prefill.metrics().items() if k.startswith("headrace_malformed_frames_total"))
    assert malformed > 0
    wait_until(lambda: settled(prefill), 30, "pools empty")
