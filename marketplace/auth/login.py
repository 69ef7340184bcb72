"""Signing in with e-mail and password, and the second step for those who have a second factor.

Hashing happens before any transaction. An unknown address, a person without a password and a wrong password take the
same work and get the same answer.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update

from marketplace.auth import sessions, totp
from marketplace.auth.sessions import Session
from marketplace.auth.tables import partial_login
from marketplace.auth.totp import Checked
from marketplace.http.errors import Code, Refusal
from marketplace.settings import service as settings
from marketplace.store.db import Database, WriteUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault
from marketplace.users import service as users
from marketplace.users.rules import EmailError, hash_password, needs_rehash, verify_password
from marketplace.users.service import User

PARTIAL_US = 5 * 60 * 1_000_000
"""How long the second step may take."""
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Partial:
    """The password was right; the second factor is still to come."""

    token: str


def check_password(database: Database, email: str, password: str) -> User:
    """Return the person of these credentials. Refusal: InvalidCredentials. Takes about 50 ms on purpose."""
    try:
        with database.read() as unit:
            user = users.find_by_email(unit, email)
    except EmailError:
        user = None
    if not verify_password(None if user is None else user.password_hash, password) or user is None:
        raise Refusal(Code.INVALID_CREDENTIALS, "The e-mail address or the password is wrong.")
    return user


def rehashed(user: User, password: str) -> str | None:
    """A stronger hash of the password just checked, where the stored one has yesterday's parameters."""
    assert user.password_hash is not None, "the password was checked"
    return hash_password(password) if needs_rehash(user.password_hash) else None


def begin(unit: WriteUnit, user: User, *, vault: Vault, now: int, random: Random) -> tuple[str, Session] | Partial:
    """Open a session for somebody whose password was right, or ask for the second factor."""
    if not totp.enabled(unit, user.id):
        return _enter(unit, user.id, vault=vault, now=now, random=random)
    token = base64.urlsafe_b64encode(random(_TOKEN_BYTES)).decode("ascii").rstrip("=")
    unit.execute(delete(partial_login).where(partial_login.c.expires_at <= now))
    unit.execute(
        insert(partial_login).values(digest=_digest(token), user_id=user.id, expires_at=now + PARTIAL_US, tries=0)
    )
    return Partial(token)


def complete(
    unit: WriteUnit, token: str, code: str, *, vault: Vault, now: int, random: Random
) -> tuple[str, Session] | Checked:
    """Open the session when the code is right; the partial token is then used up, and after as many wrong codes as the
    settings allow, too.

    The caller commits whatever the outcome is. Refusal: InvalidPartialToken.
    """
    mine = partial_login.c.digest == _digest(token)
    row = unit.select(select(partial_login).where(mine).with_for_update()).one_or_none()
    if row is None or row.expires_at <= now:
        raise Refusal(Code.INVALID_PARTIAL_TOKEN, "The partial token is not valid any more: log in again.")
    outcome = totp.check(unit, row.user_id, code, confirmed=True, vault=vault, now=now)
    if outcome is Checked.WRONG and row.tries + 1 < settings.current(unit).totp_tries:
        unit.execute(update(partial_login).where(mine).values(tries=row.tries + 1))
        return outcome
    if outcome is Checked.LOCKED:
        return outcome
    unit.execute(delete(partial_login).where(mine))
    return _enter(unit, row.user_id, vault=vault, now=now, random=random) if outcome is Checked.RIGHT else outcome


def abandon(unit: WriteUnit, user_id: str) -> None:
    """Forget the half-finished logins of a person: they began with a password that is not theirs any more."""
    unit.execute(delete(partial_login).where(partial_login.c.user_id == user_id))


def _enter(unit: WriteUnit, user_id: str, *, vault: Vault, now: int, random: Random) -> tuple[str, Session]:
    users.note_login(unit, user_id, now)
    return sessions.open_session(unit, user_id, vault=vault, now=now, random=random)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
