"""Types of reservations: durations, and what the time costs in them compared with the price on demand."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from marketplace.reservations.tables import reservation_type
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id


def every(unit: ReadUnit) -> list[Any]:
    """Return the types on offer, the shortest first."""
    wanted = select(reservation_type).where(reservation_type.c.removed_at.is_(None))
    return list(unit.select(wanted.order_by(reservation_type.c.duration_s, reservation_type.c.id)))


def add(unit: WriteUnit, *, duration_s: int, price_factor: int, now: int, random: Random) -> str:
    """Offer a type and return its id. `price_factor` is in millionths of the price on demand."""
    type_id = new_id(now, random)
    unit.execute(
        insert(reservation_type).values(
            id=type_id, duration_s=duration_s, price_factor=price_factor, created_at=now, removed_at=None
        )
    )
    return type_id


def remove(unit: WriteUnit, type_id: str, now: int) -> bool:
    """Offer a type no more, and say whether it was on offer. Reservations that were made keep their terms."""
    mine = (reservation_type.c.id == type_id, reservation_type.c.removed_at.is_(None))
    return unit.execute(update(reservation_type).where(*mine).values(removed_at=now)).rowcount == 1
