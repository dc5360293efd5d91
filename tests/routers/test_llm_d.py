"""A pair in an llm-d fleet: what its sidecar and its coordinator send, replayed against real servers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, running, serving, wait_until
from tests.routers.llm_d import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    PREFILLER,
    RECORDED,
    WITH_IMAGE,
    Body,
    Coordinator,
    Recorded,
    Sidecar,
)

VOCAB = 40_000  # the recorded prompts have ids of a large vocabulary
STUB = ("--model", f"stub:layers=2,hidden=16,vocab={VOCAB}", "--max-model-len", "256", "--kv-pages", "128",
        "--served-model-name", "tested", "--metrics-names", "vllm")  # fmt: skip
GREEDY = {"temperature": 0}
LONG = {"model": "tested", "prompt": "Where does the water of a mill come from, and where does it go? " * 2,
        "max_tokens": 12, **GREEDY}  # fmt: skip


class Pod:
    """A prefill server, and a decode server with no prefill server of its own, as in a pod with the sidecar."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode
        self.prefiller = prefill.url.removeprefix("http://")

    def sidecar(self, **more: Any) -> Sidecar:
        return Sidecar(self.decode.url, (self.prefiller,), **more)

    def quiet(self) -> None:
        for server in (self.prefill, self.decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")


def decode_flags(*allowed: str) -> tuple[str, ...]:
    return ("--role", "decode", *(flag for each in allowed for flag in ("--allow-prefill", each)), *STUB)


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    prefill = Server("--role", "prefill", *STUB)
    decode = Server(*decode_flags("127.0.0.1"), "--fallback", "local")
    with running(prefill), running(decode):
        yield Pod(prefill, decode)


def said(path: str, response: httpx.Response) -> Any:
    """What was generated, of a whole response or of a stream."""
    assert response.status_code == 200, response.text
    if "event-stream" in response.headers["content-type"]:
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        return "".join(each["delta"].get("content", "") for chunk in chunks for each in chunk["choices"])
    answer = response.json()
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["token_ids"] if path == GENERATE else choice.get("text") or choice["message"]["content"]


def greedy(recorded: Recorded) -> Body:
    """So that two servers, and two ways, give the same."""
    if recorded.path == GENERATE and recorded.body.get("sampling_params"):
        return {**recorded.body, "sampling_params": {**recorded.body["sampling_params"], **GREEDY}}
    return recorded.body if recorded.path == GENERATE else {**recorded.body, **GREEDY}


def ids(recorded: Recorded) -> str:
    return recorded.origin.rpartition("/")[2]


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_the_sidecar_gets_what_the_decode_server_gives_alone(pod: Pod, recorded: Recorded) -> None:
    body = greedy(recorded)
    if "temperature" not in str(body):  # the body that has no place for it: its length is all there is to compare
        body = {**body, "sampling_params": {**GREEDY, "max_tokens": 30}}
    alone = said(recorded.path, httpx.post(f"{pod.decode.url}{recorded.path}", json=body, timeout=60))
    handed = pod.decode.total("headrace_bytes_received_total")
    assert said(recorded.path, pod.sidecar().post(recorded.path, body, {PREFILLER: pod.prefiller})) == alone
    received = lambda: pod.decode.total("headrace_bytes_received_total") > handed  # noqa: E731
    wait_until(received, 10, "the KV came from the prefill server")  # stages report now and then
    pod.quiet()


@pytest.mark.full
@pytest.mark.parametrize("recorded", [each for each in RECORDED if each.path != "/v1/responses"], ids=ids)
def test_the_coordinator_gets_it_too(pod: Pod, recorded: Recorded) -> None:
    """Whether the conditional decode is served or answered with 412 is the prompt's to decide: these are short."""
    body = greedy(recorded)
    if "temperature" not in str(body):
        body = {**body, "sampling_params": {**GREEDY, "max_tokens": 30}}
    coordinator = Coordinator(pod.prefill.url, pod.prefill.url, pod.decode.url)
    alone = said(recorded.path, httpx.post(f"{pod.decode.url}{recorded.path}", json=body, timeout=60))
    assert said(recorded.path, coordinator.post(recorded.path, body)) == alone
    pod.quiet()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_a_prompt_that_is_not_cached_is_answered_with_412_until_it_is(pod: Pod, path: str) -> None:
    """The coordinator then has a prefill server compute it. Once the decode server has it, it goes on by itself."""
    text = f"{path}: {LONG['prompt']}"
    body: Body = {"model": "tested", "max_tokens": 12, **GREEDY, "prompt": text}
    if path == CHAT:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": text}]
    if path == GENERATE:
        tokens = pod.decode.post("/tokenize", {"prompt": text}).json()["tokens"]
        body = {"model": "tested", "token_ids": tokens, "sampling_params": {**GREEDY, "max_tokens": 12}}
    legs: list[list[tuple[str, int]]] = []
    texts = []
    for _ in range(2):
        coordinator = Coordinator(pod.prefill.url, pod.prefill.url, pod.decode.url)
        texts.append(said(path, coordinator.post(path, body)))
        legs.append([leg for leg in coordinator.legs if leg[0] != "render"])
    assert legs == [
        [("conditional-decode", 412), ("prefill", 200), ("decode", 200)],
        [("conditional-decode", 200)],
    ]
    assert texts[0] == texts[1]
    other = {**LONG, "cache_salt": path}
    refused = httpx.post(f"{pod.decode.url}{COMPLETIONS}", json=other, headers={"Prefer": "a, IF-Available;x=1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (412, "prefill_needed")
    plain = httpx.post(f"{pod.decode.url}{COMPLETIONS}", json=other)
    assert plain.status_code == 200, "without the header it is computed here, by --fallback local"
    pod.quiet()


def test_images_of_a_text_model_are_refused_by_name(pod: Pod) -> None:
    for server in (pod.prefill, pod.decode):
        response = server.post(WITH_IMAGE.path, WITH_IMAGE.body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "features")


def test_without_a_sidecar_the_header_names_the_prefill_server(pod: Pod) -> None:
    """The decode server has it compute the prompt; of several it takes the first, of others none."""
    alone = said(COMPLETIONS, pod.decode.post(COMPLETIONS, LONG))

    def ask(named: str) -> httpx.Response:
        body = {**LONG, "cache_salt": named}
        return httpx.post(f"{pod.decode.url}{COMPLETIONS}", json=body, headers={PREFILLER: named}, timeout=60)

    before = pod.prefill.total("headrace_prompt_tokens_total")
    handed = ask(f"{pod.prefiller}, 127.0.0.1:1")
    assert said(COMPLETIONS, handed) == alone
    assert handed.json()["headrace"]["handoff"]["bytes"] > 0
    assert pod.prefill.total("headrace_prompt_tokens_total") > before
    stranger = ask("10.9.8.7:8000")
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (403, "prefill_not_allowed")
    for wrong in ("nowhere", "127.0.0.1:99999", "user@127.0.0.1:80", "127.0.0.1:80/path"):
        assert (ask(wrong).status_code, ask(wrong).json()["error"]["param"]) == (400, PREFILLER)
    pod.quiet()


def test_rendered_chats_are_the_chats(pod: Pod) -> None:
    chat = {"model": "tested", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, **GREEDY}
    rendered = pod.prefill.post(f"{CHAT}/render", chat).json()
    given = pod.decode.post(GENERATE, {**rendered, "output_mode": "text"}).json()
    assert given["choices"][0]["text"] == said(CHAT, pod.decode.post(CHAT, chat))


def test_retries_and_errors_of_the_prefill_leg_reach_the_client(pod: Pod) -> None:
    sidecar = Sidecar(pod.decode.url, ("127.0.0.1:1", pod.prefiller), retries=2)
    down = sidecar.post(COMPLETIONS, LONG, {PREFILLER: "127.0.0.1:1"})
    assert (down.status_code, sidecar.prefills) == (502, 3)
    wrong = pod.sidecar(retries=2)
    refused = wrong.post(COMPLETIONS, {**LONG, "min_p": 7}, {PREFILLER: pod.prefiller})
    assert (refused.status_code, refused.json()["error"]["param"], wrong.prefills) == (400, "min_p", 1)
    assert pod.sidecar().post(COMPLETIONS, LONG, {PREFILLER: "10.9.8.7:1"}).status_code == 403
    pod.quiet()


def test_a_decode_server_that_refuses_leaves_no_kv_held(pod: Pod) -> None:
    """The body is right for a prefill server, which does not look at the client's limits, and wrong for the other."""
    body = {**LONG, "best_of": 1, "n": 1, "min_tokens": 50, "max_tokens": 2}
    refused = pod.sidecar().post(COMPLETIONS, body, {PREFILLER: pod.prefiller})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")
    pod.quiet()


@pytest.mark.full
@pytest.mark.parametrize("fallback", ["none", "local"])
def test_a_prefill_server_that_dies_between_the_legs(fallback: str) -> None:
    """The decode server says so, or computes the prompt itself; the restarted prefill server is found again."""
    with serving(*decode_flags("127.0.0.1"), "--fallback", fallback) as decode:
        prefill = Server("--role", "prefill", *STUB).started()
        pod = Pod(prefill, decode)
        expected = said(COMPLETIONS, pod.sidecar().post(COMPLETIONS, LONG, {PREFILLER: pod.prefiller}))
        other = {**LONG, "cache_salt": "another"}
        died = pod.sidecar(between=prefill.kill).post(COMPLETIONS, other, {PREFILLER: pod.prefiller})
        if fallback == "local":
            assert said(COMPLETIONS, died) == expected
        else:
            assert died.status_code in (502, 503, 504), died.text
        gone = pod.sidecar(retries=1).post(COMPLETIONS, other, {PREFILLER: pod.prefiller})
        assert gone.status_code == 502
        with running(Server("--role", "prefill", *STUB, port=prefill.port)) as again:
            pod = Pod(again, decode)
            wait_until(
                lambda: pod.sidecar().post(COMPLETIONS, other, {PREFILLER: pod.prefiller}).status_code == 200,
                30,
                f"it is found again\n{decode.log}",
            )
            pod.quiet()
