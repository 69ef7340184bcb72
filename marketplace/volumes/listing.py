"""Volumes as lists show them: with their type, their datacenter, and what they are attached to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import select

from marketplace.catalog.tables import datacenter
from marketplace.http.pagination import newest_first
from marketplace.store.db import ReadUnit
from marketplace.volumes.tables import volume, volume_attachment, volume_type

_ROWS = (
    select(
        volume,
        volume_type.c.name.label("type_name"),
        volume_type.c.cost_per_gb_month,
        datacenter.c.name.label("datacenter"),
        volume_attachment.c.instance_id,
        volume_attachment.c.mount_path,
    )
    .join(volume_type, volume_type.c.id == volume.c.type_id)
    .join(datacenter, datacenter.c.id == volume.c.datacenter_id)
    .join(
        volume_attachment,
        (volume_attachment.c.volume_id == volume.c.id) & volume_attachment.c.detached_at.is_(None),
        isouter=True,
    )
    .where(volume.c.status != "Deleted")
)


def page(
    unit: ReadUnit,
    account_id: str,
    *,
    ids: Collection[str] | None = None,
    names: Collection[str] | None = None,
    cursor: str | None,
    limit: int,
) -> list[Any]:
    """Return volumes of an account, newest first, one more than `limit` when there are more."""
    wanted = _ROWS.where(volume.c.account_id == account_id)
    if ids is not None:
        wanted = wanted.where(volume.c.id.in_(sorted(ids)))
    if names is not None:
        wanted = wanted.where(volume.c.name.in_(sorted(names)))
    return list(unit.select(newest_first(wanted, volume.c.created_at, volume.c.id, cursor, limit)))


def find(unit: ReadUnit, account_id: str, volume_id: str) -> Any:
    """Return one, or None."""
    found = page(unit, account_id, ids=[volume_id], cursor=None, limit=1)
    return found[0] if found else None
