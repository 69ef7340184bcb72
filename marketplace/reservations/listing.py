"""Reservations as lists show them: with what they are for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import func, select

from marketplace.catalog.tables import instance_type, instance_variant
from marketplace.http.pagination import newest_first
from marketplace.nodes.tables import node
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit

_TYPE = func.coalesce(instance_variant.c.type_name, node.c.instance_type)
_ROWS = (
    select(
        reservation,
        instance_type.c.name.label("type_name"),
        instance_type.c.kernel_modules,
        instance_variant.c.gpu_count,
    )
    .join(instance_variant, instance_variant.c.name == reservation.c.variant, isouter=True)
    .join(node, node.c.id == reservation.c.node_id, isouter=True)
    .join(instance_type, instance_type.c.name == _TYPE, isouter=True)
)


def page(unit: ReadUnit, account_ids: Collection[str] | None, *, cursor: str | None, limit: int) -> list[Any]:
    """Return reservations of accounts, or everybody's for None, newest first: one more than `limit` when there are
    more."""
    wanted = _ROWS if account_ids is None else _ROWS.where(reservation.c.account_id.in_(sorted(account_ids)))
    return list(unit.select(newest_first(wanted, reservation.c.created_at, reservation.c.id, cursor, limit)))
