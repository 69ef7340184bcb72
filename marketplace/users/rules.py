"""E-mail addresses and passwords, pure. Hashing takes about 50 ms on purpose: do it before a transaction begins,
never inside."""

from __future__ import annotations

from functools import cache
from typing import Literal

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from marketplace.store.ids import Random

Role = Literal["admin", "readonly_admin", "provider", "user"]
MAX_EMAIL = 254
MIN_PASSWORD = 8
MAX_PASSWORD = 1024
_READABLE = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 characters that nobody confuses

_hasher = PasswordHasher()


class EmailError(ValueError):
    """The text cannot be an e-mail address."""


class PasswordError(ValueError):
    """The password is too short or too long. Its message never contains it."""


def email_key(email: str) -> str:
    """Return the form by which addresses are compared: case-folded. EmailError for what cannot be one.

    Only the shape is checked: one @, something on both sides, no spaces or control characters. Whether mail arrives
    is for mail to say.
    """
    local, at, domain = email.rpartition("@")
    if not at or not local or not domain or len(email) > MAX_EMAIL or not email.isprintable() or " " in email:
        raise EmailError("not an e-mail address")
    return email.casefold()


def hash_password(password: str) -> str:
    """Return the argon2id hash, salt and parameters included. PasswordError for a length outside
    MIN_PASSWORD..MAX_PASSWORD."""
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise PasswordError(f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters")
    return _hasher.hash(password)


def verify_password(stored: str | None, password: str) -> bool:
    """Say whether the password fits the stored hash. For an account without one it takes as long, and the answer is
    no."""
    try:
        return _hasher.verify(stored or _nobody(), password) and stored is not None
    except (VerificationError, InvalidHashError):
        return False


def needs_rehash(stored: str) -> bool:
    """Say whether the hash was made with weaker parameters than today's."""
    return _hasher.check_needs_rehash(stored)


def new_password(random: Random) -> str:
    """Return a password of 20 readable characters in groups: 100 random bits."""
    characters = [_READABLE[byte % 32] for byte in random(20)]
    return "-".join("".join(characters[start : start + 5]) for start in range(0, 20, 5))


@cache
def _nobody() -> str:
    return _hasher.hash("nobody has this password")
