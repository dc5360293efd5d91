"""Images that requests name by URL: fetched from hosts that the operator has named, and from no other.

A client that sends a URL chooses what this server connects to. So redirects are not followed, a host is connected to
by an address that was looked at, and an address that is not public is taken from the operator only, written as such.
"""

import asyncio
import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

import httpx

from headrace.core.types.errors import HeadraceError, invalid, shown
from headrace.core.types.peers.addresses import bracketed, host_port
from headrace.integrations.http_client import direct_async_client

TIMEOUT_S = 10.0  # of one image, from its host's name to its last byte
FETCHES = 8  # at a time
UNAVAILABLE = "image_unavailable"
_PORTS = {"http": 80, "https": 443}


class ImageFetcher:
    """Fetches images. Used by the event loop."""

    def __init__(self, hosts: Collection[str], max_bytes: int) -> None:
        """hosts: HOST, for the ports of http and https, or HOST:PORT. max_bytes: of one image."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._free = asyncio.Semaphore(FETCHES)
        # Connections are to addresses: one that is kept would be another host's that has the same.
        unkept = httpx.Limits(max_connections=FETCHES, max_keepalive_connections=0)
        self._client = direct_async_client(timeout=TIMEOUT_S, limits=unkept)

    async def close(self) -> None:
        """Close what is connected."""
        await self._client.aclose()

    async def fetch(self, url: str, field: str) -> bytes:
        """The bytes behind a URL. Raises HeadraceError: 400 for a host that is not allowed, and for what cannot be
        fetched; 413 for more bytes than are allowed. field: names it in errors."""
        host, split = self._allowed(url, field)
        try:
            async with self._free, asyncio.timeout(TIMEOUT_S):
                address = await self._address(host, split.port or _PORTS[split.scheme], field)
                return await self._get(split, host, address, field)
        except TimeoutError:
            raise _failed(field, f"{host} has not sent it within {TIMEOUT_S:g} s") from None
        except (OSError, httpx.HTTPError, UnicodeError) as error:
            raise _failed(field, f"{host}: {shown(str(error) or type(error).__name__, 200)}") from error

    def _allowed(self, url: str, field: str) -> tuple[str, SplitResult]:
        """The host of a URL, and its parts. Raises HeadraceError (400)."""
        try:
            split = urlsplit(url)
            host, port = split.hostname or "", split.port
        except ValueError as error:
            raise invalid(field, f"{field} is no URL: {shown(str(error))}") from error
        if split.scheme not in _PORTS or not host or "@" in split.netloc or not url.isascii() or not url.isprintable():
            raise invalid(field, f"{field} has to be a data: URL, or an http or https URL of a host without a user")
        usual = _PORTS[split.scheme]
        own_port = port in (None, usual)
        if host_port(host, port or usual) not in self._hosts and not (own_port and host in self._hosts):
            name = host if own_port else host_port(host, port or usual)
            text = f"{field}: images are not fetched from {shown(name)}; send a data: URL, or have the server started "
            raise invalid(field, f"{text}with --allowed-image-host {shown(name)}", code="host_not_allowed")
        return host, split

    async def _address(self, host: str, port: int, field: str) -> str:
        """An address of a host. Raises HeadraceError (400) if any of its addresses is not public, unless it is one."""
        try:
            return str(ip_address(host))
        except ValueError:
            pass
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(address[4][0]) for address in found]
        for address in addresses:
            if not _public(address):
                raise _failed(field, f"{host} has the address {address}, which is not public")
        return addresses[0]

    async def _get(self, split: SplitResult, host: str, address: str, field: str) -> bytes:
        netloc, name = (
            bracketed(each) if split.port is None else host_port(each, split.port) for each in (address, host)
        )
        target = split._replace(netloc=netloc, fragment="").geturl()
        headers = {"Host": name, "Accept": "image/*", "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": host}
        async with self._client.stream("GET", target, headers=headers, extensions=extensions) as response:
            if response.status_code != httpx.codes.OK:
                redirect = "; redirects are not followed" if response.is_redirect else ""
                raise _failed(field, f"{host} answered {response.status_code}{redirect}")
            file = bytearray()
            async for part in response.aiter_raw():
                file += part
                if len(file) > self._max_bytes:
                    text = f"{field} is more than --max-image-bytes allows ({self._max_bytes})"
                    raise invalid(field, text, code="image_too_large", status=413)
            return bytes(file)


def _public(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_global


def _failed(field: str, why: str) -> HeadraceError:
    return invalid(field, f"{field} cannot be fetched: {why}", code=UNAVAILABLE)
