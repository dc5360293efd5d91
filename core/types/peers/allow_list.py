"""The prefill servers that a decode server may connect to: its own, and those that --allow-prefill names.

Pure. Host names are compared as text and never resolved, so that DNS has no say in what is allowed; a network matches
addresses only.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import msgspec

from headrace.core.types.errors import ConfigError, ErrorInfo, HeadraceError
from headrace.core.types.peers.addresses import host_port

PREFILL_NOT_ALLOWED = "prefill_not_allowed"

_NAME = re.compile(r"(?=.{1,253}\Z)[0-9a-z_]([0-9a-z_-]*[0-9a-z_])?(\.[0-9a-z_]([0-9a-z_-]*[0-9a-z_])?)*")
_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*")  # resolvers may parse such a name as an address
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class AllowedPrefill(msgspec.Struct, frozen=True):
    """One rule."""

    host: str
    """The host in canonical form; empty for a network."""
    port: int = 0
    """0: any port."""
    network: IPv4Network | IPv6Network | None = None

    def matches(self, host: str, port: int) -> bool:
        """Whether the rule covers an address. host: in canonical form."""
        if self.network is None:
            return host == self.host and self.port in (0, port)
        address = _address(host)
        return address is not None and address.version == self.network.version and address in self.network


Rules = tuple[AllowedPrefill, ...]


def canonical(host: str) -> str:
    """Canonical form of a host name or address: lower case, no final dot, no brackets.

    Addresses are in their shortest form; IPv4-mapped IPv6 addresses become IPv4.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    address = _address(bare)
    return bare.lower().removesuffix(".") if address is None else str(address)


def parse_allowed(text: str, flag: str = "--allow-prefill") -> AllowedPrefill:
    """Parse HOST, HOST:PORT, or a network such as 10.0.0.0/24. IPv6 addresses with a port need brackets.

    Raises ConfigError, naming the flag.
    """
    if "/" in text:
        try:
            return AllowedPrefill("", network=ip_network(text))
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: {error}; write HOST, HOST:PORT or 10.0.0.0/24") from None
    if _is_host(canonical(text)):
        return AllowedPrefill(canonical(text))
    host, _, port = text.rpartition(":")
    if not _is_host(canonical(host)) or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(
            f"{flag} {text} is no host, HOST:PORT or network; write it like prefill-0, 10.0.0.5:8000, "
            f"[fd00::5]:8000 or 10.0.0.0/24"
        )
    return AllowedPrefill(canonical(host), int(port))


def address_of(url: str) -> tuple[str, int]:
    """Host (in canonical form) and port of a URL. 0: it has no port, and its scheme no default one."""
    parts = urlsplit(url)
    return canonical(parts.hostname or ""), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def allowed_prefills(urls: Iterable[str], texts: Iterable[str]) -> Rules:
    """The rules of a configuration: host and port of each URL of --prefill, then the texts of --allow-prefill.

    Raises ConfigError.
    """
    configured = [AllowedPrefill(*address_of(url)) for url in urls]
    return (*configured, *(parse_allowed(text) for text in texts))


def is_allowed(rules: Rules, host: str, port: int) -> bool:
    """Whether a decode server may connect to host:port.

    Unusual spellings of addresses (127.1, 0x7f000001) count as names, and such names are never allowed.
    """
    known = canonical(host)
    return 1 <= port <= 65535 and _is_host(known) and any(rule.matches(known, port) for rule in rules)


def is_named(rules: Rules, host: str, port: int) -> bool:
    """Whether a rule names host:port itself, which a rule for every port of a host or for a network does not. Only what
    is named is sent API keys: a program of any user may listen on another port."""
    known = canonical(host)
    return port > 0 and any(rule.network is None and (rule.host, rule.port) == (known, port) for rule in rules)


def require_allowed(
    rules: Rules,
    host: str,
    port: int,
    flag: str = "--allow-prefill",
    what: str = "connect to the prefill server",
) -> None:
    """Raises HeadraceError (403), naming the address and the flag, unless is_allowed() holds."""
    if is_allowed(rules, host, port):
        return
    message = (
        f"this server may not {what} {host_port(host, port)[:300]!r}: "
        f"its operator can add {flag} HOST:PORT, a host or a network"
    )
    raise HeadraceError(ErrorInfo(code=PREFILL_NOT_ALLOWED, message=message, status=403))


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_host(known: str) -> bool:
    """known: in canonical form."""
    if _address(known) is not None:
        return "%" not in known
    return _NAME.fullmatch(known) is not None and _NUMBERS.fullmatch(known) is None
