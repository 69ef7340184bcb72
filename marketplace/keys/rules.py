"""The format of a key, pure: `hr_u_` + 43 characters of secret + 6 characters of checksum.

The prefix names whom the key speaks for. The secret is 256 random bits in base 62. The checksum is CRC-32 of all that
precedes it: a mistyped key is refused without a look-up, and secret scanners can recognise a leaked one.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from typing import Literal, get_args

import msgspec

from marketplace.store.ids import Random

KeyKind = Literal["user", "team", "node", "service"]
KINDS: tuple[KeyKind, ...] = get_args(KeyKind)
PREFIXES: dict[KeyKind, str] = {"user": "hr_u_", "team": "hr_t_", "node": "hr_n_", "service": "hr_s_"}

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_BYTES = 32
_SECRET_CHARS = 43  # 62**43 > 2**256
_CHECK_CHARS = 6  # 62**6 > 2**32
_LOOKUP_CHARS = 8
PEPPER_BYTES = 32


class KeyFormatError(ValueError):
    """The text is not a key. Its message never contains the text."""


class KeySecret(msgspec.Struct, frozen=True):
    """A well-formed key. `text` is the secret itself: it is shown once and never logged, which is why repr hides it."""

    kind: KeyKind
    text: str

    @property
    def lookup(self) -> str:
        """The part that may be shown and stored: prefix and 8 characters."""
        return self.text[: len(PREFIXES[self.kind]) + _LOOKUP_CHARS]

    def __repr__(self) -> str:
        """Show only the lookup part."""
        return f"KeySecret({self.lookup}…)"


def new_secret(kind: KeyKind, random: Random) -> KeySecret:
    """Make a key of 256 random bits."""
    body = PREFIXES[kind] + _base62(int.from_bytes(random(_SECRET_BYTES), "big"), _SECRET_CHARS)
    return KeySecret(kind, body + _checksum(body))


def parse(text: str) -> KeySecret:
    """Read a key. KeyFormatError for another prefix, length, alphabet or checksum."""
    kind = next((kind for kind, prefix in PREFIXES.items() if text.startswith(prefix)), None)
    if kind is None:
        raise KeyFormatError("the key does not begin with a known prefix")
    prefix = PREFIXES[kind]
    if len(text) != len(prefix) + _SECRET_CHARS + _CHECK_CHARS:
        raise KeyFormatError("the key does not have the length of a key")
    body, check = text[:-_CHECK_CHARS], text[-_CHECK_CHARS:]
    if not (text.isascii() and text[len(prefix) :].isalnum() and _checksum(body) == check):
        raise KeyFormatError("the key's checksum does not fit: it was mistyped or cut")
    return KeySecret(kind, text)


def digest(secret: KeySecret, pepper: bytes) -> bytes:
    """Return HMAC-SHA256 of the key under the pepper: what is stored and looked up.

    A fast hash is right here, unlike for passwords: 256 random bits cannot be guessed, and it is computed at every
    request. ValueError for a pepper shorter than PEPPER_BYTES.
    """
    if len(pepper) < PEPPER_BYTES:
        raise ValueError(f"the pepper needs at least {PEPPER_BYTES} bytes")
    return hmac.digest(pepper, secret.text.encode("ascii"), hashlib.sha256)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode("ascii", "replace")), _CHECK_CHARS)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
