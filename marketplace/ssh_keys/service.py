"""Public SSH keys: kept under a name for a person or a team, and looked up when a machine is rented."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import delete, func, select

from marketplace.http.pagination import newest_first
from marketplace.ssh_keys.rules import fingerprint
from marketplace.ssh_keys.tables import ssh_key
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

MAX_KEYS = 100
"""Keys that one owner may keep."""


class SshKey(msgspec.Struct, frozen=True, kw_only=True):
    """A public key."""

    id: str
    name: str
    public_key: str
    fingerprint: str
    created_at: int


class NameTakenError(ValueError):
    """The owner has another key of this name."""


class TooManyKeysError(Exception):
    """The owner keeps as many keys as one may."""


class UnknownSshKeyError(LookupError):
    """The owner has no such key; its text is the name or id."""


def resolve(
    unit: ReadUnit,
    owners: Sequence[tuple[str, str]],
    *,
    names: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
) -> list[str]:
    """Return the public keys of these names or ids that belong to one of the owners, given as (kind, id), in order.
    UnknownSshKeyError."""
    column, asked = (ssh_key.c.name, names) if names is not None else (ssh_key.c.id, ids or [])
    wanted = select(ssh_key.c.owner_kind, ssh_key.c.owner_id, column, ssh_key.c.public_key).where(column.in_(asked))
    found: dict[str, str] = {}
    for kind, owner_id, name, text in unit.select(wanted):
        if (kind, owner_id) in owners:
            found[name] = text
    for name in asked:
        if name not in found:
            raise UnknownSshKeyError(name)
    return [found[name] for name in asked]


_COLUMNS = (ssh_key.c.id, ssh_key.c.name, ssh_key.c.public_key, ssh_key.c.fingerprint, ssh_key.c.created_at)


def add(
    unit: WriteUnit, owner_kind: str, owner_id: str, *, name: str, public_key: str, now: int, random: Random
) -> SshKey:
    """Keep a key under a name. NameTakenError, TooManyKeysError."""
    mine = (ssh_key.c.owner_kind == owner_kind, ssh_key.c.owner_id == owner_id)
    if unit.select(select(func.count()).where(*mine)).scalar_one() >= MAX_KEYS:
        raise TooManyKeysError(f"{MAX_KEYS} keys")
    made = SshKey(
        id=new_id(now, random), name=name, public_key=public_key, fingerprint=fingerprint(public_key), created_at=now
    )
    row = {"owner_kind": owner_kind, "owner_id": owner_id, **msgspec.structs.asdict(made)}
    unit.insert_missing(ssh_key, [row])
    if unit.select(select(ssh_key.c.id).where(ssh_key.c.id == made.id)).one_or_none() is None:
        raise NameTakenError(name)
    return made


def page(unit: ReadUnit, owner_kind: str, owner_id: str, *, cursor: str | None, limit: int) -> list[SshKey]:
    """Return an owner's keys, newest first, one more than `limit` when there are more."""
    wanted = select(*_COLUMNS).where(ssh_key.c.owner_kind == owner_kind, ssh_key.c.owner_id == owner_id)
    rows = unit.select(newest_first(wanted, ssh_key.c.created_at, ssh_key.c.id, cursor, limit))
    return [SshKey(**row._mapping) for row in rows]


def remove(
    unit: WriteUnit,
    owner_kind: str,
    owner_id: str,
    *,
    ids: Collection[str] | None = None,
    names: Collection[str] | None = None,
) -> list[str]:
    """Forget an owner's keys: those of these ids or names, or all; return the ids of those that there were."""
    wanted = select(ssh_key.c.id).where(ssh_key.c.owner_kind == owner_kind, ssh_key.c.owner_id == owner_id)
    if ids is not None:
        wanted = wanted.where(ssh_key.c.id.in_(sorted(ids)))
    if names is not None:
        wanted = wanted.where(ssh_key.c.name.in_(sorted(names)))
    found = list(unit.select(wanted.order_by(ssh_key.c.id).with_for_update()).scalars())
    unit.execute(delete(ssh_key).where(ssh_key.c.id.in_(found)))
    return found
