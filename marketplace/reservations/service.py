"""Reservations: paid before they are used, once; bound to one instance at a time."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import insert, select

from marketplace.events.transitions import Scene, begun, transition
from marketplace.instances.tables import instance
from marketplace.ledger import deposits
from marketplace.ledger.book import InsufficientFundsError
from marketplace.ledger.money import MAX_AMOUNT, MoneyError
from marketplace.reservations.rules import MACHINE, price
from marketplace.reservations.tables import reservation, reservation_type
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id

SECOND = 1_000_000


class UnknownTypeError(LookupError):
    """There is no such type of reservation."""


class UnknownReservationError(LookupError):
    """The account has no such reservation that could be used."""


class OtherShapeError(UnknownReservationError):
    """The reservation is for another variant, or for another shape or node."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that no catalog has."""

    vcpu: int
    gpu: int
    dram: int
    disk: int


def encode(shape: Resources) -> str:
    """A shape as reservations keep it."""
    return msgspec.json.encode(shape).decode()


def find_type(unit: ReadUnit, type_id: str) -> Any:
    """Return the row of a type that is on offer. UnknownTypeError."""
    wanted = select(reservation_type).where(reservation_type.c.id == type_id, reservation_type.c.removed_at.is_(None))
    row = unit.select(wanted).one_or_none()
    if row is None:
        raise UnknownTypeError(type_id)
    return row


def cost_of(account_id: str, cost_per_hour: int, kind: Any) -> int:
    """What a reservation of a type costs an account. InsufficientFundsError for more than anybody can have."""
    try:
        return price(cost_per_hour, kind.duration_s, kind.price_factor)
    except MoneyError as error:
        raise InsufficientFundsError(account_id, MAX_AMOUNT, 0) from error


def hold_new(
    unit: WriteUnit,
    *,
    type_id: str,
    account_id: str,
    user_id: str | None,
    team_id: str | None,
    instance_id: str,
    variant: str | None,
    node_id: str | None,
    resources: str | None,
    cost_per_hour: int,
    billing_exempt: bool,
    scene: Scene,
) -> str:
    """Make a reservation for an instance that is being rented, its price set aside; returns its id. UnknownTypeError,
    InsufficientFundsError."""
    kind = find_type(unit, type_id)
    reservation_id = new_id(scene.now, scene.random)
    cost = 0 if billing_exempt else cost_of(account_id, cost_per_hour, kind)
    if cost:
        deposits.hold(unit, account_id, reservation_id, cost, now=scene.now, random=scene.random)
    unit.execute(
        insert(reservation).values(
            id=reservation_id,
            account_id=account_id,
            user_id=user_id,
            team_id=team_id,
            type_id=type_id,
            state="Held",
            instance_id=instance_id,
            variant=variant,
            node_id=node_id,
            resources=resources,
            cost_per_hour=cost_per_hour,
            billing_exempt=billing_exempt,
            prepaid=0,
            created_at=scene.now,
            valid_from=None,
            valid_till=None,
        )
    )
    begun(unit, MACHINE, reservation_id, "Held", "hold", scene, owner_id=team_id or user_id or account_id)
    return reservation_id


def usable(unit: ReadUnit, reservation_id: str, account_id: str, now: int) -> Any:
    """Return the row of a reservation of an account that an instance can be rented on. UnknownReservationError."""
    wanted = select(reservation).where(
        reservation.c.id == reservation_id,
        reservation.c.account_id == account_id,
        reservation.c.state == "Unbound",
        reservation.c.valid_till > now,
    )
    if isinstance(unit, WriteUnit):
        wanted = wanted.with_for_update()
    row = unit.select(wanted).one_or_none()
    if row is None:
        raise UnknownReservationError(reservation_id)
    return row


def bind(unit: WriteUnit, reservation_id: str, account_id: str, instance_id: str, scene: Scene) -> Any:
    """Bind an unbound reservation to a new instance and return its row. UnknownReservationError; OtherShapeError when
    the instance is not what it was paid for."""
    row = usable(unit, reservation_id, account_id, scene.now)
    if not _pays_for(unit, row, instance_id):
        raise OtherShapeError(reservation_id)
    values = {"instance_id": instance_id}
    transition(unit, MACHINE, row.id, row.state, "bind", scene, owner_id=_owner(row), values=values)
    return row


def on_active(unit: WriteUnit, instance_id: str, provider_id: str, share: int, scene: Scene) -> int | None:
    """An instance is active: what is set aside for its reservation is charged, and its time begins. Returns until when
    its time is paid, None without a reservation."""
    row = _of(unit, instance_id)
    if row is None:
        return None
    if row.state == "Bound":
        return int(row.valid_till)
    kind = unit.select(select(reservation_type.c.duration_s).where(reservation_type.c.id == row.type_id)).scalar_one()
    paid = deposits.capture(
        unit,
        row.id,
        provider_id=provider_id,
        share=share,
        memo=row.variant or "custom",
        now=scene.now,
        random=scene.random,
    )
    till = scene.now + int(kind) * SECOND
    values = {"valid_from": scene.now, "valid_till": till, "prepaid": paid}
    transition(unit, MACHINE, row.id, "Held", "bind", scene, owner_id=_owner(row), values=values)
    return till


def on_over(unit: WriteUnit, instance_id: str, scene: Scene) -> None:
    """An instance is over, or never will be active: what is set aside is given back, what was paid can be used
    again."""
    row = _of(unit, instance_id)
    if row is None:
        return
    if row.state == "Held":
        deposits.release(unit, row.id, scene.now)
        transition(unit, MACHINE, row.id, "Held", "cancel", scene, owner_id=_owner(row))
    else:
        transition(unit, MACHINE, row.id, "Bound", "unbind", scene, owner_id=_owner(row), values={"instance_id": None})


def _pays_for(unit: WriteUnit, row: Any, instance_id: str) -> bool:
    """Whether an instance is what a reservation is for: of its variant, or of its shape and on its node."""
    made = unit.select(select(instance).where(instance.c.id == instance_id)).one()
    if row.resources is None or row.variant is not None:
        return bool(made.variant == row.variant)
    shape = Resources(vcpu=made.vcpu, gpu=made.gpu_count, dram=made.dram, disk=made.disk)
    same = msgspec.json.decode(row.resources, type=Resources) == shape
    return bool(made.variant is None and made.node_id == row.node_id and same)


def _of(unit: WriteUnit, instance_id: str) -> Any:
    mine = (reservation.c.instance_id == instance_id, reservation.c.state.in_(("Held", "Bound")))
    return unit.select(select(reservation).where(*mine).with_for_update()).one_or_none()


def _owner(row: Any) -> str:
    return str(row.team_id or row.user_id or row.account_id)
