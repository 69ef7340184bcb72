"""Keys: create, list, revoke, and load all that may be used into memory.

Every change raises the keys epoch in the same transaction; whoever keeps a copy polls `key_epoch` and loads again
when it moved.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Row, Select, insert, select, update

from marketplace.keys.rules import KeyKind, KeySecret, digest, new_secret
from marketplace.keys.tables import api_key
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

MAX_NAME = 63


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored: everything but the secret. Null limits do not limit."""

    id: str
    kind: KeyKind
    owner_id: str
    account_id: str | None
    name: str
    prefix: str
    digest: bytes
    created_at: int
    created_by: str | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    allowed_models: tuple[str, ...] | None = None
    allowed_addresses: tuple[str, ...] | None = None
    budget: int | None = None
    budget_period: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None

    def __repr__(self) -> str:
        """Leave the digest out: it has no place in a log."""
        return f"KeyRow({self.id}, {self.prefix}…, {self.name!r})"


class UnknownKeyError(LookupError):
    """There is no key of that id, name or prefix, or it is revoked."""


class KeyNameError(ValueError):
    """A key's name is empty or too long."""


def create(
    unit: WriteUnit,
    *,
    kind: KeyKind,
    owner_id: str,
    account_id: str | None,
    name: str,
    pepper: bytes,
    now: int,
    random: Random,
    created_by: str | None = None,
    expires_at: int | None = None,
    allowed_models: Collection[str] | None = None,
) -> tuple[KeyRow, KeySecret]:
    """Make a key and return its row and its secret. The secret exists nowhere else afterwards.

    KeyNameError for a name that is empty or longer than MAX_NAME characters.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise KeyNameError(f"a key's name has 1 to {MAX_NAME} printable characters")
    secret = new_secret(kind, random)
    row = KeyRow(
        id=new_id(now, random),
        kind=kind,
        owner_id=owner_id,
        account_id=account_id,
        name=name,
        prefix=secret.lookup,
        digest=digest(secret, pepper),
        created_at=now,
        created_by=created_by,
        expires_at=expires_at,
        allowed_models=None if allowed_models is None else tuple(sorted(allowed_models)),
    )
    values = msgspec.structs.asdict(row)
    for column in ("allowed_models", "allowed_addresses"):
        values[column] = None if values[column] is None else msgspec.json.encode(values[column]).decode()
    unit.execute(insert(api_key).values(values))
    epochs.bump(unit, epochs.KEYS)
    return row, secret


def revoke(unit: WriteUnit, key_id: str, *, now: int) -> None:
    """Make a key unusable for ever. UnknownKeyError when there is no such key or it was revoked before."""
    changed = unit.execute(
        update(api_key).where(api_key.c.id == key_id, api_key.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    if changed.rowcount == 0:
        raise UnknownKeyError(f"no usable key {key_id}")
    epochs.bump(unit, epochs.KEYS)


def find(unit: ReadUnit, text: str, owner_id: str | None = None) -> KeyRow:
    """Return the one usable key of that id, lookup prefix or name. UnknownKeyError when there is none, or several of
    the name."""
    wanted = select(api_key).where(
        api_key.c.revoked_at.is_(None),
        (api_key.c.id == text) | (api_key.c.prefix == text) | (api_key.c.name == text),
    )
    if owner_id is not None:
        wanted = wanted.where(api_key.c.owner_id == owner_id)
    found = _rows(unit, wanted)
    if len(found) != 1:
        raise UnknownKeyError(f"{'no' if not found else 'more than one'} usable key {text!r}")
    return found[0]


def list_keys(unit: ReadUnit, owner_id: str | None = None) -> list[KeyRow]:
    """Return the keys of an owner, or all, revoked ones too, newest first."""
    wanted = select(api_key).order_by(api_key.c.created_at.desc(), api_key.c.id.desc())
    if owner_id is not None:
        wanted = wanted.where(api_key.c.owner_id == owner_id)
    return _rows(unit, wanted)


def load_active(unit: ReadUnit) -> list[KeyRow]:
    """Return every key that is not revoked. Whoever uses one compares `expires_at` with the clock at that moment."""
    return _rows(unit, select(api_key).where(api_key.c.revoked_at.is_(None)))


def key_epoch(unit: ReadUnit) -> int:
    """Return the number that rises whenever a key is made, changed or revoked."""
    return epochs.current(unit, epochs.KEYS)


def _rows(unit: ReadUnit, wanted: Select[*tuple[object, ...]]) -> list[KeyRow]:
    return [_row(row) for row in unit.select(wanted)]


def _row(row: Row[*tuple[object, ...]]) -> KeyRow:
    values = dict(row._mapping)
    for column in ("allowed_models", "allowed_addresses"):
        if values[column] is not None:
            values[column] = msgspec.json.decode(values[column], type=tuple[str, ...])
    return KeyRow(**values)
