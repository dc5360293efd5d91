"""Addresses as text."""

import pytest

from headrace.core.types.addresses import is_loopback, is_wildcard, url


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
