"""What a public SSH key is, pure."""

from __future__ import annotations

import base64
import binascii
import hashlib

MAX_TEXT = 16_384
KINDS = frozenset(
    {
        "ssh-ed25519",
        "ssh-rsa",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "sk-ssh-ed25519@openssh.com",
        "sk-ecdsa-sha2-nistp256@openssh.com",
    }
)
"""As OpenSSH names them; its old DSA is not among them."""
_SHORTEST_RSA = 256
"""Bytes of an RSA key of 2048 bits."""


def check_public_key(text: str) -> str:
    """Return a public key as one line of `authorized_keys` without options. ValueError for everything else: a private
    key, several keys, a key whose data is of another kind than it says, or one that is too weak."""
    line = text.strip()
    if "PRIVATE KEY" in line:
        raise ValueError("a public key; this is a private one, which nobody should have been sent")
    parts = line.split(None, 2)
    if not line.isprintable() or len(line) > MAX_TEXT or len(parts) < 2 or parts[0] not in KINDS:
        raise ValueError("a public key in one line, like 'ssh-ed25519 AAAA… me@laptop'")
    fields = _fields(parts[1])
    if fields[0] != parts[0].encode() or len(fields) < 2:
        raise ValueError("the key's data is of another kind than it says")
    if parts[0] == "ssh-rsa" and len(fields[-1].lstrip(b"\0")) < _SHORTEST_RSA:
        raise ValueError("an RSA key has at least 2048 bits")
    return " ".join(parts)


def fingerprint(public_key: str) -> str:
    """The SHA-256 fingerprint of a key as OpenSSH writes it."""
    data = base64.b64decode(public_key.split(None, 2)[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _fields(text: str) -> list[bytes]:
    """The strings of a key's data: each after its length in four bytes (RFC 4251, 5)."""
    wrong = ValueError("the key's data is cut off or mistyped")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong from error
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 or len(data) < 4 + size:
            raise wrong
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    if not found:
        raise wrong
    return found
