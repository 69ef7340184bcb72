"""How a node asks the server for what it may publish at a relay: a message under `/agent/v1/`, and its answer."""

from __future__ import annotations

import msgspec


class Relaying(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a grant for the relay."""

    session_id: str
    epoch: int


class RelayGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Where the relay is, what the node may publish there, and the key that proves that it may."""

    host: str
    port: int
    grant: str
    """its text, which the relay is shown"""
    key: str
    """hexadecimal; it stays with the node"""

    def __repr__(self) -> str:
        """Never show the key."""
        return f"RelayGrant({self.host!r}, {self.port})"


class RelayAnswer(msgspec.Struct, frozen=True):
    """The grant; None where the node's ports are not published by a relay."""

    access: RelayGrant | None = None
