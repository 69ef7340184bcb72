"""What a node may publish at a relay: grants that the server signs, and proofs of having one.

The server and the relay of a datacenter share a secret. The key of a grant is HMAC-SHA256 of its text under that
secret: the server gives text and key to the node, the node shows the relay the text, and proves with the key, over
numbers that both sides have just drawn, that the grant is its own. The key never crosses the way between node and
relay, so nothing that is overheard there can be used a second time.
"""

from __future__ import annotations

import hmac
from typing import Literal

import msgspec

SECRET_BYTES = 32
_DOMAIN = b"headrace relay grant 1\0"

Purpose = Literal["attach", "attached", "renew", "take"]


class GrantError(ValueError):
    """A grant that is not the server's, not this node's, or not in force. The message says which."""


class GrantedPort(msgspec.Struct, frozen=True):
    """A port of the relay, and the lease that gives it."""

    port: int
    lease: str
    """ids of leases sort by the moment at which they began: of two that name a port, the later one has it"""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """All that one node may publish. A grant replaces the ones before it."""

    node: str
    epoch: int
    """of the node's session"""
    rev: int
    """the revision of the node's desired state that it follows"""
    expires_at: int
    """microseconds since 1970, UTC"""
    ports: list[GrantedPort]

    @property
    def serial(self) -> tuple[int, int]:
        """Which of two grants of a node is the newer one; equal for what was signed twice."""
        return self.epoch, self.rev


def write(grant: Grant) -> str:
    """Return the text of a grant."""
    return msgspec.json.encode(grant).decode()


def key_of(secret: bytes, text: str) -> bytes:
    """Return the key of a grant; only who has the secret can make it."""
    return hmac.digest(secret, _DOMAIN + text.encode(), "sha256")


def prove(key: bytes, purpose: Purpose, *parts: str) -> str:
    """Return the proof of having a grant's key. `parts` are what it holds for: numbers drawn by both sides."""
    said = msgspec.json.encode([purpose, *parts])
    return hmac.digest(key, said, "sha256").hex()


def proved(key: bytes, proof: str, purpose: Purpose, *parts: str) -> bool:
    """Whether a proof is one, compared in constant time."""
    return hmac.compare_digest(prove(key, purpose, *parts).encode(), proof.encode())


def read(text: str, now: int) -> Grant:
    """Read a grant whose proof was checked. GrantError where it cannot be read or is over."""
    try:
        grant = msgspec.json.decode(text, type=Grant)
    except msgspec.MsgspecError as error:
        raise GrantError(f"the grant cannot be read: {error}") from error
    if grant.expires_at <= now:
        raise GrantError("the grant has expired: ask the server for a new one, and look at the clocks")
    return grant
