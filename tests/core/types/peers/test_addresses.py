"""Addresses as text."""

import re

import pytest

from headrace.core.types.peers.addresses import everywhere, is_loopback, is_wildcard, url, usable_url
from tests.deployment.files import PACKAGES, ROOT


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0"])
def test_wildcards(host: str) -> None:
    assert is_wildcard(host)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "prefill-0", "localhost.example"])
def test_public(host: str) -> None:
    assert not is_loopback(host)
    assert not is_wildcard(host)


def test_urls_write_ipv6_in_brackets() -> None:
    assert url("tcp", "::1", 5557) == url("tcp", "[::1]", 5557) == "tcp://[::1]:5557"
    assert url("http", "prefill-0", "*") == "http://prefill-0:*"


@pytest.mark.parametrize(
    ("host", "usable"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("*", "http://127.0.0.1:8000"),
        ("", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("[::]", "http://[::1]:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("prefill-0", "http://prefill-0:8000"),
    ],
)
def test_what_is_bound_is_written_as_it_can_be_used(host: str, usable: str) -> None:
    assert usable_url("http", host, 8000) == usable
    assert bool(everywhere(host)) == is_wildcard(host)


BY_HAND = re.compile(
    r"\{[^{}]*(?:host|address|ip)\}:\{"  # {config.host}:{port}
    r"|:\{[^{}]*port[^{}]*\}"  # anything before a port
)
NOT_ADDRESSES = ("socket.gethostname()}:{", "http://127.0.0.1:{self.port}")  # names of peers; IPv4 loopback


def test_no_address_is_put_together_by_hand() -> None:
    """IPv6 addresses would have no brackets."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "addresses.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BY_HAND.search(line) and not any(word in line for word in NOT_ADDRESSES)
    ]
    assert found == []
