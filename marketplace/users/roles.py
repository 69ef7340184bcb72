"""Changing what somebody may do on the platform. Sessions and keys stay: what they may do is decided at every
request."""

from __future__ import annotations

from sqlalchemy import select, update

from marketplace.providers import service as providers
from marketplace.providers.rules import role_fits
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.rules import Role
from marketplace.users.service import User
from marketplace.users.tables import users


class LastAdminError(ValueError):
    """Nobody could administer the platform any more."""


class RoleMisfitError(ValueError):
    """People of a provider are of role provider, and nobody else is."""


def change(unit: WriteUnit, user: User, role: Role) -> None:
    """Give a person another role. LastAdminError, RoleMisfitError."""
    guard(unit)
    if role != "admin" and last_admin(unit, user.id):
        raise LastAdminError("the last admin stays one")
    if not role_fits(role, is_member=providers.provider_of(unit, user.id) is not None):
        raise RoleMisfitError("the role provider is for people of a provider, and for nobody else")
    write(unit, user.id, role)


def guard(unit: WriteUnit) -> None:
    """Let nobody else change roles until the unit ends: two admins who demote each other come here one after the
    other."""
    epochs.bump(unit, epochs.USERS)


def last_admin(unit: ReadUnit, user_id: str) -> bool:
    """Say whether a person is the only admin."""
    admins = select(users.c.id).where(users.c.role == "admin", users.c.erased_at.is_(None)).limit(2)
    return list(unit.select(admins).scalars()) == [user_id]


def write(unit: WriteUnit, user_id: str, role: Role) -> None:
    """Set a person's role, whatever it was."""
    unit.execute(update(users).where(users.c.id == user_id).values(role=role))
