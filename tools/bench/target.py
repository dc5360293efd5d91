"""Asks a server what it is before it is loaded, so that mistakes end in one line."""

from typing import Annotated
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError
from headrace.integrations.http_client import direct_client
from headrace.server.config.values import nearest
from headrace.tools.bench.runner import COMPLETIONS, PREFILL

TIMEOUT_S = 10.0
MAX_NAME_CHARS = 1000


class Target(msgspec.Struct, frozen=True):
    """A server that answers."""

    model: str
    path: str
    """COMPLETIONS or PREFILL."""
    max_model_len: int
    """Tokens of prompt and output; 0 where the server does not say."""
    name: str
    """Name and version; "" of a server that is not Headrace."""
    role: str


def base_url(text: str) -> str:
    """The server's address without a trailing /v1. Raises ConfigError for anything but http:// and https://."""
    url = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"expected the address of a server such as http://127.0.0.1:8000, got {text!r}")
    return url


def find_target(url: str, headers: dict[str, str], model: str | None, path: str | None) -> Target:
    """Ask the server. model, path: None for the server's. Raises ConfigError for a server that cannot be reached,
    refuses the key, or has no such model."""
    try:
        with direct_client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
            models = _models(url, client)
            info = _server_info(client)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"no answer from {url} ({error or type(error).__name__}); is a server running there?"
        ) from None
    names = [each.id for each in models]
    if model is None and len(names) != 1:
        raise ConfigError(f"{url} has {len(names)} models; choose one with --model: {', '.join(names)}")
    chosen = model or names[0]
    if chosen not in names:
        raise ConfigError(f"--model: {url} has no model {chosen!r}{nearest(chosen, names)}; it has {', '.join(names)}")
    about = models[names.index(chosen)]
    role = info.disaggregation_mode or "" if info else ""
    return Target(
        model=chosen,
        path=path or (PREFILL if role == "prefill" else COMPLETIONS),
        max_model_len=about.max_model_len or 0,
        name=f"Headrace {info.version}" if info else "",
        role={"null": "colocated"}.get(role, role),
    )


class _Listed(msgspec.Struct):
    """One model of the answer of GET /v1/models."""

    id: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    max_model_len: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


class _Models(msgspec.Struct):
    data: list[_Listed]


class _ServerInfo(msgspec.Struct):
    """What a Headrace server answers to GET /server_info."""

    instance_id: str
    version: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    disaggregation_mode: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | None = None


def _models(url: str, client: httpx.Client) -> list[_Listed]:
    response = client.get("/v1/models")
    if response.status_code in (401, 403):
        raise ConfigError(
            f"{url} refuses the API key ({response.status_code}): set HEADRACE_API_KEY to one that it takes"
        )
    what = f"{response.status_code}: {' '.join(response.text.split())[:120]}"
    if response.status_code == 200:
        try:
            return msgspec.json.decode(response.content, type=_Models).data
        except NO_MESSAGE as error:
            what = str(error)
    raise ConfigError(f"{url} is no server with OpenAI's API: /v1/models answered {what}")


def _server_info(client: httpx.Client) -> _ServerInfo | None:
    """What a Headrace server says of itself; None for another server."""
    response = client.get("/server_info")
    try:
        return msgspec.json.decode(response.content, type=_ServerInfo) if response.status_code == 200 else None
    except NO_MESSAGE:
        return None
