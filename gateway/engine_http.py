"""What a decode engine of any make says of itself over HTTP, asked before it is served. Blocking."""

import http.client
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 22  # of an answer; a handshake of 100 layers and thousands of blocks has some 20 kB


class EngineUnreachable(Exception):
    """The engine does not answer now; it may be starting. The message says what does not answer."""


def get_json(url: str, path: str, api_key: str, kind: type[Any], make: str) -> Any:
    """GET of an answer in JSON, of this kind. make: the engine's, for errors. Raises EngineUnreachable, ConfigError."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=_authorization(api_key))
        with connection.getresponse() as answer:
            status, body = answer.status, answer.read(MAX_BYTES)
    except (OSError, http.client.HTTPException, ssl.SSLError) as error:
        raise EngineUnreachable(f"GET {path}: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()
    if status in (401, 403):
        raise ConfigError(f"GET {path} answers {status}: it wants another API key (--decode-api-key)")
    if status >= 500:
        raise EngineUnreachable(f"GET {path} answers {status}")
    if status != 200:
        raise ConfigError(f"GET {path} answers {status}: it is no {make} server")
    return decoded(f"GET {path}", msgspec.json.Decoder(kind).decode, body, make)


def decoded(what: str, decode: Callable[[bytes], Any], body: bytes, make: str) -> Any:
    """A message of an engine. Raises ConfigError for one of another kind."""
    try:
        return decode(body)
    except NO_MESSAGE as error:
        raise ConfigError(f"{what} sent something that is not {make}'s: {error}") from error


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
