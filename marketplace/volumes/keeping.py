"""Volumes as their owners keep them: made, renamed, deleted. A volume costs from when it is made to when it is asked to
be deleted; its file is made on the node where it is first used."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import insert, select, update

from marketplace.accounts import service as accounts
from marketplace.events.transitions import Scene, begun, transition
from marketplace.ledger import rentals
from marketplace.ledger.book import InsufficientFundsError
from marketplace.nodes import service as nodes
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.volumes.rules import MACHINE, MONTH_US, rate
from marketplace.volumes.service import UnknownVolumeError, VolumeBusyError
from marketplace.volumes.tables import volume


class NameTakenError(ValueError):
    """The account has a volume of this name."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A volume that somebody wants."""

    account_id: str
    owner_kind: Literal["user", "team"]
    owner_id: str
    user_id: str | None
    name: str
    description: str | None
    size_gb: int
    type_id: str
    datacenter_id: str
    provider_id: str
    cost_per_gb_month: int
    billing_exempt: bool


def owner_of(row: Any) -> str:
    """Whose matter a volume is."""
    return str(row.team_id or row.user_id or row.account_id)


def create(unit: WriteUnit, asked: Asked, share: int, scene: Scene) -> str:
    """Make a volume and return its id. `share` is the provider's, in basis points. NameTakenError;
    InsufficientFundsError for an account that has nothing to pay it with."""
    accounts.lock(unit, [asked.account_id])
    _check_name(unit, asked.account_id, asked.name)
    cost = rate(asked.size_gb, asked.cost_per_gb_month)
    state = accounts.get(unit, asked.account_id)
    if cost and not asked.billing_exempt and not state.unlimited and state.available <= 0:
        raise InsufficientFundsError(asked.account_id, 1, state.available)
    volume_id = new_id(scene.now, scene.random)
    unit.execute(
        insert(volume).values(
            id=volume_id,
            account_id=asked.account_id,
            user_id=asked.user_id,
            team_id=asked.owner_id if asked.owner_kind == "team" else None,
            name=asked.name,
            description=asked.description,
            size_gb=asked.size_gb,
            disk_usage=0,
            type_id=asked.type_id,
            datacenter_id=asked.datacenter_id,
            node_id=None,
            status="Creating",
            billing_exempt=asked.billing_exempt,
            created_at=scene.now,
            updated_at=scene.now,
            delete_after=None,
            deleted_at=None,
        )
    )
    begun(unit, MACHINE, volume_id, "Creating", "create", scene, owner_id=asked.owner_id)
    transition(unit, MACHINE, volume_id, "Creating", "made", scene, owner_id=asked.owner_id)
    rentals.start(
        unit,
        resource_type="Volume",
        resource_id=volume_id,
        resource_name=asked.name,
        account_id=asked.account_id,
        provider_id=asked.provider_id,
        share=share,
        rate=cost,
        per_us=MONTH_US,
        exempt=asked.billing_exempt,
        now=scene.now,
        random=scene.random,
    )
    return volume_id


def change(unit: WriteUnit, row: Any, *, name: str, description: str | None, now: int) -> None:
    """Give a volume another name or description. NameTakenError."""
    if name != row.name:
        accounts.lock(unit, [row.account_id])
        _check_name(unit, row.account_id, name)
    values = {"name": name, "description": description, "updated_at": now}
    unit.execute(update(volume).where(volume.c.id == row.id).values(**values))


def lock(unit: WriteUnit, volume_id: str, account_id: str | None = None) -> Any:
    """Return the row of a volume that is not deleted, of this account or of any, locked until the unit ends: its node
    before it, as everywhere. UnknownVolumeError."""
    mine = [volume.c.id == volume_id, volume.c.status != "Deleted"]
    if account_id is not None:
        mine.append(volume.c.account_id == account_id)
    before = unit.select(select(volume.c.node_id).where(*mine)).one_or_none()
    if before is None:
        raise UnknownVolumeError(volume_id)
    if before.node_id is not None:
        nodes.lock(unit, before.node_id)
    row = unit.select(select(volume).where(*mine).with_for_update()).one_or_none()
    if row is None:
        raise UnknownVolumeError(volume_id)
    return row


def delete(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Delete a volume whose row is locked; it costs no more. Its node removes the file; one that was never used is gone
    at once. Asked again, nothing changes. VolumeBusyError while an instance has it."""
    if row.status == "Deleting":
        return
    if row.status not in ("Available", "Error"):
        raise VolumeBusyError(f"the volume is {row.status}")
    owner = owner_of(row)
    told = {"updated_at": scene.now}
    transition(unit, MACHINE, row.id, row.status, "delete", scene, owner_id=owner, values=told)
    if row.node_id is None:
        gone = {"deleted_at": scene.now}
        transition(unit, MACHINE, row.id, "Deleting", "deleted", scene, owner_id=owner, values=gone)
    else:
        nodes.touch(unit, row.node_id)
    rentals.stop(unit, row.id, scene.now, random=scene.random)


def of_account(unit: ReadUnit, account_id: str) -> list[str]:
    """Return the volumes of an account that are not being deleted."""
    wanted = select(volume.c.id).where(
        volume.c.account_id == account_id, volume.c.status.not_in(("Deleting", "Deleted"))
    )
    return sorted(unit.select(wanted).scalars())


def delete_all(unit: WriteUnit, account_id: str, scene: Scene) -> int:
    """Delete the volumes of an account whose owner goes, and what they were called; returns how many."""
    names = {"name": volume.c.id, "description": None}
    unit.execute(update(volume).where(volume.c.account_id == account_id).values(**names))
    found = of_account(unit, account_id)
    for volume_id in found:
        delete(unit, lock(unit, volume_id), scene)
    return len(found)


def _check_name(unit: WriteUnit, account_id: str, name: str) -> None:
    """NameTakenError. The account is locked, so that no other takes the name in between."""
    taken = select(volume.c.id).where(
        volume.c.account_id == account_id, volume.c.name == name, volume.c.status != "Deleted"
    )
    if unit.select(taken).one_or_none() is not None:
        raise NameTakenError(name)
