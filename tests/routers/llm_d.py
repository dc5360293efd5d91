"""What llm-d's router sends to servers of a pair, replayed: the requests of its sidecar and of its coordinator, made as
llm-d/llm-d-router at ebab6879 makes them. Where each was read stands beside it."""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec

Body = dict[str, Any]
REQUEST_ID, PREFILLER, PROFILE = "x-request-id", "x-prefiller-host-port", "EPP-Profile"
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
RETRIED = (502, 503, 504)  # pkg/sidecar/proxy/proxy_helpers.go, isRetryableStatus
NO_KV: Body = {  # connector_nixlv2.go, and pkg/coordinator/connectors/kv/nixl.go
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LIMITS = {GENERATE: ("max_tokens", "min_tokens"), "/v1/responses": ("max_output_tokens",)}
OTHER_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")  # proxy.go, tokenLimitFieldsForAPIType


def nothing() -> None:
    """Between two requests."""


class Sidecar:
    """The proxy before a decode server (pkg/sidecar/proxy: chat_completions.go, connector_nixlv2.go).

    allowed: prefill servers that it may ask, HOST:PORT. retries, pause_s: --prefill-max-retries and its back-off.
    between: done after the prefill leg.
    """

    def __init__(
        self,
        decode_url: str,
        allowed: tuple[str, ...],
        *,
        retries: int = 0,
        pause_s: float = 0.01,
        between: Callable[[], None] = nothing,
    ) -> None:
        self._decode_url = decode_url
        self._allowed = allowed
        self._retries = retries
        self._pause_s = pause_s
        self._between = between
        self.prefills = 0
        """Requests to prefill servers."""

    def post(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """What a client gets. headers: of the endpoint picker."""
        given = {name.lower(): value for name, value in (headers or {}).items()}
        prefiller = given.pop(PREFILLER, "").partition(",")[0].strip()
        if not prefiller:
            return self._send(self._decode_url, path, body, given)
        if prefiller not in self._allowed:
            return httpx.Response(403, text="Forbidden: prefill target not allowed by SSRF protection")
        given[REQUEST_ID] = str(uuid.uuid4())
        first = self._prefill(f"http://{prefiller}", path, body, given)
        if first.status_code // 100 != 2:
            return first
        self._between()
        answer = first.json()
        second = {**body, "kv_transfer_params": answer.get("kv_transfer_params")}
        return _with_cached_tokens(self._send(self._decode_url, path, second, given), _cached_tokens(answer))

    def _prefill(self, url: str, path: str, body: Body, headers: Mapping[str, str]) -> httpx.Response:
        capped = {**body, "kv_transfer_params": NO_KV, "stream": False}
        capped.pop("stream_options", None)
        limits = dict.fromkeys(LIMITS.get(path, OTHER_LIMITS), 1)
        if path == GENERATE:
            capped["sampling_params"] = {**body.get("sampling_params", {}), **limits}
        else:
            capped |= limits
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._pause_s)
            self.prefills += 1
            response = self._send(url, path, capped, headers)
            if response.status_code not in RETRIED:
                break
        return response

    def _send(self, url: str, path: str, body: Body, headers: Mapping[str, str]) -> httpx.Response:
        """A connection that fails is 502, as of Go's reverse proxy; a refused one to the decode server 503."""
        try:
            return httpx.post(f"{url}{path}", json=body, headers=dict(headers), timeout=60, trust_env=False)
        except httpx.ConnectError as error:
            return httpx.Response(503 if url == self._decode_url else 502, text=str(error))
        except httpx.TransportError as error:
            return httpx.Response(502, text=str(error))


def _cached_tokens(answer: Body) -> int:
    return int((answer.get("usage", {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _with_cached_tokens(response: httpx.Response, cached: int) -> httpx.Response:
    """The prefill server's count in the place of the decode server's (cached_tokens_usage_rewriter.go)."""
    if response.status_code != 200 or "json" not in response.headers["content-type"]:
        return response
    answer = response.json()
    if "usage" in answer:
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
    return httpx.Response(200, json=answer)


class Coordinator:
    """The pipeline of text requests: render, conditional-decode, prefill, decode (pkg/coordinator/steps), with
    use_openai_format: true. Its gateway sends legs to the server that the EPP-Profile names, and takes the tokens field
    out of chats."""

    def __init__(self, render_url: str, prefill_url: str, decode_url: str) -> None:
        self._render_url = render_url
        self._urls = {"prefill": prefill_url, "decode": decode_url}
        self.legs: list[tuple[str, int]] = []
        """Steps that were sent, and what they were answered."""

    def post(self, path: str, body: Body) -> httpx.Response:
        """What a client gets; the error of the prefill leg, if that has failed."""
        rid = str(uuid.uuid4())
        tokens = self._tokens(path, body)
        body = {**body, "prompt": tokens} if path == COMPLETIONS else body
        early = self._leg("decode", "conditional-decode", path, body, rid, {"Prefer": "if-available"})
        if early.status_code != 412:
            return early
        first = self._leg("prefill", "prefill", path, _prefill_body(path, body, tokens, rid), rid)
        if first.status_code != 200:
            return first
        params = {**first.json()["kv_transfer_params"], "do_remote_decode": False, "do_remote_prefill": True}
        if path == GENERATE:
            sampling = dict(body.get("sampling_params", {}))
            sampling["extra_args"] = {**sampling.get("extra_args", {}), "kv_transfer_params": params}
            return self._leg("decode", "decode", path, {**body, "sampling_params": sampling}, rid)
        return self._leg("decode", "decode", path, {**body, "kv_transfer_params": params}, rid)

    def _tokens(self, path: str, body: Body) -> list[int]:
        """render.go: token ids as they are, texts from the render service."""
        given = body["token_ids"] if path == GENERATE else body.get("prompt")
        if isinstance(given, list):
            return given
        rendered = self._send("render", self._render_url, f"{path}/render", body, {}).json()
        (only,) = rendered if path == COMPLETIONS else [rendered]
        assert only["features"] is None
        found: list[int] = only["token_ids"]
        return found

    def _leg(
        self, profile: str, step: str, path: str, body: Body, rid: str, more: Mapping[str, str] | None = None
    ) -> httpx.Response:
        headers = {REQUEST_ID: rid, PROFILE: profile, **(more or {})}
        return self._send(step, self._urls[profile], path, body, headers)

    def _send(self, step: str, url: str, path: str, body: Body, headers: Mapping[str, str]) -> httpx.Response:
        response = httpx.post(f"{url}{path}", json=body, headers=dict(headers), timeout=60, trust_env=False)
        self.legs.append((step, response.status_code))
        return response


def _prefill_body(path: str, body: Body, tokens: list[int], rid: str) -> Body:
    """prefill.go, buildPrefillBody; utils.go, capSingleTokenOutput."""
    params = {**NO_KV}
    if path == CHAT:
        capped = {**body, "kv_transfer_params": params, "max_tokens": 1, "stream": False}
        for name in ("min_tokens", "stream_options"):
            capped.pop(name, None)
        if "max_completion_tokens" in capped:
            capped["max_completion_tokens"] = 1
        return capped
    common = {"request_id": rid, "model": body["model"], "stream": False}
    if path == COMPLETIONS:
        return {**common, "prompt": tokens, "kv_transfer_params": params, "max_tokens": 1}
    sampling = {"max_tokens": 1, "extra_args": {"kv_transfer_params": params}}
    return {**common, "token_ids": tokens, "sampling_params": sampling}


class Recorded(msgspec.Struct, frozen=True):
    """A request of llm-d's own tests, with the name of the model that is served here."""

    origin: str
    """File, and name of the test."""
    path: str
    body: Body


def _hello(**more: Any) -> Body:
    return {"model": "tested", "messages": [{"role": "user", "content": "Hello"}], **more}


_SIDECAR = "pkg/sidecar/proxy/connector_nixlv2_test.go"
RECORDED = (
    Recorded("pkg/sidecar/proxy/connector_test.go: chatCompletionsRequestBody", CHAT, _hello(max_tokens=50)),
    Recorded(
        "pkg/sidecar/proxy/connector_test.go: chatCompletionsRequestBodyWithMaxCompletionTokens",
        CHAT,
        _hello(max_tokens=50, max_completion_tokens=100),
    ),
    Recorded(f"{_SIDECAR}: should cap token limits in prefill", CHAT, _hello(max_tokens=100, min_tokens=5)),
    Recorded(f"{_SIDECAR}: should cap prefill and drop the caps in decode when the request omits them", CHAT, _hello()),
    Recorded(
        f"{_SIDECAR}: should replace cached tokens in streamed usage chunks",
        CHAT,
        _hello(max_tokens=50, stream=True, stream_options={"include_usage": True}),
    ),
    Recorded(
        f"{_SIDECAR}: should successfully send responses API request",
        "/v1/responses",
        {"model": "tested", "input": "Hello, how are you?", "max_output_tokens": 50},
    ),
    Recorded(
        f"{_SIDECAR}: generate",
        GENERATE,
        {"model": "tested", "token_ids": [1, 2, 3, 4], "sampling_params": {"max_tokens": 50}},
    ),
    Recorded(
        f"{_SIDECAR}: should cap sampling_params token limits in prefill",
        GENERATE,
        {"model": "tested", "token_ids": [1, 2, 3, 4], "sampling_params": {"max_tokens": 100, "min_tokens": 5}},
    ),
    Recorded(
        f"{_SIDECAR}: when sampling_params omits them",
        GENERATE,
        {"model": "tested", "token_ids": [1, 2, 3, 4], "sampling_params": {"temperature": 0.7}},
    ),
    Recorded(f"{_SIDECAR}: drop synthesized sampling_params", GENERATE, {"model": "tested", "token_ids": [1, 2, 3, 4]}),
    Recorded("pkg/sidecar/proxy: completions", COMPLETIONS, {"model": "tested", "prompt": "Hello", "max_tokens": 20}),
    Recorded(
        "docs/communication.md, 2.B; test/coordinator/e2e",
        COMPLETIONS,
        {"model": "tested", "prompt": "hello world", "max_tokens": 8},
    ),
    Recorded(
        "test/coordinator/e2e/coordinator/generate_endpoint_test.go: generateBody",
        GENERATE,
        {"model": "tested", "token_ids": [1000 + index for index in range(20)], "sampling_params": {"max_tokens": 1}},
    ),
)
WITH_IMAGE = Recorded(
    "test/coordinator/e2e/coordinator/generate_endpoint_test.go: routes a single-image generate end-to-end",
    GENERATE,
    {
        "model": "tested",
        "token_ids": [1000, 32000, 32000, 32000, 1004],
        "sampling_params": {"max_tokens": 1},
        "features": {
            "mm_hashes": {"image": ["e2e-gen-hash-0"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 3}]},
            "kwargs_data": {"image": ["dGVuc29y"]},
        },
    },
)
