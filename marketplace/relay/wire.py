"""What a relay and a node say to each other: frames of a length (4 bytes, big-endian) and JSON.

A node's first connection is the control connection: Hello, Attach, Attached; then Open for every client, and a beat.
For each client the node makes one more connection: Hello, Take, Taken, and from there on the client's bytes as they
are, so that a slow side slows the other down, and half a connection closes without the other half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

MAX_FRAME = 256 * 1024
_LENGTH = 4


class ProtocolError(Exception):
    """The other side says something that it cannot say here."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The relay begins, with a number of this connection alone."""

    nonce: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The node shows its grant."""

    grant: str
    nonce: str
    proof: str


class Renew(msgspec.Struct, frozen=True, tag=True):
    """The node shows a newer grant."""

    grant: str
    proof: str


class NotPublished(msgspec.Struct, frozen=True):
    """A port that the relay does not publish, and why."""

    port: int
    reason: str


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The grant is in force."""

    proof: str
    """that the relay has the secret, too"""
    silent_s: float
    """after so long without a word each side takes the other for gone"""
    missing: list[NotPublished] = []


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The relay goes, and says why."""

    message: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """A client came to a port; `stream` is a name that is used once."""

    stream: str
    port: int


class Decline(msgspec.Struct, frozen=True, tag=True):
    """Nobody answers behind the port."""

    stream: str


class Take(msgspec.Struct, frozen=True, tag=True):
    """This connection is for that client."""

    stream: str
    proof: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The client's bytes follow."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Still here. The node answers each with one of its own."""


FromNode = Attach | Renew | Take | Decline | Beat
FromRelay = Hello | Attached | Refused | Open | Taken | Beat
M = TypeVar("M")

FROM_NODE: Callable[[bytes], FromNode] = msgspec.json.Decoder(FromNode).decode
FROM_RELAY: Callable[[bytes], FromRelay] = msgspec.json.Decoder(FromRelay).decode


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent. ProtocolError where it is too long to be read."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than {MAX_FRAME}")
    return len(body).to_bytes(_LENGTH, "big") + body


async def receive(reader: asyncio.StreamReader, decode: Callable[[bytes], M]) -> M:
    """Return the next message. ProtocolError for anything else; IncompleteReadError at the end."""
    length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if length > MAX_FRAME:
        raise ProtocolError(f"a message of {length} bytes is longer than {MAX_FRAME}")
    try:
        return decode(await reader.readexactly(length))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
