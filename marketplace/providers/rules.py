"""Names and addresses of providers, and which role fits whom, pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from marketplace.users.rules import Role

MAX_NAME = 63
MAX_URL = 2048


def name_key(name: str) -> str:
    """Return the form by which names are compared: case-folded. ValueError for a name that is empty, too long, or
    holds what cannot be printed."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(f"a name has 1 to {MAX_NAME} printable characters and no spaces around them")
    return name.casefold()


def check_url(text: str) -> str:
    """Return the address of a web page. ValueError unless it is http or https, with a host and without a password.

    It is shown as a link and as an image: a scheme like javascript: must not get there.
    """
    wrong = ValueError("a web address like https://example.com/logo.svg")
    if len(text) > MAX_URL or not text.isascii() or not text.isprintable() or " " in text:
        raise wrong
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        raise wrong from None
    if not usable:
        raise wrong
    return text


def role_fits(role: Role, *, is_member: bool) -> bool:
    """Say whether somebody may have a role: people of a provider are of role provider, nobody else is. Admins may
    belong to one too."""
    return is_member if role == "provider" else not is_member or role in ("admin", "readonly_admin")


def role_of_member(role: Role) -> Role:
    """The role of somebody who begins to act for a provider."""
    return "provider" if role == "user" else role


def role_of_leaver(role: Role) -> Role:
    """The role of somebody who no longer acts for a provider."""
    return "user" if role == "provider" else role
