"""The Headrace server or gateway behind a worker of Dynamo, over HTTP."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal

import httpx
import msgspec

from headrace.core.types.errors import (
    PREFILL_FAILED,
    PREFILL_LOST,
    PREFILL_UNREACHABLE,
    ConfigError,
    ErrorInfo,
    HeadraceError,
)
from headrace.integrations.dynamo.options import WorkerSettings
from headrace.integrations.http_client import PROMPT_TIMEOUT, bearer, direct_async_client, failure
from headrace.peer.kv_event_follower import KvEventSource

PROBE_TIMEOUT_S = 5.0
RETRY_S = 0.5
TOLD_EVERY_S = 10.0
NO_PREFILL_SERVER = "no_prefill_server"
"""Code of a decode server that has lost its own prefill servers: prompts whose KV is elsewhere are served."""
MANY = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # Dynamo bounds the requests
Kind = Literal["prefill", "decode", "colocated", "gateway"]
_ROLES: dict[str, Kind] = {"prefill": "prefill", "decode": "decode"}


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker registers with. 0 and "" where a gateway does not know."""

    kind: Kind
    model: str
    """By which clients name it."""
    model_path: str
    """The server's own --model."""
    context_length: int
    page_size: int
    pages: int
    """Of each data-parallel replica."""
    replicas: int
    instance: str = ""


