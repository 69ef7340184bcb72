"""What a node reports drives what its instances become."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import or_, select, update

from marketplace.agent.wire import Ending, Observed, ObservedInstance
from marketplace.environments import service as environments
from marketplace.events.transitions import Scene
from marketplace.instances import life
from marketplace.instances.life import PUBLIC
from marketplace.instances.rules import failure, has_stopped, starts_at_once
from marketplace.instances.tables import instance
from marketplace.nodes.rules import SILENT_US
from marketplace.placement import claims
from marketplace.store.db import WriteUnit

MISSING_ROUNDS = 2
"""Reports in a row without its machine after which an instance has lost it."""
REPEATED_US = 1_000_000
"""Reports that come sooner after each other than a node looks again may be one that was delivered twice."""


def take(unit: WriteUnit, node_row: Any, observed: Observed, scene: Scene, *, up_to_date: bool) -> list[str]:
    """Take a complete report of a node, whose row is locked, and return the ids in it that belong to nobody.

    `up_to_date` says that the node knew all that it should do: what it should take down and does not report is gone.
    """
    told = {one.id: one for one in observed.instances}
    retained = {disk.instance_id for disk in observed.environments}
    wanted = (
        select(*PUBLIC)
        .where(
            instance.c.node_id == node_row.id,
            or_(instance.c.ended_at.is_(None), instance.c.id.in_(sorted(told.keys() | retained))),
        )
        .order_by(instance.c.id)
        .with_for_update()
    )
    rows = {row.id: row for row in unit.select(wanted)}
    for row in rows.values():
        if row.ended_at is None:
            _one(unit, node_row, row, told.get(row.id), scene, up_to_date)
    _lay_zombies(unit, node_row.id, told, scene, up_to_date)
    owners = {row.id: row for row in rows.values() if row.kind == "VirtualMachine"}
    environments.observed(unit, node_row.id, observed.environments, owners, scene)
    over = {row.id for row in rows.values() if row.ended_at is not None}
    waiting = set(claims.zombies(unit, node_row.id))
    gone = {one.id for one in observed.instances if one.phase == "Absent"}
    return sorted((told.keys() - rows.keys()) | ((over & told.keys()) - waiting - gone))


def again(unit: WriteUnit, node_row: Any, scene: Scene, *, up_to_date: bool) -> None:
    """Take the same report once more: what was missing is still missing, and what the node never had, and should take
    down by now, is gone."""
    never = (instance.c.status == "Deactivating") & (instance.c.phase == "")
    wanted = (
        select(*PUBLIC)
        .where(
            instance.c.node_id == node_row.id,
            instance.c.ended_at.is_(None),
            or_(instance.c.missing_rounds > 0, never),
        )
        .order_by(instance.c.id)
        .with_for_update()
    )
    for row in unit.select(wanted).all():
        if row.status == "Active":
            _missing(unit, node_row, row, scene)
        elif row.status == "Deactivating" and row.phase == "" and up_to_date:
            life.finish(unit, row, scene)


def _lay_zombies(
    unit: WriteUnit, node_id: str, told: dict[str, ObservedInstance], scene: Scene, up_to_date: bool
) -> None:
    for instance_id in claims.zombies(unit, node_id):
        one = told.get(instance_id)
        if (one is None and up_to_date) or (one is not None and one.phase == "Absent"):
            life.laid(unit, [instance_id], scene)


def _one(
    unit: WriteUnit, node_row: Any, row: Any, told: ObservedInstance | None, scene: Scene, up_to_date: bool
) -> None:
    if told is None:
        if row.status == "Deactivating" and up_to_date:
            life.finish(unit, row, scene)
        return
    _note(unit, row, told)
    if row.status == "Deactivating":
        if told.phase == "Absent":
            life.finish(unit, row, scene)
    elif row.status == "Initializing":
        _starting(unit, row, told, scene)
    elif told.phase == "Missing" and told.gen_applied == row.gen:
        _missing(unit, node_row, row, scene)
    elif told.ended is not None and has_stopped(row.kind, told.power) and told.gen_applied == row.gen:
        _ended(unit, node_row, row, told.ended, scene)


def _starting(unit: WriteUnit, row: Any, told: ObservedInstance, scene: Scene) -> None:
    if told.error is not None and told.phase in ("Failed", "Absent"):
        cause, message = failure(row.kind, told.error.cause), told.error.message[:1000]
        if told.phase == "Absent":
            life.fail(unit, row, scene, cause=cause, message=message)
        else:
            life.give_up(unit, row, cause, message, scene)
    elif told.phase == "Missing":
        life.give_up(unit, row, "VmBootFailed", "The machine stopped before it was ready.", scene)
    elif told.ended is not None and has_stopped(row.kind, told.power):
        life.give_up(unit, row, failure(row.kind, told.ended.cause or "BadCommand"), told.ended.message[:1000], scene)
    elif told.phase == "Running" and not has_stopped(row.kind, told.power):
        free = row.billing_exempt or row.quota_id is not None
        if told.ready_via is not None or starts_at_once(row.kind, exempt=free):
            life.activate(unit, row, scene)


def _missing(unit: WriteUnit, node_row: Any, row: Any, scene: Scene) -> None:
    if row.missing_rounds and scene.now - int(node_row.last_seen) < REPEATED_US:
        return  # the same report once more, not another look
    rounds = row.missing_rounds + 1
    if rounds < MISSING_ROUNDS:
        unit.execute(update(instance).where(instance.c.id == row.id).values(missing_rounds=rounds))
        return
    life.end(unit, row, "missing", scene, costs_until=int(node_row.last_seen))


def _ended(unit: WriteUnit, node_row: Any, row: Any, how: Ending, scene: Scene) -> None:
    """It cost until its node saw that it had ended, but for the time that the node was silent."""
    cause = "" if how.cause is None else failure(row.kind, how.cause)
    until = min(scene.now, int(node_row.last_seen) + SILENT_US, how.at)
    life.end(unit, row, "ended", scene, costs_until=until, cause=cause, message=how.message[:1000])


def _note(unit: WriteUnit, row: Any, told: ObservedInstance) -> None:
    """Keep what was told, where it is news."""
    fresh: dict[str, Any] = {
        "gen_applied": max(row.gen_applied, min(told.gen_applied, row.gen)),
        "reset_applied": max(row.reset_applied, told.reset_applied),
        "phase": told.phase,
        "power": told.power or "",
        "addresses": msgspec.json.encode(told.ips).decode(),
        "started_at": row.started_at or told.started_at,
    }
    if told.phase != "Missing":
        fresh["missing_rounds"] = 0
    changed = {name: value for name, value in fresh.items() if getattr(row, name) != value}
    if changed:
        unit.execute(update(instance).where(instance.c.id == row.id).values(**changed))
