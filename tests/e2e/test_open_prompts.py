"""Open prompts at a real server: the same bits and the same text as of the prompt sent whole."""

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.core.types.kv.geometry import Geometry
from headrace.integrations.http_client import direct_client
from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import SIZES
from tests.e2e.peer import Peer, joined

FLAGS = (
    "--role", "prefill", "--dtype", "float32", "--chunk-tokens", "64", "--kv-pages", "256", "--max-model-len", "2048",
    "--peer-timeout", "60",
)  # fmt: skip
SMOLLM2 = Geometry("float32", layers=30, kv_heads=3, head_dim=64, page_size=16)
EXAMPLE = Path("examples/stream_document.py")
LENGTH, PIECES = 300, 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS) as made:
        yield made


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with direct_client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    with joined(server, SMOLLM2) as made:
        yield made


def ok(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def whole(http: httpx.Client, peer: Peer, ids: tuple[int, ...], salt: str) -> tuple[np.ndarray, Any]:
    """KV and first token of a prompt sent whole, under a salt of its own: nothing of it is cached."""
    body = {"prompt_token_ids": ids, "ticket": f"whole {salt}", "handoff": "hold", "temperature": 0, "cache_salt": salt}
    assert ok(http.post("/v1/prefill", json=body))["usage"]["cached_tokens"] == 0
    peer.reserve(f"whole {salt}", len(ids), wait=False)
    return peer.receive(len(ids))


def settled(http: httpx.Client, path: str) -> dict[str, Any]:
    """Its state when all of its stable pages are computed."""
    wait_until(lambda: (state := ok(http.get(path)))["stable"] - state["computed"] <= 16, 60, "it is computed")
    return ok(http.get(path))


def test_a_prompt_in_forty_pieces_has_the_bits_of_the_prompt_sent_whole(http: httpx.Client, peer: Peer) -> None:
    """One is cut within what was computed, and appended to again."""
    ids = gold.story_ids()[:LENGTH]
    kv, first = whole(http, peer, ids, "bits")
    rng = random.Random(37)
    cuts = [0, *sorted(rng.sample(range(1, LENGTH), PIECES - 1)), LENGTH]
    pieces = [list(ids[start:end]) for start, end in itertools.pairwise(cuts)]
    state = ok(http.post("/v1/prefill", json={"open": True, "prompt_token_ids": pieces[0], "cache_salt": "pieces"}))
    path, ticket = f"/v1/prefill/{state['id']}", state["ticket"]
    for number, piece in enumerate(pieces[1:], 1):
        if number == PIECES // 2:
            assert settled(http, path)["computed"] > 64
            ok(http.patch(path, json={"append": [7] * 100}))
            settled(http, path)
            ok(http.post(f"{path}/truncate", json={"tokens": cuts[number] - 40}))
            ok(http.patch(path, json={"append": list(ids[cuts[number] - 40 : cuts[number]])}))
        state = ok(http.patch(path, json={"append": piece}))
        time.sleep(rng.choice([0.0, 0.02]))
    assert state["tokens"] == LENGTH
    settled(http, path)
    answer = ok(http.post(f"{path}/commit", json={"handoff": "hold", "temperature": 0}))
    assert answer["ticket"] == ticket
    assert answer["usage"]["cached_tokens"] >= LENGTH - 32
    peer.reserve(ticket, LENGTH, wait=False)
    grown, grown_first = peer.receive(LENGTH)
    assert np.array_equal(grown, kv)
    assert grown_first.token == first.token == answer["first_token"]["id"]


def test_a_text_in_pieces_is_the_text_sent_whole(http: httpx.Client, server: Server) -> None:
    text = gold.tokenizer().decode(gold.story_ids()[:300]) + " naïve e\u0301 🙂\r\n 12345"
    common = {"handoff": "none", "temperature": 0, "logprobs": 5}
    expected = ok(http.post("/v1/prefill", json={"prompt": text, "cache_salt": "whole", **common}))
    rng, at = random.Random(5), 0
    path = ""
    while at < len(text):
        piece = text[at : at + rng.randrange(1, 90)]
        at += len(piece)
        if not path:
            path = f"/v1/prefill/{ok(http.post('/v1/prefill', json={'open': True, 'prompt': piece}))['id']}"
        else:
            ok(http.patch(path, json={"append": piece}))
    settled(http, path)
    answer = ok(http.post(f"{path}/commit", json=common))
    assert answer["first_token"] == expected["first_token"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["usage"]["cached_tokens"] > 200
    assert server.total("headrace_open_tokens_total") > 0


def test_a_long_pass_of_an_open_prompt_gives_way_to_others() -> None:
    """More than a second of computing is cancelled for a prompt of some milliseconds, and done afterwards."""
    slow = ("--model", "stub:layers=4,us_per_token=600", "--max-model-len", "4096", "--chunk-tokens", "2048")
    with serving("--role", "prefill", *slow) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"open": True, "prompt_token_ids": list(range(3, 203)) * 10}
        path = f"/v1/prefill/{ok(http.post('/v1/prefill', json=body))['id']}"
        wait_until(lambda: server.total("headrace_plans_total") > 0, 10, "a pass is under way")
        started = time.monotonic()
        ok(http.post("/v1/prefill", json={"prompt_token_ids": list(range(103, 123)), "handoff": "none"}))
        assert time.monotonic() - started < 0.8
        wait_until(lambda: server.metrics()['headrace_open_passes_total{end="cancelled"}'] == 1, 10, "it is counted")
        computed = settled(http, path)["computed"]
        assert server.total("headrace_open_tokens_total") == computed, "none of what was cancelled"
        answer = ok(http.post(f"{path}/commit", json={"handoff": "none"}))
        assert answer["usage"]["cached_tokens"] == computed


def test_the_example_streams_a_document(server: Server, tmp_path: Path) -> None:
    document = tmp_path / "report.txt"
    document.write_text(gold.tokenizer().decode(gold.story_ids()[:300]))
    command = [sys.executable, str(EXAMPLE), server.url, "Read this.", str(document), "--chars", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens computed" in done.stderr
    assert done.stdout.strip()


@pytest.mark.full
def test_a_chat_that_came_in_pieces_at_a_decode_server_is_the_chat_sent_whole() -> None:
    """The prefill server computes the pieces, and the answer has the text and the logprobs of the whole."""
    said = [
        {
            "role": ("user", "assistant")[n % 2],
            "content": gold.tokenizer().decode(gold.story_ids()[60 * n : 60 * n + 60]),
        }
        for n in range(7)
    ]
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--kv-pages", "256", "--chunk-tokens", "64")
    common = {"model": "smollm2", "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    with pair(flags, flags) as (prefill, decode), direct_client(base_url=decode.url, timeout=60) as http:
        path = "/v1/chat/completions"
        expected = ok(http.post(path, json={"messages": said, "cache_salt": "whole", **common}))
        name = ok(http.post(path, json={"messages": said[:1], "headrace": {"open": True}}))["id"]
        for message in said[1:-1]:
            ok(http.post(path, json={"messages": [message], "headrace": {"open": True, "open_id": name}}))
        wait_until(lambda: prefill.total("headrace_open_tokens_total") > 300, 60, "the prefill server has computed it")
        answer = ok(http.post(path, json={"messages": said[-1:], "headrace": {"open_id": name}, **common}))
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 250
        wait_until(lambda: prefill.total("headrace_open_prompts") == 0, 20, "the prefill server has it no more")


SIZED = ("--model", f"{SIZES},us_per_token=100", "--page-size", "32", "--kv-pages", "256", "--max-model-len", "4096")


@pytest.mark.full
def test_kv_of_an_open_prompt_is_at_the_decode_server_before_its_commit() -> None:
    """The commit fetches the rest, and the text is that of the prompt sent whole."""
    ids = [7 + index % 900 for index in range(1030)]
    common = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    fetched = 'headrace_prefix_fetches_total{result="fetched",source="open"}'
    tokens = 'headrace_prefix_fetched_tokens_total{source="open"}'
    with pair(SIZED, SIZED) as (prefill, decode), direct_client(base_url=decode.url, timeout=60) as http:
        path = "/v1/completions"
        expected = ok(http.post(path, json={"prompt": ids, "cache_salt": "whole", **common}))
        assert decode.metrics()[fetched] == 0
        assert expected["headrace"]["handoff"]["pages"] == 33
        name = ok(http.post(path, json={"prompt": ids[:300], "headrace": {"open": True}}))["id"]
        for start in range(300, 1000, 100):
            body = {"prompt": ids[start : start + 100], "headrace": {"open": True, "open_id": name}}
            ok(http.post(path, json=body))
        wait_until(lambda: decode.metrics()[tokens] == 992, 60, f"all whole pages have come\n{decode.log}")
        held = ok(http.post("/v1/prefixes", json={"prompt_token_ids": ids}))
        assert held["cached_tokens"] == 992
        assert 1 <= decode.metrics()[fetched] <= 10
        last = {"prompt": ids[1000:], "headrace": {"open_id": name}, **common}
        answer = ok(http.post(path, json=last))
        assert answer["headrace"]["handoff"]["pages"] == 2
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 992
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")  # type: ignore[misc]
        wait_until(lambda: prefill.total("headrace_open_prompts") == 0, 20, "the prefill server has it no more")
