"""The keys that sign session tokens: kept encrypted in the database, so that every gateway on it knows them all.

The newest signs. It is replaced after ROTATE_US; the ones before it still verify until no token of theirs can be
alive, and are then removed.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import bindparam, delete, insert, select

from marketplace.auth.tables import signing_key
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.store.vault import Vault

KEY_BYTES = 32
DAY_US = 86_400_000_000
SESSION_US = 30 * DAY_US
"""How long a session token lives."""
ROTATE_US = 90 * DAY_US
_BY_ID = select(signing_key.c.sealed).where(signing_key.c.id == bindparam("id"))


class SigningKey(msgspec.Struct, frozen=True):
    """A key and the id by which tokens name it."""

    id: str
    secret: bytes

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"SigningKey({self.id})"


def current(unit: WriteUnit, *, vault: Vault, now: int, random: Random) -> SigningKey:
    """Return the key that signs now, making one when there is none or the newest is old."""
    newest = unit.select(
        select(signing_key)
        .where(signing_key.c.created_at > now - ROTATE_US)
        .order_by(signing_key.c.created_at.desc(), signing_key.c.id.desc())
        .limit(1)
    ).one_or_none()
    if newest is not None:
        return SigningKey(newest.id, vault.open(newest.sealed, _context(newest.id)))
    key = SigningKey(new_id(now, random), random(KEY_BYTES))
    sealed = vault.seal(key.secret, _context(key.id), random)
    unit.execute(delete(signing_key).where(signing_key.c.created_at <= now - ROTATE_US - SESSION_US))
    unit.execute(insert(signing_key).values(id=key.id, sealed=sealed, created_at=now))
    return key


def find(unit: ReadUnit, key_id: str, vault: Vault) -> SigningKey | None:
    """Return the key of that id. VaultError when it cannot be opened."""
    sealed = unit.select(_BY_ID, {"id": key_id}).scalar_one_or_none()
    return None if sealed is None else SigningKey(key_id, vault.open(sealed, _context(key_id)))


def _context(key_id: str) -> str:
    return f"signing key {key_id}"
