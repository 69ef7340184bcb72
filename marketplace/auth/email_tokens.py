"""Tokens that are sent by mail: whoever brings one back reads the mail of that address.

Only a digest is stored. A token works once, and the first of a person's tokens that works ends their others of the
same purpose. Asking for another one does not end the earlier: else a stranger who keeps asking could keep a person
out.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Literal

from sqlalchemy import delete, insert, select

from marketplace.auth.tables import email_token
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random
from marketplace.users.tables import users

Purpose = Literal["verify", "reset"]
HOUR_US = 3_600_000_000
LIFE_US: dict[Purpose, int] = {"verify": 24 * HOUR_US, "reset": HOUR_US}
"""How long a token may be used."""
_BYTES = 32


def issue(unit: WriteUnit, user_id: str, purpose: Purpose, *, now: int, random: Random) -> str:
    """Make a token for a person; it is not kept anywhere."""
    token = base64.urlsafe_b64encode(random(_BYTES)).decode("ascii").rstrip("=")
    unit.execute(delete(email_token).where(email_token.c.expires_at <= now))
    unit.execute(
        insert(email_token).values(
            digest=_digest(token),
            user_id=user_id,
            purpose=purpose,
            created_at=now,
            expires_at=now + LIFE_US[purpose],
        )
    )
    return token


def use(unit: WriteUnit, token: str, purpose: Purpose, now: int) -> str | None:
    """Use a token up and return whose it was; None for one that is unknown, used, expired or for something else."""
    mine = (email_token.c.digest == _digest(token), email_token.c.purpose == purpose, email_token.c.expires_at > now)
    user_id: str | None = unit.select(select(email_token.c.user_id).where(*mine)).scalar_one_or_none()
    if user_id is None:
        return None
    # The person first, on PostgreSQL: what several tokens of theirs do at once is then done one after the other.
    unit.select(select(users.c.id).where(users.c.id == user_id).with_for_update())
    if unit.execute(delete(email_token).where(*mine)).rowcount != 1:
        return None  # another request used it while this one waited
    end_all(unit, user_id, purpose)
    return user_id


def end_all(unit: WriteUnit, user_id: str, purpose: Purpose | None = None) -> None:
    """Make a person's tokens worthless: those for a purpose, or all."""
    mine = delete(email_token).where(email_token.c.user_id == user_id)
    unit.execute(mine if purpose is None else mine.where(email_token.c.purpose == purpose))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
