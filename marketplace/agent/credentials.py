"""How a node proves who it is: with the key of a node, from the environment or from a file.

A token, a personal access token, or a name with a password still work where the server admits them, and are deprecated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

ENVIRONMENT = "HEADRACE_NODE_KEY"
FILE = "credentials.json"
PREFIX = "hr_n_"
"""What the keys of nodes begin with."""
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+")


class CredentialError(Exception):
    """There is no credential, or it cannot be read. The message says what to do; it never contains a secret."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a credentials file may hold. Any one of the ways is enough; the key wins over the others."""

    api_key: str | None = None
    token: str | None = None
    """a session's token"""
    pat: str | None = None
    """a personal access token"""
    email: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        """Never show a secret."""
        return f"Credentials({self.method})"

    @property
    def method(self) -> str:
        """Which way is taken."""
        if self.api_key:
            return "key"
        if self.token:
            return "token"
        if self.pat:
            return "personal access token"
        return "password" if self.email and self.password else "none"

    @property
    def deprecated(self) -> str | None:
        """The warning that the operator gets; None for a key."""
        if self.method == "key":
            return None
        return (
            f"signing in by {self.method} is deprecated and will be removed: make a key of kind node, and set "
            f"{ENVIRONMENT} or write it to the credentials file as api_key"
        )

    def headers(self) -> dict[str, str]:
        """Headers of every request; empty for a password, which is exchanged for a token first."""
        if self.api_key:
            return {"X-API-Key": self.api_key}
        bearer = self.token or self.pat
        return {"Authorization": f"Bearer {bearer}"} if bearer else {}


def load(environment: Mapping[str, str], file: Path) -> Credentials:
    """The credential of this node: the environment's key, else the file's, which may hold a key or a token and nothing
    else, or JSON. Raises CredentialError.
    """
    key = environment.get(ENVIRONMENT, "").strip()
    if key:
        return Credentials(api_key=_of_node(key, ENVIRONMENT))
    try:
        text = file.read_text("utf-8").strip()
    except FileNotFoundError as error:
        raise CredentialError(f"there is no key: set {ENVIRONMENT}, or write it to {file}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialError(f"{file} cannot be read: {error}") from error
    if text.startswith("hr_"):
        return Credentials(api_key=_of_node(text, str(file)))
    if _TOKEN.fullmatch(text):
        return Credentials(token=text)
    try:
        found = msgspec.json.decode(text, type=Credentials)
    except msgspec.MsgspecError as error:
        raise CredentialError(f"{file} is neither a key nor a JSON object of credentials: {error}") from error
    if found.method == "none":
        raise CredentialError(f"{file} holds no credential: it needs api_key")
    if found.api_key:
        _of_node(found.api_key, f"api_key in {file}")
    for name in ("token", "pat"):
        value = getattr(found, name) or ""
        if not (value.isascii() and value.isprintable()):
            raise CredentialError(f"{name} in {file} has characters in it that no token has")
    return found


def _of_node(key: str, where: str) -> str:
    if not key.startswith(PREFIX):
        raise CredentialError(f"{where} is no key of a node: those begin with {PREFIX}")
    if not _KEY.fullmatch(key):
        raise CredentialError(f"{where} is no key of a node: it has more in it than letters and digits")
    return key


def protect(file: Path) -> None:
    """Take the file's permissions from everybody but its owner."""
    if file.exists() and file.stat().st_mode & 0o077:
        file.chmod(0o600)
