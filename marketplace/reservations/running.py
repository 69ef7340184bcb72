"""Reservations of what runs: made for an instance that is active, made longer, and over when their time is.

Money is looked at and charged in one transaction, under the account's lock: of two who buy with the same money, one
does not get it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from marketplace.events.transitions import Scene, transition
from marketplace.instances import life
from marketplace.instances.tables import instance
from marketplace.ledger import deposits, rentals
from marketplace.nodes.rules import SILENT_US
from marketplace.nodes.tables import node
from marketplace.quotas import coverage
from marketplace.reservations import service
from marketplace.reservations.rules import MACHINE
from marketplace.reservations.service import SECOND
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit, WriteUnit

RUNNING = ("Bound", "Unbound")


class UnknownInstanceError(LookupError):
    """The account has no such instance."""


class NotRunningError(Exception):
    """The instance is not active."""


class BoundError(Exception):
    """The instance has a reservation."""


class SilentError(Exception):
    """The node of the instance does not respond: what would be paid for may not be there."""


def create(
    unit: WriteUnit,
    *,
    instance_id: str,
    account_id: str,
    user_id: str | None,
    team_id: str | None,
    type_id: str,
    billing_exempt: bool,
    scene: Scene,
) -> str:
    """Reserve an instance that runs, from now on, and return the reservation's id. The time up to now is charged as it
    was.

    UnknownInstanceError, NotRunningError, BoundError, SilentError, UnknownTypeError, InsufficientFundsError.
    """
    row = _instance(unit, instance_id, account_id)
    if row.status != "Active":
        raise NotRunningError(row.status)
    seen = unit.select(select(node.c.last_seen).where(node.c.id == row.node_id)).scalar_one()
    if scene.now > int(seen) + SILENT_US:
        raise SilentError(row.node_id)
    before = _bound(unit, instance_id)
    if before is not None and (before.valid_till is None or before.valid_till > scene.now):
        raise BoundError(instance_id)
    if before is not None:
        expire(unit, before.id, scene)
    meter = rentals.running(unit, instance_id)
    if meter is not None:
        rentals.tick(unit, meter, scene.now, random=scene.random)
    reservation_id = service.hold_new(
        unit,
        type_id=type_id,
        account_id=account_id,
        user_id=user_id,
        team_id=team_id,
        instance_id=instance_id,
        variant=row.variant,
        node_id=row.node_id if row.variant is None else None,
        resources=_shape(row),
        cost_per_hour=row.cost_per_hour,
        billing_exempt=billing_exempt,
        scene=scene,
    )
    service.on_active(unit, instance_id, row.provider_id, row.provider_share, scene)
    coverage.refresh(unit, [instance_id])
    return reservation_id


def extend(
    unit: WriteUnit, *, instance_id: str, account_id: str, type_id: str, billing_exempt: bool, scene: Scene
) -> str:
    """Make the reservation of an instance longer by a type's duration, charged at once, and return its id.

    UnknownInstanceError; UnknownReservationError when it has none that is not over; UnknownTypeError,
    InsufficientFundsError.
    """
    row = _instance(unit, instance_id, account_id)
    bound = _bound(unit, instance_id)
    if bound is None or bound.state != "Bound" or bound.valid_till <= scene.now:
        raise service.UnknownReservationError(instance_id)
    kind = service.find_type(unit, type_id)
    paid = 0 if billing_exempt else service.cost_of(account_id, bound.cost_per_hour, kind)
    if paid:
        deposits.hold(unit, account_id, bound.id, paid, now=scene.now, random=scene.random)
        deposits.capture(
            unit,
            bound.id,
            provider_id=row.provider_id,
            share=row.provider_share,
            memo=bound.variant or "custom",
            now=scene.now,
            random=scene.random,
        )
    till = bound.valid_till + kind.duration_s * SECOND
    transition(
        unit,
        MACHINE,
        bound.id,
        "Bound",
        "extend",
        scene,
        owner_id=life.owner_of(bound),
        values={"valid_till": till, "prepaid": bound.prepaid + paid},
        detail={"valid_till": till, "paid": paid},
    )
    coverage.refresh(unit, [instance_id])
    return str(bound.id)


def expire(unit: WriteUnit, reservation_id: str, scene: Scene) -> bool:
    """End a reservation whose time is over; says whether there was anything to end. What still runs on it costs from
    its end on, because its meter was told that end."""
    wanted = select(reservation).where(reservation.c.id == reservation_id).with_for_update()
    row = unit.select(wanted).one_or_none()
    if row is None or row.state not in RUNNING or row.valid_till > scene.now:
        return False
    transition(unit, MACHINE, row.id, row.state, "expire", scene, owner_id=life.owner_of(row))
    return True


def due(unit: ReadUnit, now: int, limit: int) -> list[str]:
    """Return reservations whose time is over, the oldest first."""
    wanted = select(reservation.c.id).where(reservation.c.state.in_(RUNNING), reservation.c.valid_till <= now)
    return list(unit.select(wanted.order_by(reservation.c.valid_till, reservation.c.id).limit(limit)).scalars())


def _instance(unit: WriteUnit, instance_id: str, account_id: str) -> Any:
    """The row of an instance of an account, locked like everywhere: its node first."""
    mine = (instance.c.id == instance_id, instance.c.account_id == account_id)
    node_id = unit.select(select(instance.c.node_id).where(*mine)).scalar_one_or_none()
    if node_id is None:
        raise UnknownInstanceError(instance_id)
    (row,) = life.lock(unit, {instance_id: node_id})
    return row


def _bound(unit: WriteUnit, instance_id: str) -> Any:
    mine = (reservation.c.instance_id == instance_id, reservation.c.state.in_(("Held", "Bound")))
    return unit.select(select(reservation).where(*mine).with_for_update()).one_or_none()


def _shape(row: Any) -> str | None:
    if row.variant is not None:
        return None
    shape = service.Resources(vcpu=row.vcpu, gpu=row.gpu_count, dram=row.dram, disk=row.disk)
    return service.encode(shape)
