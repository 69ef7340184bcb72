"""What a network may be made of, pure: its addresses and its way out."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

MAX_RANGE = 65_536
"""Addresses of one range."""
_PROXY = re.compile(r"https?://[A-Za-z0-9@:%._\[\]~-]+/?")
_TARGET = re.compile(r"[A-Za-z0-9*._:/\[\]-]+")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(ValueError):
    """Addresses that do not make a network; `field` is the one to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ProxyCredentialsError(ValueError):
    """A proxy's address has a user name or password in it: every renter of the network would read it."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses that instances are given, both ends included, and the public ones of the same number."""

    first: Address
    last: Address
    external_first: Address | None = None
    external_last: Address | None = None


def read_range(field: str, first: str, last: str, external_first: str | None, external_last: str | None) -> Range:
    """Read a range. AddressError."""
    begin, end = _pair(field, first, last)
    if external_first is None and external_last is None:
        return Range(first=begin, last=end)
    if external_first is None or external_last is None:
        raise AddressError(field, "external_from and external_to come together")
    outside, rest = _pair(field, external_first, external_last)
    if int(rest) - int(outside) != int(end) - int(begin):
        raise AddressError(field, "there are not as many external addresses as internal ones")
    return Range(first=begin, last=end, external_first=outside, external_last=rest)


def check_layout(netmask: int, gateway: str | None, server_address: str | None, ranges: Sequence[Range]) -> None:
    """AddressError unless all addresses are of one network, and none is given away twice or belongs to its routers."""
    routers = {name: read_address(name, text) for name, text in _named(gateway, server_address) if text is not None}
    known: list[Address] = [*routers.values(), *(one.first for one in ranges)]
    if not known:
        return
    if len({address.version for address in known}) > 1:
        raise AddressError("ip_ranges", "all addresses are of one family")
    if netmask > known[0].max_prefixlen:
        raise AddressError("netmask", f"a prefix has at most {known[0].max_prefixlen} bits")
    home = ipaddress.ip_network((known[0], netmask), strict=False)
    for name, address in routers.items():
        if address not in home:
            raise AddressError(name, f"it is outside {home}")
    for number, one in enumerate(ranges):
        field = f"ip_ranges.{number}"
        if one.first not in home or one.last not in home:
            raise AddressError(field, f"it is outside {home}")
        if home.version == 4 and home.prefixlen < 31:
            reserved = (home.network_address, home.broadcast_address)
            if any(within(one, address) for address in reserved):
                raise AddressError(field, "it holds the network's own address or that of its broadcasts")
        for name, address in routers.items():
            if within(one, address):
                raise AddressError(field, f"it holds the {name}")
        if any(overlap(one, other) for other in ranges[:number]):
            raise AddressError(field, "it overlaps another range")


def read_address(field: str, text: str) -> Address:
    """Read an address. AddressError."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError as error:
        raise AddressError(field, "an IP address like 192.0.2.7") from error
    if isinstance(found, ipaddress.IPv6Address) and found.scope_id is not None:
        raise AddressError(field, "an address without a zone")
    return found


def within(one: Range, address: Address) -> bool:
    """Whether an address is in a range."""
    return one.first.version == address.version and int(one.first) <= int(address) <= int(one.last)


def overlap(one: Range, other: Range) -> bool:
    """Whether two ranges share an address, internal or external."""
    if _meet(one.first, one.last, other.first, other.last):
        return True
    if one.external_first is None or one.external_last is None:
        return False
    if other.external_first is None or other.external_last is None:
        return False
    return _meet(one.external_first, one.external_last, other.external_first, other.external_last)


def check_proxy_url(url: str) -> str:
    """Return the address of a proxy. ValueError; ProxyCredentialsError. What it may hold is safe in the settings files
    of the guests that it gets into."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ProxyCredentialsError("a proxy's address has no user name and no password")
    try:
        usable = _PROXY.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("a proxy's address is like http://proxy.example:3128")
    return url


def check_target(text: str) -> str:
    """Return what is reached without the proxy: a host, a domain, an address or a block of them. ValueError."""
    if not _TARGET.fullmatch(text):
        raise ValueError("a host, a domain, an address or a block of addresses")
    return text


def _meet(first: Address, last: Address, other_first: Address, other_last: Address) -> bool:
    same = first.version == other_first.version
    return same and int(first) <= int(other_last) and int(other_first) <= int(last)


def _pair(field: str, first: str, last: str) -> tuple[Address, Address]:
    begin, end = read_address(field, first), read_address(field, last)
    if begin.version != end.version or int(begin) > int(end):
        raise AddressError(field, "its end is before its beginning")
    if int(end) - int(begin) >= MAX_RANGE:
        raise AddressError(field, f"a range has at most {MAX_RANGE} addresses")
    return begin, end


def _named(gateway: str | None, server_address: str | None) -> tuple[tuple[str, str | None], ...]:
    return ("gateway", gateway), ("server_address", server_address)
