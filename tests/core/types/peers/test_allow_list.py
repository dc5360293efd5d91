"""Rules for the prefill servers that a decode server may connect to."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.core.types.peers.allow_list import allowed_prefills, is_allowed, parse_allowed, require_allowed

RULES = allowed_prefills(
    ["http://prefill-0:8000", "http://10.1.1.1", "https://[fd00::1]"],
    ["prefill-1", "prefill-2:9000", "10.0.0.0/24", "[fd00::2]:9000", "fd00:5::/64", "192.168.0.1"],
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("prefill-0", 8000),
        ("PREFILL-0.", 8000),
        ("10.1.1.1", 80),
        ("fd00::1", 443),
        ("[FD00:0::1]", 443),
        ("prefill-1", 1),
        ("prefill-1", 65535),
        ("prefill-2", 9000),
        ("10.0.0.255", 4),
        ("::ffff:10.0.0.9", 4),
        ("fd00::2", 9000),
        ("fd00:5::77", 9),
        ("192.168.0.1", 22),
    ],
)
def test_configured_servers_are_allowed(host: str, port: int) -> None:
    require_allowed(RULES, host, port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("prefill-0", 8001),
        ("10.1.1.1", 8000),
        ("prefill-2", 9001),
        ("prefill-3", 9000),
        ("prefill-1.evil.example", 1),
        ("evil-prefill-1", 1),
        ("10.0.1.0", 4),
        ("fd00::2", 9001),
        ("fd00:6::1", 9),
        ("127.0.0.1", 8000),
        ("169.254.169.254", 80),
        ("prefill-1", 0),
        ("prefill-1", 65536),
        ("", 8000),
        ("prefill-0@10.0.0.1", 8000),
        ("10.0.0.1/", 8000),
        ("10.0.0.1#", 8000),
        ("10.0.0.1%25", 8000),
        ("fd00:5::77%lo", 9),
        ("prefill-1\n", 1),
    ],
)
def test_everything_else_is_refused_naming_the_address_and_the_flag(host: str, port: int) -> None:
    with pytest.raises(HeadraceError, match="--allow-prefill") as refused:
        require_allowed(RULES, host, port)
    assert (refused.value.info.status, refused.value.info.code) == (403, "prefill_not_allowed")
    assert repr(host)[1:-1] in refused.value.info.message
    assert str(port) in refused.value.info.message


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0"])
def test_unusual_spellings_of_addresses_are_never_allowed(host: str) -> None:
    """Resolvers parse them as addresses, which a rule for host names does not expect."""
    everything = allowed_prefills([], ["0.0.0.0/0", "::/0"])
    assert not is_allowed(everything, host, 80)
    with pytest.raises(ConfigError):
        parse_allowed(host)


@pytest.mark.parametrize(
    "text", ["", ":", "a:", ":1", "a:0", "a:65536", "a:-1", "a:1x", "a b", "http://a", "10.0.0.1/8", "*"]
)
def test_malformed_rules_are_configuration_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--allow-prefill"):
        parse_allowed(text)


@given(st.ip_addresses(v=4), st.integers(0, 32), st.ip_addresses(v=4))
def test_a_network_matches_by_its_prefix_bits(base: IPv4Address, bits: int, other: IPv4Address) -> None:
    network = IPv4Network((base, bits), strict=False)
    rules = allowed_prefills([], [str(network)])
    same = int(other) >> (32 - bits) == int(base) >> (32 - bits)
    assert is_allowed(rules, str(other), 1) is same
    assert is_allowed(rules, f"::ffff:{other}", 1) is same


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_all_spellings_of_an_ipv6_address_are_equal(address: IPv6Address, port: int) -> None:
    rules = (parse_allowed(f"[{address}]:{port}"),)
    for form in (str(address), address.exploded, address.exploded.upper(), f"[{address}]"):
        assert is_allowed(rules, form, port)
        assert not is_allowed(rules, form, port % 65535 + 1)


@given(st.text(max_size=40), st.integers(-10, 70000))
@example("prefill-0:8000", 8000)
def test_any_text_is_handled_without_an_exception(host: str, port: int) -> None:
    assert not is_allowed((), host, port)
    is_allowed(RULES, host, port)
