"""Types of volumes: what a datacenter offers, and what a gigabyte of it costs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from marketplace.catalog.tables import datacenter
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.volumes.tables import volume_type


class NameTakenError(ValueError):
    """The datacenter has a type of this name."""


_ROWS = select(volume_type, datacenter.c.name.label("datacenter"), datacenter.c.provider_id.label("provider_id")).join(
    datacenter, datacenter.c.id == volume_type.c.datacenter_id
)
_OFFERED = volume_type.c.removed_at.is_(None)


def every(unit: ReadUnit) -> list[Any]:
    """Return all types on offer."""
    return list(unit.select(_ROWS.where(_OFFERED).order_by(datacenter.c.name, volume_type.c.name)))


def find(unit: ReadUnit, type_id: str) -> Any:
    """Return a type on offer, or None."""
    return unit.select(_ROWS.where(_OFFERED, volume_type.c.id == type_id)).one_or_none()


def named(unit: ReadUnit, datacenter_id: str, name: str) -> Any:
    """Return what a datacenter offers under a name, or None."""
    mine = (_OFFERED, volume_type.c.datacenter_id == datacenter_id, volume_type.c.name == name)
    return unit.select(_ROWS.where(*mine)).one_or_none()


def add(unit: WriteUnit, *, datacenter_id: str, name: str, cost_per_gb_month: int, now: int, random: Random) -> str:
    """Offer a type and return its id. NameTakenError."""
    epochs.bump(unit, epochs.PROVIDERS)  # of two that want a name, the second comes here after the first is done
    if named(unit, datacenter_id, name) is not None:
        raise NameTakenError(name)
    type_id = new_id(now, random)
    unit.execute(
        insert(volume_type).values(
            id=type_id,
            name=name,
            datacenter_id=datacenter_id,
            cost_per_gb_month=cost_per_gb_month,
            created_at=now,
            removed_at=None,
        )
    )
    return type_id


def remove(unit: WriteUnit, type_id: str, now: int) -> None:
    """Offer a type no more. Volumes of it stay, and cost what they did."""
    unit.execute(update(volume_type).where(volume_type.c.id == type_id).values(removed_at=now))
