"""What each role may do, pure. Permissions are named noun.verb; `capabilities/list` shows them in this form."""

from __future__ import annotations

from enum import StrEnum

from marketplace.users.rules import Role


class Permission(StrEnum):
    """One thing that a caller may be allowed to do."""

    AUTH_SELF = "auth.self"
    TOTP_MANAGE = "totp.manage"
    KEYS_READ = "keys.read"
    KEYS_WRITE = "keys.write"
    ACCOUNT_READ = "account.read"
    ACCOUNT_READ_ALL = "account.read_all"
    ACCOUNT_ADJUST = "account.adjust"
    EVENTS_READ = "events.read"
    EVENTS_READ_ALL = "events.read_all"


_OWN = frozenset(
    {
        Permission.AUTH_SELF,
        Permission.TOTP_MANAGE,
        Permission.KEYS_READ,
        Permission.KEYS_WRITE,
        Permission.ACCOUNT_READ,
        Permission.EVENTS_READ,
    }
)
_SEE_ALL = frozenset({Permission.ACCOUNT_READ_ALL, Permission.EVENTS_READ_ALL})

OF_ROLE: dict[Role, frozenset[Permission]] = {
    "user": _OWN,
    "provider": _OWN,
    "readonly_admin": _OWN | _SEE_ALL,
    "admin": frozenset(Permission),
}
"""Everybody looks after what is their own; a read-only admin also sees what is others', and changes nothing there."""

OF_TEAM_KEY = frozenset({Permission.AUTH_SELF, Permission.ACCOUNT_READ, Permission.EVENTS_READ})
"""A team's key speaks for the team, not for one of its people."""
