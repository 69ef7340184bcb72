"""Saved environments: disks of ended virtual machines, as their nodes tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update

from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.environments.rules import MACHINE
from marketplace.environments.tables import saved_environment
from marketplace.events.transitions import Scene, begun, transition
from marketplace.store.db import ReadUnit, WriteUnit


class EnvironmentGoneError(Exception):
    """There is no such disk any more, or it is in use."""


def find(unit: ReadUnit, environment_id: str, account_id: str, now: int) -> Any:
    """Return the row of an environment of an account that can be used now. EnvironmentGoneError."""
    wanted = select(saved_environment).where(
        saved_environment.c.id == environment_id, saved_environment.c.account_id == account_id
    )
    if isinstance(unit, WriteUnit):
        wanted = wanted.with_for_update()
    row = unit.select(wanted).one_or_none()
    if row is None or row.state != "Retained" or not row.confirmed or row.expires_at <= now:
        raise EnvironmentGoneError("its disk no longer exists")
    return row


def claim(
    unit: WriteUnit, environment_id: str, account_id: str, instance_id: str, scene: Scene, *, owner_id: str
) -> None:
    """Give an environment to a new instance of its account. EnvironmentGoneError."""
    find(unit, environment_id, account_id, scene.now)
    values = {"claimed_by": instance_id, "last_used_at": scene.now}
    transition(unit, MACHINE, environment_id, "Retained", "claim", scene, owner_id=owner_id, values=values)


def on_active(unit: WriteUnit, instance_id: str, scene: Scene, *, owner_id: str) -> None:
    """The disk is that of the instance now."""
    _resolve(unit, instance_id, "consume", scene, owner_id)


def on_failed(unit: WriteUnit, instance_id: str, scene: Scene, *, owner_id: str) -> None:
    """The instance never ran: the disk is its owner's again."""
    _resolve(unit, instance_id, "return", scene, owner_id)


def _resolve(unit: WriteUnit, instance_id: str, trigger: str, scene: Scene, owner_id: str) -> None:
    claimed = select(saved_environment.c.id).where(
        saved_environment.c.claimed_by == instance_id, saved_environment.c.state == "Claimed"
    )
    for environment_id in unit.select(claimed).scalars().all():
        ended = {"ended_at": scene.now} if trigger == "consume" else {"claimed_by": None}
        transition(unit, MACHINE, environment_id, "Claimed", trigger, scene, owner_id=owner_id, values=ended)


def observed(
    unit: WriteUnit, node_id: str, disks: Sequence[RetainedDisk], owners: dict[str, Any], scene: Scene
) -> None:
    """Take over which disks a node keeps. `owners` are the rows of the ended instances of those that are new here."""
    told = {disk.instance_id: disk for disk in disks}
    known = unit.select(
        select(saved_environment.c.id, saved_environment.c.state, saved_environment.c.account_id).where(
            saved_environment.c.node_id == node_id, saved_environment.c.state.in_(("Retained", "Claimed"))
        )
    ).all()
    for row in known:
        disk = told.pop(row.id, None)
        if disk is not None:
            values = {"confirmed": True, "disk_bytes": disk.disk_bytes, "expires_at": disk.expires_at}
            unit.execute(update(saved_environment).where(saved_environment.c.id == row.id).values(**values))
        elif row.state == "Retained":
            ended = {"confirmed": False, "ended_at": scene.now}
            transition(unit, MACHINE, row.id, "Retained", "erase", scene, owner_id=row.account_id, values=ended)
    for disk in told.values():
        if disk.instance_id in owners:
            _retain(unit, owners[disk.instance_id], disk, scene)


def _retain(unit: WriteUnit, ended: Any, disk: RetainedDisk, scene: Scene) -> None:
    row = {
        "id": ended.id,
        "node_id": ended.node_id,
        "account_id": ended.account_id,
        "name": ended.name,
        "variant": ended.variant,
        "os_label": disk.os_label,
        "disk_bytes": disk.disk_bytes,
        "state": "Retained",
        "confirmed": True,
        "claimed_by": None,
        "last_used_at": ended.ended_at or scene.now,
        "expires_at": disk.expires_at,
        "ended_at": None,
    }
    known = unit.select(select(saved_environment.c.id).where(saved_environment.c.id == ended.id)).one_or_none()
    if known is None:
        unit.insert_rows(saved_environment, [row])
        owner = ended.team_id or ended.user_id or ended.account_id
        begun(unit, MACHINE, ended.id, "Retained", "retain", scene, owner_id=owner)
