"""What routers and clients ask a gateway for SGLang beside prompts, and bodies that are no prompts."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx
import msgspec

from headrace.core.config import GatewayConfig
from headrace.core.types.errors import ErrorInfo
from headrace.gateway.sglang.gateway import SglangGateway
from headrace.gateway.sglang.routes import create_sglang_app
from tests.server.fakes import in_loop, json_of

ENTRY = {"id": "org/tested", "object": "model", "max_model_len": 64}


class Asked(SglangGateway):
    """Its prefill server answers with its models, or is not there."""

    up = True

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self.refused: list[tuple[list[int], str]] = []

    def refuse(self, rooms: Iterable[int], error: ErrorInfo) -> None:
        self.refused.append((list(rooms), error.code))

    async def get(self, path: str) -> tuple[int, bytes]:
        if not self.up:
            return 503, b'{"error":{"code":"not_ready"}}'
        assert path == "/v1/models", "what a client writes into a path goes to no prefill server"
        return 200, msgspec.json.encode({"object": "list", "data": [ENTRY]})


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[Asked, httpx.AsyncClient]]:
    gateway = Asked(GatewayConfig(prefill=("http://127.0.0.1:9",), decode=("http://127.0.0.1:10",)))
    transport = httpx.ASGITransport(app=create_sglang_app(gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield gateway, http
    finally:
        await gateway.stop()


@in_loop
async def test_models_are_those_of_the_prefill_servers() -> None:
    async with asked() as (gateway, http):
        assert json_of(await http.get("/v1/models"))["data"] == [ENTRY]
        assert json_of(await http.get("/v1/models/org/tested")) == ENTRY
        assert json_of(await http.get("/v1/models/org%2Ftested")) == ENTRY
        for name in ("tested", "org", "..%2Fmetrics", "org/tested/x"):
            missing = await http.get(f"/v1/models/{name}")
            assert (missing.status_code, json_of(missing)["error"]["code"]) == (404, "model_not_found"), name
        gateway.up = False
        assert (await http.get("/v1/models/org/tested")).status_code == 503


@in_loop
async def test_bodies_that_are_no_prompts_are_refused_with_the_reason() -> None:
    bodies = {
        b"": ("invalid_json", "it is empty"),
        b'{"text":"x"': ("invalid_json", "before its end"),
        b'{"text":"\\ud83d"}': ("invalid_json", "half of a surrogate pair"),
        b"[1]": ("invalid_value", "has to be a JSON object"),
        b'{"text":"x","bootstrap_room":1,"bootstrap_room":2}': ("repeated_field", "bootstrap_room is given twice"),
    }
    async with asked() as (_, http):
        for body, (code, words) in bodies.items():
            answer = await http.post("/generate", content=body)
            error = json_of(answer)["error"]
            assert (answer.status_code, error["code"]) == (400, code), error
            assert words in error["message"]


@in_loop
async def test_rooms_of_a_body_that_is_refused_are_told_of_it() -> None:
    """Else the decode engine, which got the same body, waits for its own timeout."""
    router = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    async with asked() as (gateway, http):
        answer = await http.post("/v1/completions", json={"prompt": "x", "n": 2, **router})
        assert (answer.status_code, json_of(answer)["error"]["param"]) == (400, "n")
        assert gateway.refused == [([7, 8], "invalid_value")]
        answer = await http.post("/generate", json={"text": "x", **router})
        assert answer.status_code == 503, "it has not started"
        assert gateway.refused[1:] == [([7], json_of(answer)["error"]["code"])]
