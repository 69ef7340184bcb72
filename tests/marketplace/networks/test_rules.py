"""Addresses of a network, and its way out."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marketplace.networks.rules import (
    AddressError,
    ProxyCredentialsError,
    check_layout,
    check_proxy_url,
    check_target,
    overlap,
    read_range,
)

_NUMBERS = st.integers(0, 200)


def test_a_layout_that_works() -> None:
    inner = read_range("r", "192.168.1.100", "192.168.1.150", "203.0.113.0", "203.0.113.50")
    check_layout(
        24, "192.168.1.1", "192.168.1.2", [inner, read_range("r", "192.168.1.151", "192.168.1.160", None, None)]
    )
    check_layout(64, None, None, [read_range("r", "2001:db8::10", "2001:db8::ff", None, None)])
    check_layout(24, None, None, [])


@pytest.mark.parametrize(
    ("netmask", "gateway", "ranges", "field"),
    [
        (24, "192.168.2.1", [("192.168.1.10", "192.168.1.20")], "ip_ranges.0"),
        (24, "192.168.1.15", [("192.168.1.10", "192.168.1.20")], "ip_ranges.0"),
        (24, None, [("192.168.1.10", "192.168.1.20"), ("192.168.1.20", "192.168.1.30")], "ip_ranges.1"),
        (24, None, [("192.168.1.0", "192.168.1.20")], "ip_ranges.0"),
        (24, None, [("192.168.1.200", "192.168.1.255")], "ip_ranges.0"),
        (33, None, [("192.168.1.10", "192.168.1.20")], "netmask"),
        (24, "2001:db8::1", [("192.168.1.10", "192.168.1.20")], "ip_ranges"),
    ],
)
def test_a_layout_that_does_not(netmask: int, gateway: str | None, ranges: list[tuple[str, str]], field: str) -> None:
    read = [read_range("r", first, last, None, None) for first, last in ranges]
    with pytest.raises(AddressError) as caught:
        check_layout(netmask, gateway, None, read)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "ends",
    [
        ("10.0.0.9", "10.0.0.1", None, None),
        ("10.0.0.1", "::1", None, None),
        ("10.0.0.1", "10.2.0.1", None, None),
        ("10.0.0.1", "10.0.0.2", "203.0.113.1", None),
        ("10.0.0.1", "10.0.0.2", "203.0.113.1", "203.0.113.3"),
        ("10.0.0", "10.0.0.2", None, None),
        ("fe80::1%eth0", "fe80::2%eth0", None, None),
    ],
)
def test_what_is_no_range(ends: Any) -> None:
    with pytest.raises(AddressError, match=r"^r: "):
        read_range("r", *ends)


@settings(max_examples=50)
@given(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS)
def test_ranges_overlap_where_they_share_an_address(a: int, b: int, c: int, d: int) -> None:
    (a, b), (c, d) = sorted((a, b)), sorted((c, d))
    base = ipaddress.ip_address("10.0.0.0")
    one, other = (read_range("r", str(base + x), str(base + y), None, None) for x, y in ((a, b), (c, d)))
    assert overlap(one, other) == bool({*range(a, b + 1)} & {*range(c, d + 1)}) == overlap(other, one)


@pytest.mark.parametrize("url", ["http://proxy:3128", "https://proxy.example/", "http://[2001:db8::1]:8080"])
def test_addresses_of_proxies(url: str) -> None:
    assert check_proxy_url(url) == url


@pytest.mark.parametrize("url", ["http://user:pass@proxy:3128", "http://user@proxy", "https://:secret@proxy"])
def test_a_proxy_with_credentials_is_refused_whatever_they_look_like(url: str) -> None:
    with pytest.raises(ProxyCredentialsError):
        check_proxy_url(url)


@pytest.mark.parametrize(
    "url", ["proxy:3128", "ftp://proxy", "http://", "http://p:99999", "http://p/a b", 'http://p";reboot', "http://p\n"]
)
def test_what_is_no_proxy(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_proxy_url(url)


def test_targets_hold_nothing_that_a_settings_file_gives_a_meaning_to() -> None:
    for text in ("10.0.0.0/8", ".corp.example", "*.example", "localhost", "[::1]"):
        assert check_target(text) == text
    for text in ("a b", "a,b", 'a"', "a;b", "$(x)", "a\n", ""):
        with pytest.raises(ValueError, match="host"):
            check_target(text)