class KvLoad(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages of a server, used: by requests, and the share of its prompts' tokens that were cached."""

    pages: int
    used: int
    hit_rate: float | None


class Server:
    """One server. Every call raises HeadraceError: 502 if there is no connection, or none to the end of the answer."""

    def __init__(self, settings: WorkerSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """transport: in place of the network."""
        self.url = settings.url
        self._client = direct_async_client(
            base_url=settings.url,
            headers=bearer(settings.api_key),
            timeout=PROMPT_TIMEOUT,
            limits=MANY,
            transport=transport,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def wait(self, seconds: float, tell: Callable[[str], None]) -> Description:
        """Wait until the server serves, and tell what it waits for. Raises ConfigError when the time is over."""
        loop = asyncio.get_running_loop()
        end, told, said = loop.time() + seconds, "", 0.0
        while True:
            problem = await self.problem()
            if problem is None:
                return await self.describe()
            if problem.status == 401:
                raise ConfigError(f"{self.url} asks for an API key: {problem.message}; give one with --api-key")
            if loop.time() >= end:
                raise ConfigError(f"{self.url} is not ready after {seconds:g} seconds (--wait): {problem.message}")
            if problem.message != told or loop.time() - said >= TOLD_EVERY_S:
                told, said = problem.message, loop.time()
                tell(f"waiting for {self.url}: {told}")
            await asyncio.sleep(RETRY_S)

    async def problem(self) -> ErrorInfo | None:
        """Why the server would refuse a request now, None if it would not."""
        try:
            await self._ask("GET", "/ready")
        except HeadraceError as error:
            return None if error.info.code == NO_PREFILL_SERVER else error.info
        return None

    async def describe(self) -> Description:
        """What the server says of itself."""
        try:
            info = await self._ask("GET", "/server_info")
        except HeadraceError as error:
            if error.info.status != 404:
                raise
            return await self._describe_gateway()
        return Description(
            kind=_ROLES.get(info["disaggregation_mode"], "colocated"),
            model=info["served_model_name"],
            model_path=info["model_path"],
            context_length=info["max_model_len"],
            page_size=info["page_size"],
            pages=info["max_total_num_tokens"] // info["page_size"],
            replicas=info["data_parallel_replicas"],
            instance=info["instance_id"],
        )

    async def _describe_gateway(self) -> Description:
        model = (await self._ask("GET", "/v1/models"))["data"][0]
        return Description(
            kind="gateway",
            model=model["id"],
            model_path=model["root"],
            context_length=model["max_model_len"] or 0,
            page_size=0,
            pages=0,
            replicas=1,
        )

    async def kv_events(self) -> tuple[str, KvEventSource] | None:
        """Host and ports where the KV events of all its data-parallel replicas are published; None if they are not."""
        sources = await self._ask("GET", "/kv_event_sources")
        if not sources:
            return None
        source = next(iter(sources.values()))
        published = httpx.URL(source["endpoint"].replace("*", "[::]"))
        host = published.host if published.host != "::" else httpx.URL(self.url).host
        replay = source["replay_endpoint"]
        port = 0 if replay is None else int(replay.rpartition(":")[2])
        return host, KvEventSource(published.port or 0, port, source["topic"])

    async def load(self) -> KvLoad:
        """Its KV pages, of all replicas."""
        found = (await self._ask("GET", "/get_load"))[0]
        return KvLoad(pages=found["kv_pages"], used=found["kv_pages_used"], hit_rate=found["cache_hit_rate"])

    async def computes(self) -> None:
        """Have a token computed. Raises HeadraceError if it is not."""
        await self._ask("GET", "/health_generate", timeout_s=30.0)

    async def post(self, path: str, body: object, headers: Mapping[str, str]) -> Any:
        """The answer to a request."""
        async with self._sent(path, body, headers) as response:
            return msgspec.json.decode(await response.aread())

    async def stream(self, path: str, body: object, headers: Mapping[str, str]) -> AsyncGenerator[Any, None]:
        """The events of a streamed answer. Ending it early cancels the request."""
        async with self._sent(path, body, headers) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    raise HeadraceError(_told(event, 500))
                yield event

    def _sent(self, path: str, body: object, headers: Mapping[str, str]) -> "_Response":
        content = msgspec.json.encode(body)
        request = self._client.build_request(
            "POST", path, content=content, headers={"content-type": "application/json", **headers}
        )
        return _Response(self, self._client, request)

    async def _ask(self, method: str, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> Any:
        try:
            response = await self._client.request(method, path, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise HeadraceError(self.lost(error)) from error
        if response.status_code != 200:
            raise HeadraceError(_refusal(response.content, response.status_code))
        return msgspec.json.decode(response.content)

    def lost(self, error: httpx.HTTPError) -> ErrorInfo:
        """The error of a failed connection."""
        refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        code = PREFILL_UNREACHABLE if refused else PREFILL_LOST
        return ErrorInfo(code=code, message=f"{self.url}: {failure(error)}", status=502)


class _Response:
    """A streamed response, in whose body failures of the connection are HeadraceErrors."""

    def __init__(self, server: Server, client: httpx.AsyncClient, request: httpx.Request) -> None:
        self._server, self._client, self._request = server, client, request
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        try:
            self._response = response = await self._client.send(self._request, stream=True)
            if response.status_code == 200:
                return response
            content = await response.aread()
        except httpx.HTTPError as error:
            raise HeadraceError(self._server.lost(error)) from error
        await response.aclose()
        raise HeadraceError(_refusal(content, response.status_code))

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._response is not None:
            await self._response.aclose()
        if isinstance(error, httpx.HTTPError):
            raise HeadraceError(self._server.lost(error)) from error


def tokenizer_source(given: str, description: Description) -> str:
    """The folder or hub id from which Dynamo's frontend loads the tokenizer. Raises ConfigError for a model that is
    neither, or a folder without one."""
    path = given or description.model_path
    if os.path.isdir(path):
        missing = [name for name in ("config.json", "tokenizer.json") if not os.path.exists(os.path.join(path, name))]
        if missing:
            raise ConfigError(f"--model-path: {path} has no {' and no '.join(missing)}")
        return path
    owner, slash, name = path.partition("/")
    if owner and slash and name and "/" not in name and not path.endswith(".gguf") and not owner.startswith("."):
        return path  # of the hub
    whose = "--model-path" if given else "the server's --model"
    raise ConfigError(
        f"{whose} is {path!r}, no folder of this machine and no hub id: give the folder or hub id that has the model's "
        "tokenizer with --model-path"
    )


def _refusal(content: bytes, status: int) -> ErrorInfo:
    try:
        return _told(msgspec.json.decode(content), status)
    except (msgspec.DecodeError, KeyError, TypeError):
        return ErrorInfo(code=PREFILL_FAILED, message=f"the server answered with status {status}", status=status)


def _told(body: Any, status: int) -> ErrorInfo:
    """The error in a response or an event, whose status is given where the error has none."""
    error = body["error"]
    return ErrorInfo(
        code=error["code"],
        message=error["message"],
        status=error.get("status") or status,
        field=error.get("param"),
        stage=error.get("stage"),
    )
