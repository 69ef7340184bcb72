"""Emptying nodes for maintenance: nothing new comes, those who are there are told, and in the end they go."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import func, select, update

from marketplace.events.transitions import Scene, transition
from marketplace.http.wire import write_instant
from marketplace.instances import life
from marketplace.instances.tables import instance
from marketplace.nodes.rules import DRAIN
from marketplace.nodes.tables import node
from marketplace.notify import outbox
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.teams import service as teams
from marketplace.users import service as users

SECOND = 1_000_000


class Drained(msgspec.Struct, frozen=True):
    """What the beginning of a drain found."""

    active: int
    told: int


def live(unit: ReadUnit, node_id: str) -> dict[str, str]:
    """Instances of a node that are not over, with the node, as `life.lock` takes them."""
    rows = unit.select(select(instance.c.id).where(instance.c.node_id == node_id, instance.c.ended_at.is_(None)))
    return dict.fromkeys(rows.scalars(), node_id)


def drain(unit: WriteUnit, row: Any, *, grace_s: int, notify: bool, reason: str | None, scene: Scene) -> Drained:
    """Begin to empty a node, whose row is locked: from this moment nothing is placed on it."""
    found = life.lock(unit, live(unit, row.id))
    values = {
        "drain_id": new_id(scene.now, scene.random),
        "drain_started_at": scene.now,
        "drain_deadline": scene.now + grace_s * SECOND if grace_s else None,
        "drain_grace_s": grace_s,
        "drain_reason": reason,
        "drain_notified": notify,
        "generation": node.c.generation + 1,
    }
    transition(unit, DRAIN, row.id, row.drain_state, "drain", scene, owner_id=row.provider_id, values=values)
    told = _tell(unit, row, values, found, scene) if notify else 0
    if not found:
        transition(unit, DRAIN, row.id, "Draining", "drained", scene, owner_id=row.provider_id)
    return Drained(len(found), told)


def force(unit: WriteUnit, row: Any, scene: Scene) -> int:
    """End everything that still runs on a node that is being emptied; returns how many."""
    ended = 0
    for found in life.lock(unit, live(unit, row.id)):
        if found.status in ("Initializing", "Active"):
            life.end(unit, found, "force_drain", scene)
            ended += 1
    return ended


def restore(unit: WriteUnit, row: Any, trigger: str, scene: Scene) -> None:
    """Take a node back into service: `cancel_drain` as it was, `resume` listed."""
    values: dict[str, Any] = {
        "drain_started_at": None,
        "drain_deadline": None,
        "drain_grace_s": None,
        "drain_reason": None,
        "generation": node.c.generation + 1,
    }
    if trigger == "resume":
        values["listed"] = True
    transition(unit, DRAIN, row.id, row.drain_state, trigger, scene, owner_id=row.provider_id, values=values)


def settle(unit: WriteUnit, row: Any, scene: Scene) -> bool:
    """Go on with a drain: what is past its deadline is ended, and what is empty is drained; says whether anything was
    done."""
    if row.drain_state != "Draining":
        return False
    if not live(unit, row.id):
        transition(unit, DRAIN, row.id, "Draining", "drained", scene, owner_id=row.provider_id)
        return True
    if row.drain_deadline is not None and row.drain_deadline <= scene.now:
        return force(unit, row, scene) > 0
    return False


def due(unit: ReadUnit) -> list[str]:
    """Nodes that are being emptied."""
    return sorted(unit.select(select(node.c.id).where(node.c.drain_state == "Draining")).scalars())


def set_listing(unit: WriteUnit, node_id: str, listed: bool) -> None:
    """Offer a node on the market, or not."""
    unit.execute(update(node).where(node.c.id == node_id).values(listed=listed, generation=node.c.generation + 1))


def counts(unit: ReadUnit, node_ids: list[str]) -> dict[str, int]:
    """How many instances that are not over each node has."""
    rows = unit.select(
        select(instance.c.node_id, func.count())
        .where(instance.c.node_id.in_(node_ids), instance.c.ended_at.is_(None))
        .group_by(instance.c.node_id)
    )
    return {node_id: int(count) for node_id, count in rows}


def _tell(unit: WriteUnit, row: Any, drain_values: dict[str, Any], found: list[Any], scene: Scene) -> int:
    """A mail to everybody whose machines are there: people for their own, owners for their team's. Once each."""
    readers: dict[str, tuple[str, list[str]]] = {}
    for one in found:
        for user_id, email in _readers(unit, one):
            readers.setdefault(user_id, (email, []))[1].append(one.name)
    deadline = drain_values["drain_deadline"]
    for user_id, (email, names) in sorted(readers.items()):
        outbox.enqueue(
            unit,
            template="drain",
            to=email,
            values={
                "node": row.hostname,
                "machines": ", ".join(sorted(names)),
                "deadline": "" if deadline is None else write_instant(deadline),
                "message": drain_values["drain_reason"] or "",
            },
            now=scene.now,
            random=scene.random,
            user_id=user_id,
            dedupe=f"drain:{drain_values['drain_id']}:{user_id}",
        )
    return len(readers)


def _readers(unit: ReadUnit, found: Any) -> list[tuple[str, str]]:
    if found.team_id is not None:
        return [(one.user_id, one.email) for one in teams.members(unit, [found.team_id]) if one.role == "Owner"]
    user = None if found.user_id is None else users.find(unit, found.user_id)
    return [] if user is None else [(user.id, user.email)]
