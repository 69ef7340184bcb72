"""How this server is registered at an issuer, and which addresses secrets may be sent to. Imports nothing that is slow
to import: every start reads it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec


class IssuerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How this server is registered at an issuer."""

    name: str
    """what people know it by"""
    issuer: str
    """its address, exactly as it writes it in tokens"""
    client_id: str
    client_secret: str = ""
    """empty for a client without a secret: PKCE protects it"""

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"IssuerConfig({self.name!r}, {self.issuer!r}, {self.client_id!r})"


def is_safe(url: object) -> bool:
    """Whether secrets may be sent there: https, or this very machine."""
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
    )


def is_loopback(host: str | None) -> bool:
    """Whether a host's name or address is this machine's."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
