"""A stock vLLM takes its prompts' KV from a real prefill server: make test-vllm.

float32, greedy: what vLLM says with a ticket is what it says alone, and its own metric tells whether the KV came from
here. Tests that let something fail look at both sides afterwards: vLLM is alive and idle, and the prefill server has
its pages back.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from benchmarks.vllm_server import Vllm, export_smollm2, serving_vllm, takes_from_headrace
from core.arrays import pack, prompt_hash
from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, serving, wait_until

pytestmark = pytest.mark.vllm

LEASE_S = 6.0
FLAGS = ("--role", "prefill", "--dtype", "float32", "--max-model-len", "4096", "--hold-lease", str(LEASE_S))
VLLM_FLAGS = ("--max-num-seqs", "4", "--middleware", "headrace_vllm.middleware.BootstrapNames")
LENGTHS = (1, 7, 127, 128, 129, 256, 300, 2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder that vLLM reads: the same weights as the prefill server's GGUF file."""
    return export_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def prefill() -> Iterator[Server]:
    with serving(*FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def vllm(model: Path) -> Iterator[Vllm]:
    with serving_vllm(model, takes_from_headrace(), *VLLM_FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def strict(model: Path) -> Iterator[Vllm]:
    """Fails what cannot be loaded, and compares no prompts."""
    transfer = takes_from_headrace("unchecked:UncheckedConnector", policy="fail")
    with serving_vllm(model, transfer, modules=Path(__file__).parent / "in_vllm") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_leaks(prefill: Server) -> Iterator[None]:
    yield
    wait_until(lambda: pages_in_use(prefill) == 0, 20, f"pages of the prefill server are back\n{prefill.log}")


@pytest.fixture(autouse=True)
def vllm_is_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"vllm", "strict"} & set(request.fixturenames):
        server: Vllm = request.getfixturevalue(name)
        wait_until(server.idle, 20, f"vLLM has nothing open\n{server.log[-4000:]}")


def prompt(length: int, at: int = 0) -> list[int]:
    return list(gold.story_ids()[at : at + length])


def place(server: Server) -> dict[str, Any]:
    return {"remote_host": "127.0.0.1", "remote_port": server.get("/v1/handoff").json()["desk_port"]}


def named(server: Server, ticket: str, **more: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "ticket": ticket, **place(server), **more}


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
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("length", LENGTHS)
def test_a_held_ticket_gives_the_text_that_vllm_says_alone(vllm: Vllm, prefill: Server, length: int) -> None:
    ids = prompt(length)
    params = hold(prefill, f"held-{length}", ids)
    with loads(vllm, length if length > 1 else 0):  # a sole token is computed again for its logits, and so counted
        text = vllm.text(ids, params)
    assert text == vllm.alone(ids)


def test_a_pushed_ticket_may_be_asked_for_before_its_prompt_comes(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(700, at=50)
    with background() as pool, loads(vllm, len(ids)):
        asked = pool.submit(vllm.text, ids, named(prefill, "pushed"))
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 1, 10, "vLLM has reserved")
        pushed = post(prefill, "pushed", ids)
        assert pushed.status_code == 200, pushed.text
        text = asked.result()
    assert text == vllm.alone(ids)


def test_what_vllm_has_cached_is_not_sent(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=100)
    vllm.text(ids[:256], cache_salt="shared")
    params = hold(prefill, "rest", ids)
    with loads(vllm, 300 - 256):
        text = vllm.text(ids, params, cache_salt="shared")
    assert text == vllm.alone(ids)


def test_what_was_loaded_serves_later_requests_from_the_cache(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=150)
    with loads(vllm, 300):
        first = vllm.text(ids, hold(prefill, "seed", ids), cache_salt="seed")
    with loads(vllm, 0):
        assert vllm.text(ids, cache_salt="seed") == first == vllm.alone(ids)


def test_a_list_of_prompts_finds_its_tickets_by_their_hashes(vllm: Vllm, prefill: Server) -> None:
    prompts = [prompt(200), prompt(90, at=7)]
    for number, ids in enumerate(prompts):
        hold(prefill, f"list/{number}", ids)
    params = named(
        prefill,
        "list/0",
        tickets=["list/0", "list/1"],
        prompt_hashes=[prompt_hash(pack(ids)) for ids in prompts],
        remote_num_tokens=[len(ids) for ids in prompts],
    )
    with loads(vllm, 290):
        answer = vllm.complete(prompts, params)  # type: ignore[arg-type]
    assert [choice["text"] for choice in answer.json()["choices"]] == [vllm.alone(ids) for ids in prompts]


def test_several_samples_of_a_prompt_load_it_once(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(256, at=11)
    params = hold(prefill, "samples", ids)
    with loads(vllm, 256):
        answer = vllm.complete(ids, params, n=3, temperature=0.8, cache_salt="samples")
    assert len(answer.json()["choices"]) == 3


def test_sglangs_names_through_the_middleware(vllm: Vllm, prefill: Server) -> None:
    ids = prompt(300, at=30)
    names = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": 77}
    with background() as pool, loads(vllm, 300):
        asked = pool.submit(vllm.text, ids, **names)
        assert post(prefill, "room:77", ids).status_code == 200
        text = asked.result()
    assert text == vllm.alone(ids) == vllm.text(ids, bootstrap_host="2.2.2.2", bootstrap_room=1)
    refused = vllm.complete(ids, bootstrap_host=["a", "b"], bootstrap_room=[1, 2])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_room")


@pytest.mark.parametrize("length", [7, 128, 300])
def test_kv_of_another_prompt_changes_the_text(strict: Vllm, prefill: Server, length: int) -> None:
    """So what is loaded is what is used."""
    ids, other = prompt(length), prompt(length, at=1000)
    params = hold(prefill, f"other-{length}", other)
    with loads(strict, length):
        text = strict.text(ids, params)
    assert text != strict.alone(ids)


@pytest.mark.parametrize("length", [1, 128, 300])
def test_kv_of_another_prompt_is_refused(vllm: Vllm, prefill: Server, length: int) -> None:
    ids, other = prompt(length), prompt(length, at=1000)
    params = hold(prefill, f"refused-{length}", other)
    with loads(vllm, 0):
        assert vllm.text(ids, params) == vllm.alone(ids)
    assert "another prompt" in vllm.log or "hash" in vllm.log


@pytest.mark.parametrize("more", [
    {"remote_num_tokens": 41}, {"prompt_hashes": ["0" * 64]}, {"fingerprint": "another"}, {"ticket": 7},
    {"ticket": "unknown", "wait": False}, {"remote_host": "10.1.2.3"}, {"remote_port": 1}, {"remote_port": None},
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_computed_here(vllm: Vllm, prefill: Server, more: dict[str, Any]) -> None:
    ids = prompt(40, at=60)
    params = hold(prefill, f"unfit-{time.monotonic_ns()}", ids) | more
    with loads(vllm, 0):
        assert vllm.text(ids, params) == vllm.alone(ids)


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--model", "stand-in")], ids=str)
def test_another_model_or_dtype_is_refused_at_hello(vllm: Vllm, flags: tuple[str, str]) -> None:
    ids = prompt(128, at=70)
    with serving(*dict.fromkeys(FLAGS[:2]), *flags) as other, loads(vllm, 0):
        params = hold(other, "t", [1] * 128)
        begin = time.monotonic()
        assert vllm.text(ids, params) == vllm.alone(ids)
        assert time.monotonic() - begin < 30
    assert f"{'dtype' if flags[0] == '--dtype' else 'fingerprint'}_mismatch" in vllm.log


def test_a_lease_that_has_ended(vllm: Vllm, strict: Vllm, prefill: Server) -> None:
    """recompute: the same text. fail: HTTP 500."""
    ids = prompt(256, at=80)
    params = [hold(prefill, name, ids) for name in ("late-1", "late-2")]
    time.sleep(LEASE_S + 0.5)
    with loads(vllm, 0):
        assert vllm.text(ids, params[0]) == vllm.alone(ids)
    assert "lease_expired" in vllm.log
    assert strict.complete(ids, params[1]).status_code == 500
    assert "lease_expired" in strict.log
    assert strict.text(ids) == vllm.alone(ids)


def test_the_prefill_server_dies_in_the_middle(vllm: Vllm, strict: Vllm) -> None:
    """recompute: the same text. fail: HTTP 500, and the next request is served."""
    ids = prompt(2000, at=90)
    plain = vllm.alone(ids)
    for server in (vllm, strict):
        victim = Server(*FLAGS, "--chunk-tokens", "128").started()
        with background() as pool:
            asked = pool.submit(server.complete, ids, named(victim, "doomed"))
            pool.submit(_posted, victim, ids)
            wait_until(lambda: victim.metrics()["headrace_chunks_sent_total"] > 1, 30, "some of it has come")  # noqa: B023
            victim.kill()
            answer = asked.result()
        if server is vllm:
            assert answer.json()["choices"][0]["text"] == plain
        else:
            assert answer.status_code == 500
        assert "peer_gone" in server.log
    assert strict.text(ids) == plain


def _posted(server: Server, ids: list[int]) -> None:
    with contextlib.suppress(httpx.TransportError):  # it was killed
        post(server, "doomed", ids)


@pytest.mark.parametrize("computing", [False, True], ids=["waiting", "computing"])
def test_the_client_leaves_in_the_middle(vllm: Vllm, prefill: Server, computing: bool) -> None:
    ids = prompt(2000, at=200)
    ticket = f"left-{computing}"
    pushed: Future[httpx.Response] | None = None
    with background() as pool:
        stream = threading.Event()
        leaving = pool.submit(_leave, vllm, ids, named(prefill, ticket), stream)
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 1, 10, "vLLM has reserved")
        if computing:
            pushed = pool.submit(post, prefill, ticket, ids)
            before = prefill.metrics()["headrace_chunks_sent_total"]
            wait_until(lambda: prefill.metrics()["headrace_chunks_sent_total"] > before, 30, "some of it has come")
        stream.set()
        leaving.result()
        wait_until(lambda: prefill.metrics()["headrace_reservations_waiting"] == 0, 5, "the reservation is gone")
        if pushed is not None:
            assert pushed.result().status_code == 499, pushed.result().text
    wait_until(vllm.idle, 10, "vLLM has let go")
    short = prompt(60, at=200)
    assert vllm.text(short) == gold.tokenizer().decode(gold.greedy(tuple(short), 12))


def _leave(vllm: Vllm, ids: list[int], params: dict[str, Any], when: threading.Event) -> None:
    """Ask, and hang up at that moment."""
    body = msgspec.json.encode(
        {"model": "smollm2", "prompt": ids, "temperature": 0, "max_tokens": 8, "kv_transfer_params": params}
    )
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    head = "\r\n".join((*lines, "", ""))
    with socket.create_connection(("127.0.0.1", urlsplit(vllm.url).port or 0)) as connection:
        connection.sendall(head.encode() + body)
        when.wait(60)


def test_a_waiting_request_keeps_its_lease(vllm: Vllm, prefill: Server) -> None:
    """More than one lease passes before vLLM has room for it."""
    ids = prompt(300, at=300)
    with background() as pool, loads(vllm, 300):
        busy = [pool.submit(vllm.complete, prompt(100, at=at), max_tokens=300) for at in range(4)]
        wait_until(lambda: vllm.metric("vllm:num_requests_running") == 4, 20, "no request of vLLM's is free")
        params = hold(prefill, "patient", ids)
        begin = time.monotonic()
        text = vllm.text(ids, params)
        waited = time.monotonic() - begin
        for one in busy:
            assert one.result().status_code == 200
    assert waited > LEASE_S, "or the test shows nothing"
    assert text == vllm.alone(ids)
