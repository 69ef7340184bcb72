"""The second factor: six digits that an authenticator app makes from a shared secret and the time (RFC 6238).

A code is accepted once: the time step of the last accepted one is kept, and only later steps count. As many wrong
codes in a row as the settings allow lock the factor for a quarter of an hour, whichever way they came in.
"""

from __future__ import annotations

import base64
import hmac
from enum import Enum

import msgspec
import pyotp
from sqlalchemy import Row, delete, insert, select, update

from marketplace.auth.tables import totp
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault

STEP_S = 30
DRIFT_STEPS = 1
"""Clocks may differ by one step either way."""
SECRET_BYTES = 20
LOCK_US = 15 * 60 * 1_000_000


class Checked(Enum):
    """What became of a code."""

    RIGHT = "right"
    WRONG = "wrong"
    LOCKED = "locked"
    """too many wrong ones before; it was not looked at"""
    NO_FACTOR = "no factor"
    """there is nothing to check it against"""


class Setup(msgspec.Struct, frozen=True):
    """What a person puts into an authenticator app; shown once."""

    secret: str
    uri: str

    def __repr__(self) -> str:
        """Leave the secret out."""
        return "Setup()"


def enabled(unit: ReadUnit, user_id: str) -> bool:
    """Whether the person has a confirmed second factor."""
    row = _row(unit, user_id)
    return row is not None and row.confirmed_at is not None


def begin(
    unit: WriteUnit, user_id: str, *, label: str, issuer: str, vault: Vault, now: int, random: Random
) -> Setup | None:
    """Make a secret that counts once it is confirmed; a second one replaces the first. None when 2FA is on already."""
    row = _row(unit, user_id)
    if row is not None and row.confirmed_at is not None:
        return None
    secret = base64.b32encode(random(SECRET_BYTES)).decode("ascii")
    unit.execute(delete(totp).where(totp.c.user_id == user_id))
    unit.execute(
        insert(totp).values(
            user_id=user_id,
            sealed=vault.seal(secret.encode("ascii"), _context(user_id), random),
            created_at=now,
            confirmed_at=None,
            last_step=0,
            # A new secret does not forgive guesses at the one before.
            failures=0 if row is None else row.failures,
            locked_until=0 if row is None else row.locked_until,
        )
    )
    return Setup(secret, pyotp.TOTP(secret, interval=STEP_S).provisioning_uri(name=label, issuer_name=issuer))


def check(unit: WriteUnit, user_id: str, code: str, *, confirmed: bool, vault: Vault, now: int) -> Checked:
    """Check a code against a confirmed factor, or one still to be confirmed, and remember the outcome.

    The caller commits whatever the outcome is: a wrong code that is rolled back is not counted.
    """
    row = _row(unit, user_id)
    if row is None or (row.confirmed_at is not None) != confirmed:
        return Checked.NO_FACTOR
    if now < row.locked_until:
        return Checked.LOCKED
    secret = vault.open(row.sealed, _context(user_id)).decode("ascii")
    step = matching_step(secret, code, now // 1_000_000 // STEP_S)
    change: dict[str, int]
    if step is None or step <= row.last_step:
        failures = row.failures + 1
        change = {"failures": failures}
        if failures % settings.current(unit).totp_tries == 0:
            change["locked_until"] = now + LOCK_US
    else:
        change = {"last_step": step, "failures": 0, "locked_until": 0}
    unit.execute(update(totp).where(totp.c.user_id == user_id).values(**change))
    return Checked.RIGHT if "last_step" in change else Checked.WRONG


def matching_step(secret: str, code: str, now_step: int) -> int | None:
    """Return the newest time step within the drift whose code this is; every candidate is compared, in constant
    time."""
    made = pyotp.TOTP(secret, interval=STEP_S)
    found = None
    for step in range(max(0, now_step - DRIFT_STEPS), now_step + DRIFT_STEPS + 1):
        if hmac.compare_digest(made.generate_otp(step), code):
            found = step
    return found


def confirm(unit: WriteUnit, user_id: str, now: int) -> None:
    """Switch the factor on."""
    unit.execute(update(totp).where(totp.c.user_id == user_id).values(confirmed_at=now))


def remove(unit: WriteUnit, user_id: str) -> None:
    """Switch the factor off and forget its secret."""
    unit.execute(delete(totp).where(totp.c.user_id == user_id))


def _row(unit: ReadUnit, user_id: str) -> Row[*tuple[object, ...]] | None:
    # A lock on PostgreSQL: of two requests with the same code only one may find it unused.
    wanted = select(totp).where(totp.c.user_id == user_id)
    if isinstance(unit, WriteUnit):
        wanted = wanted.with_for_update()
    return unit.select(wanted).one_or_none()


def _context(user_id: str) -> str:
    return f"totp {user_id}"
