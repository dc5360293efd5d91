"""Asks a server what it is before it is loaded, so that mistakes end in one line."""

from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.core.types.errors import ConfigError
from headrace.integrations.http_client import direct_client
from headrace.server.bench.runner import COMPLETIONS, PREFILL
from headrace.server.config.values import nearest

TIMEOUT_S = 10.0


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
    names = [str(each.get("id")) for each in models]
    if model is None and len(names) != 1:
        raise ConfigError(f"{url} has {len(names)} models; choose one with --model: {', '.join(names)}")
    chosen = model or names[0]
    if chosen not in names:
        raise ConfigError(f"--model: {url} has no model {chosen!r}{nearest(chosen, names)}; it has {', '.join(names)}")
    about = models[names.index(chosen)]
    role = str(info.get("disaggregation_mode") or "") if info else ""
    return Target(
        model=chosen,
        path=path or (PREFILL if role == "prefill" else COMPLETIONS),
        max_model_len=int(about.get("max_model_len") or 0),
        name=f"Headrace {info['version']}" if info else "",
        role={"null": "colocated"}.get(role, role),
    )


def _models(url: str, client: httpx.Client) -> list[dict[str, Any]]:
    response = client.get("/v1/models")
    if response.status_code in (401, 403):
        raise ConfigError(
            f"{url} refuses the API key ({response.status_code}): set HEADRACE_API_KEY to one that it takes"
        )
    try:
        found = response.json()["data"]
        if response.status_code == 200 and isinstance(found, list) and all(isinstance(each, dict) for each in found):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    text = " ".join(response.text.split())[:120]
    raise ConfigError(f"{url} is no server with OpenAI's API: /v1/models answered {response.status_code}: {text}")


def _server_info(client: httpx.Client) -> dict[str, Any] | None:
    """What a Headrace server says of itself; None for another server."""
    response = client.get("/server_info")
    try:
        info = response.json() if response.status_code == 200 else None
    except ValueError:
        return None
    return info if isinstance(info, dict) and "instance_id" in info and "version" in info else None
