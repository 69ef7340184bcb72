"""Public SSH keys by name or id."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from marketplace.ssh_keys.tables import ssh_key
from marketplace.store.db import ReadUnit


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
