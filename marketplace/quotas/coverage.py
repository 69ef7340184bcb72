"""Until when the time of a running instance is paid or covered by something else than its meter: by a reservation, by a
quota, or by whichever of them lasts longer."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select

from marketplace.instances.tables import instance
from marketplace.ledger import rentals
from marketplace.placement.tables import claim
from marketplace.quotas import service as quotas
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit, WriteUnit


def free_until(unit: ReadUnit, instance_id: str) -> int | None:
    """Return when an instance begins to cost, or began; None for one that nothing ever covered."""
    paid = select(func.max(reservation.c.valid_till)).where(reservation.c.instance_id == instance_id)
    ends = [unit.select(paid).scalar_one()]
    quota_id = unit.select(select(instance.c.quota_id).where(instance.c.id == instance_id)).scalar_one()
    if quota_id is not None:
        ends.append(quotas.covered_until(unit, quota_id))
    return max((int(end) for end in ends if end is not None), default=None)


def refresh(unit: WriteUnit, instance_ids: Collection[str]) -> None:
    """Tell the running meters of instances what covers them, after that has changed."""
    for instance_id in sorted(instance_ids):
        rentals.cover(unit, instance_id, free_until(unit, instance_id))


def of_quota(unit: ReadUnit, quota_id: str) -> list[str]:
    """Return the instances that run under a quota."""
    wanted = select(claim.c.instance_id).where(claim.c.quota_id == quota_id, claim.c.released_at.is_(None))
    return sorted(unit.select(wanted).scalars())
