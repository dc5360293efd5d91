"""Where a decode engine of another make is: its HTTP server, and the side channel of its KV connector. Pure."""

from urllib.parse import urlsplit

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import host_port
from headrace.core.types.peers.allow_list import canonical

SIDE_CHANNEL_PORT = 5600  # vLLM's default
HIGHEST_PORT = 65535


class DecodeAddress(msgspec.Struct, frozen=True):
    """One decode engine."""

    url: str
    """URL of its HTTP server, without a final slash."""
    host: str
    """Host of its side channel."""
    port: int
    """Port of its side channel."""

    @property
    def side_channel(self) -> str:
        """HOST:PORT of the side channel."""
        return host_port(self.host, self.port)


def parse_decode(text: str, flag: str = "--decode") -> DecodeAddress:
    """Parse URL or URL=HOST:PORT. Raises ConfigError, naming the flag."""
    url, equals, side_channel = text.partition("=")
    base = server_url(url, flag)
    if not equals:
        return DecodeAddress(base, canonical(urlsplit(base).hostname or ""), SIDE_CHANNEL_PORT)
    host, colon, port = side_channel.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port[:9]) <= HIGHEST_PORT:
        raise ConfigError(
            f"{flag} {text}: {side_channel!r} is no HOST:PORT of a side channel; write it like "
            f"{base}=127.0.0.1:{SIDE_CHANNEL_PORT} (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of that engine)"
        )
    return DecodeAddress(base, canonical(host), int(port))


def parse_decodes(texts: tuple[str, ...], flag: str = "--decode") -> tuple[DecodeAddress, ...]:
    """Parse several. Raises ConfigError for one that is no address, and for two with the same server."""
    found = tuple(parse_decode(text, flag) for text in texts)
    for kind, names in (("URL", [one.url for one in found]), ("side channel", [one.side_channel for one in found])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            hint = (
                ""
                if kind == "URL"
                else f"; write URL=HOST:PORT, since engines on one host need different ones ({flag})"
            )
            raise ConfigError(f"{flag}: two of them have the {kind} {twice[0]}{hint}")
    return found


def server_url(url: str, flag: str) -> str:
    """The address of a server without a final slash. Raises ConfigError, naming the flag, for what is none."""
    url = url.rstrip("/")
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{flag} {url}: its port is not a number from 1 to {HIGHEST_PORT}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{flag} {url} is no URL of a server; write it like http://127.0.0.1:8001")
    if parts.path or parts.query or parts.fragment:
        raise ConfigError(f"{flag} {url}: write the server's address only, http://{parts.netloc}")
    return url
