"""The life of an instance: every change of its status, with all that follows from it, in one transaction.

Rows are locked in one order everywhere: nodes, instances, then what the ledger locks. Machines are real things on
somebody's node: what an instance has is given back only once the node has said that nothing of it is left, or stays as
a zombie when the node cannot be asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select, update

from marketplace.environments import service as environments
from marketplace.events.transitions import Scene, transition
from marketplace.instances.rules import MACHINE
from marketplace.instances.tables import instance
from marketplace.ledger import rentals
from marketplace.networks import service as networks
from marketplace.nodes import service as nodes
from marketplace.nodes.rules import SILENT_US
from marketplace.nodes.tables import node
from marketplace.placement import claims
from marketplace.quotas import service as quotas
from marketplace.reservations import service as reservations
from marketplace.store.db import WriteUnit
from marketplace.volumes import service as volumes

PUBLIC = tuple(column for column in instance.columns if column.name != "secret")
"""Every column of an instance but the sealed one."""


def owner_of(row: Any) -> str:
    """Whose matter an instance is."""
    return str(row.team_id or row.user_id or row.account_id)


def lock(unit: WriteUnit, places: Mapping[str, str]) -> list[Any]:
    """Lock instances, given with the nodes that they are on, and return their rows; nodes first."""
    nodes_of = select(node.c.id).where(node.c.id.in_(sorted(set(places.values())))).order_by(node.c.id)
    unit.select(nodes_of.with_for_update()).all()
    wanted = select(*PUBLIC).where(instance.c.id.in_(sorted(places))).order_by(instance.c.id)
    return list(unit.select(wanted.with_for_update()).all())


def activate(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """It is ready: from now on it costs."""
    owner = owner_of(row)
    free_until = reservations.on_active(unit, row.id, row.provider_id, row.provider_share, scene)
    covered = row.quota_id is not None
    ends = quotas.covered_until(unit, row.quota_id) if covered else None
    if ends is not None:
        free_until = max(free_until or 0, ends)
    rentals.start(
        unit,
        resource_type="Compute",
        resource_id=row.id,
        resource_name=row.name,
        account_id=row.account_id,
        provider_id=row.provider_id,
        share=row.provider_share,
        rate=row.cost_per_hour,
        exempt=row.billing_exempt or (covered and ends is None),
        free_until=free_until,
        now=scene.now,
        random=scene.random,
    )
    transition(unit, MACHINE, row.id, row.status, "ready", scene, owner_id=owner, values={"ready_at": scene.now})
    environments.on_active(unit, row.id, scene, owner_id=owner)


def give_up(unit: WriteUnit, row: Any, cause: str, message: str, scene: Scene) -> None:
    """It cannot be: its node takes down what there is of it, and then it has failed."""
    values = {"failing": True, **_failure(cause, message, scene), **_absent(row)}
    transition(unit, MACHINE, row.id, row.status, "give_up", scene, owner_id=owner_of(row), values=values)
    nodes.touch(unit, row.node_id)


def fail(unit: WriteUnit, row: Any, scene: Scene, *, cause: str = "", message: str = "") -> None:
    """It failed before it was ready, and nothing of it is left: all is given back, and nothing was charged."""
    known = row.failure_id is not None
    values = {"ended_at": scene.now, **_absent(row), **({} if known else _failure(cause, message, scene))}
    transition(unit, MACHINE, row.id, row.status, "fail", scene, owner_id=owner_of(row), values=values)
    _give_back(unit, row, scene)
    environments.on_failed(unit, row.id, scene, owner_id=owner_of(row))


def end(
    unit: WriteUnit,
    row: Any,
    trigger: str,
    scene: Scene,
    *,
    costs_until: int | None = None,
    cause: str = "",
    message: str = "",
) -> None:
    """Ask for its end: it costs no more, and its node takes it down. Without `costs_until` it cost until now, or until
    its node fell silent. With a `cause` it ends because it failed; its event carries the message."""
    if costs_until is None:
        seen = unit.select(select(node.c.last_seen).where(node.c.id == row.node_id)).scalar_one()
        costs_until = min(scene.now, int(seen) + SILENT_US)
    if row.ready_at is not None:
        rentals.stop(unit, row.id, costs_until, random=scene.random)
    failed = _failure(cause, message, scene) if cause else {}
    values = {"stop_at": scene.now, **failed, **_absent(row)}
    told = {"message": message} if message else None
    transition(unit, MACHINE, row.id, row.status, trigger, scene, owner_id=owner_of(row), values=values, detail=told)
    if row.ready_at is None:
        reservations.on_over(unit, row.id, scene)
    nodes.touch(unit, row.node_id)


def finish(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Its node says that nothing of it is left."""
    if row.failing:
        fail(unit, row, scene)
        return
    ended = {"ended_at": scene.now}
    transition(unit, MACHINE, row.id, row.status, "gone", scene, owner_id=owner_of(row), values=ended)
    _give_back(unit, row, scene)
    if row.ready_at is None:
        environments.on_failed(unit, row.id, scene, owner_id=owner_of(row))


def lose(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Its node is gone, and perhaps comes back with it: it is over, but what it had stays claimed until then."""
    trigger = "node_lost_failing" if row.status == "Deactivating" and row.failing else "node_lost"
    before = row.status == "Initializing"
    told = _failure("PlatformError", "Its node stopped responding before it was ready.", scene) if before else {}
    values = {"ended_at": scene.now, **_absent(row), **told}
    transition(unit, MACHINE, row.id, row.status, trigger, scene, owner_id=owner_of(row), values=values)
    claims.orphan(unit, row.id)
    networks.release(unit, row.id, scene.now)
    reservations.on_over(unit, row.id, scene)
    volumes.on_over(unit, row.id, scene, owner_id=owner_of(row))
    nodes.touch(unit, row.node_id)


def dismiss(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Its renter has seen that it failed."""
    transition(unit, MACHINE, row.id, row.status, "terminate", scene, owner_id=owner_of(row))


def wish(unit: WriteUnit, row: Any, want: str, *, reset: bool = False) -> None:
    """Let its node make something else of it."""
    values = {"want": want, "gen": row.gen + 1, "reset_seq": row.reset_seq + reset}
    unit.execute(update(instance).where(instance.c.id == row.id).values(**values))
    nodes.touch(unit, row.node_id)


def laid(unit: WriteUnit, instance_ids: Collection[str], scene: Scene) -> None:
    """The machines of instances that were over are gone at last."""
    for instance_id in sorted(instance_ids):
        claims.release(unit, instance_id, scene.now)


def _give_back(unit: WriteUnit, row: Any, scene: Scene) -> None:
    claims.release(unit, row.id, scene.now)
    networks.release(unit, row.id, scene.now)
    reservations.on_over(unit, row.id, scene)
    volumes.on_over(unit, row.id, scene, owner_id=owner_of(row))
    nodes.touch(unit, row.node_id)


def _absent(row: Any) -> dict[str, Any]:
    return {} if row.want == "Absent" else {"want": "Absent", "gen": row.gen + 1}


def _failure(cause: str, message: str, scene: Scene) -> dict[str, Any]:
    return {
        "failure_id": f"f-{scene.random(8).hex()}",
        "failure_cause": cause or "PlatformError",
        "failure_message": message or "The platform had an error while it started the machine.",
        "failed_at": scene.now,
    }
