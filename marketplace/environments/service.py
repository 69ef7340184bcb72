"""Saved environments: disks of ended virtual machines, as their nodes tell of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, or_, select, update

from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.environments.rules import MACHINE
from marketplace.environments.tables import saved_environment
from marketplace.events.transitions import Scene, begun, transition
from marketplace.instances.tables import instance
from marketplace.nodes import service as nodes
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams.tables import team
from marketplace.users.tables import users

_ended = instance.alias("ended")
_claimer = instance.alias("claimer")
_ROWS = (
    select(
        saved_environment.c.id,
        saved_environment.c.state,
        saved_environment.c.confirmed,
        saved_environment.c.account_id,
        _ended.c.user_id,
        _ended.c.team_id,
        _claimer.c.ended_at.label("claimer_ended"),
    )
    .join(_ended, _ended.c.id == saved_environment.c.id)
    .join(_claimer, _claimer.c.id == saved_environment.c.claimed_by, isouter=True)
)
_LOOSE = or_(
    saved_environment.c.state == "Retained",
    and_(saved_environment.c.state == "Claimed", _claimer.c.ended_at.is_not(None)),
)
"""Whether it may end: not while it is claimed by something that is being made."""


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
    _note_erased(unit, node_id, told.keys())
    for row in _kept(unit, node_id):
        disk = told.pop(row.id, None)
        if disk is not None:
            values = {"confirmed": True, "disk_bytes": disk.disk_bytes, "expires_at": disk.expires_at}
            unit.execute(update(saved_environment).where(saved_environment.c.id == row.id).values(**values))
            if row.state == "Claimed" and row.claimer_ended is not None:
                # Its node was lost while the disk was to be used again, and is back with it.
                again = {"claimed_by": None}
                transition(unit, MACHINE, row.id, "Claimed", "return", scene, owner_id=_owner(row), values=again)
        elif row.state == "Retained":
            erase(unit, row, scene)
        elif row.confirmed:
            unit.execute(update(saved_environment).where(saved_environment.c.id == row.id).values(confirmed=False))
    for disk in told.values():
        if disk.instance_id in owners:
            _retain(unit, owners[disk.instance_id], disk, scene)


def _note_erased(unit: WriteUnit, node_id: str, told: Collection[str]) -> None:
    """Keep which disks are still there that nobody may use any more: their node is asked to remove them."""
    over = (saved_environment.c.node_id == node_id, saved_environment.c.state == "Erased")
    listed = or_(saved_environment.c.confirmed, saved_environment.c.id.in_(sorted(told)))
    rows = unit.select(select(saved_environment.c.id, saved_environment.c.confirmed).where(*over, listed)).all()
    for row in rows:
        there = row.id in told
        if row.confirmed != there:
            unit.execute(update(saved_environment).where(saved_environment.c.id == row.id).values(confirmed=there))
            nodes.touch(unit, node_id)


def erasing(unit: ReadUnit, node_id: str) -> list[str]:
    """Return the disks that a node is to remove before their time."""
    over = (saved_environment.c.node_id == node_id, saved_environment.c.state == "Erased")
    wanted = select(saved_environment.c.id).where(*over, saved_environment.c.confirmed)
    return sorted(unit.select(wanted).scalars())


def erase(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """A disk is gone, or its time is over; `row` is one of `_kept` or `overdue`, locked."""
    ended = {"confirmed": False, "ended_at": scene.now}
    transition(unit, MACHINE, row.id, row.state, "erase", scene, owner_id=_owner(row), values=ended)


def overdue(unit: ReadUnit, now: int, limit: int) -> list[str]:
    """Return environments whose time is over, and that nothing that still lives was made of."""
    wanted = select(saved_environment.c.id).join(
        _claimer, _claimer.c.id == saved_environment.c.claimed_by, isouter=True
    )
    wanted = wanted.where(saved_environment.c.expires_at <= now, _LOOSE)
    return list(unit.select(wanted.order_by(saved_environment.c.id).limit(limit)).scalars())


def expire(unit: WriteUnit, environment_id: str, scene: Scene) -> bool:
    """End an environment whose time is over; says whether there was anything to end."""
    mine = (saved_environment.c.id == environment_id, saved_environment.c.expires_at <= scene.now, _LOOSE)
    row = unit.select(_ROWS.where(*mine).with_for_update(of=saved_environment)).one_or_none()
    if row is None:
        return False
    erase(unit, row, scene)
    return True


def abandon(unit: WriteUnit, account_ids: Sequence[str], scene: Scene) -> int:
    """Let nobody use the disks of these accounts again, and have their nodes remove them now. Returns how many. Locks
    nodes."""
    mine = (saved_environment.c.account_id.in_(account_ids), saved_environment.c.state.in_(("Retained", "Claimed")))
    for node_id in sorted(unit.select(select(saved_environment.c.node_id).where(*mine).distinct()).scalars()):
        nodes.touch(unit, node_id)
    rows = unit.select(_ROWS.where(*mine).order_by(saved_environment.c.id).with_for_update(of=saved_environment)).all()
    for row in rows:
        erase(unit, row, scene)
    ids = [row.id for row in rows]
    unit.execute(update(saved_environment).where(saved_environment.c.id.in_(ids)).values(confirmed=True))
    return len(rows)


def _kept(unit: WriteUnit, node_id: str) -> list[Any]:
    """The environments of a node that are not over, locked."""
    mine = (saved_environment.c.node_id == node_id, saved_environment.c.state.in_(("Retained", "Claimed")))
    wanted = _ROWS.where(*mine).order_by(saved_environment.c.id)
    return list(unit.select(wanted.with_for_update(of=saved_environment)).all())


def _owner(row: Any) -> str:
    return str(row.team_id or row.user_id or row.account_id)


def _abandoned(unit: ReadUnit, instance_id: str) -> bool:
    """Whether whoever had an ended instance was erased since, or their team closed: its disk is nobody's."""
    wanted = (
        select(instance.c.id)
        .join(users, users.c.id == instance.c.user_id, isouter=True)
        .join(team, team.c.id == instance.c.team_id, isouter=True)
        .where(
            instance.c.id == instance_id,
            or_(team.c.deleted_at.is_not(None), and_(team.c.id.is_(None), users.c.erased_at.is_not(None))),
        )
    )
    return unit.select(wanted).one_or_none() is not None


def _retain(unit: WriteUnit, ended: Any, disk: RetainedDisk, scene: Scene) -> None:
    nobodys = _abandoned(unit, ended.id)
    row = {
        "id": ended.id,
        "node_id": ended.node_id,
        "account_id": ended.account_id,
        "name": ended.id if nobodys else ended.name,
        "variant": ended.variant,
        "os_label": "" if nobodys else disk.os_label,
        "disk_bytes": disk.disk_bytes,
        "state": "Erased" if nobodys else "Retained",
        "confirmed": True,
        "claimed_by": None,
        "last_used_at": ended.ended_at or scene.now,
        "expires_at": disk.expires_at,
        "ended_at": scene.now if nobodys else None,
    }
    known = unit.select(select(saved_environment.c.id).where(saved_environment.c.id == ended.id)).one_or_none()
    if known is None:
        unit.insert_rows(saved_environment, [row])
        owner = ended.team_id or ended.user_id or ended.account_id
        begun(unit, MACHINE, ended.id, str(row["state"]), "retain", scene, owner_id=owner)
        if nobodys:
            nodes.touch(unit, ended.node_id)
