"""What nodes are asked to do once: work that is no state, from when it is asked for to when it is done or lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import insert, select, update

from marketplace.agent.wire import Command, CommandResult
from marketplace.events.transitions import Scene, happened
from marketplace.nodes import service as nodes
from marketplace.nodes.tables import node_command
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

Kind = Literal["collect_logs", "self_test", "sync_images", "gpu_reset"]
MAX_OUTPUT = 100_000


def ask(
    unit: WriteUnit,
    node_id: str,
    kind: Kind,
    args: Mapping[str, str],
    *,
    session_id: str | None = None,
    deadline: int | None = None,
    now: int,
    random: Random,
) -> str:
    """Ask a node for something and wake its agent; returns the command's id. What it was asked for already, and has
    not done, is asked for once. With `session_id` it is for this session of the node alone: a later one may be another
    boot of the machine, and does not begin it anew."""
    text = msgspec.json.encode(dict(args), order="sorted").decode()
    same = (node_command.c.node_id == node_id, node_command.c.kind == kind, node_command.c.args == text)
    waiting = select(node_command.c.id).where(*same, node_command.c.finished_at.is_(None))
    known = unit.select(waiting.order_by(node_command.c.id).limit(1)).scalar_one_or_none()
    command_id = known or new_id(now, random)
    if known is None:
        unit.execute(
            insert(node_command).values(
                id=command_id,
                node_id=node_id,
                kind=kind,
                args=text,
                issued_at=now,
                deadline=deadline,
                session_id=session_id,
                status="Queued",
                finished_at=None,
                output="",
            )
        )
    nodes.touch(unit, node_id)
    return str(command_id)


def waiting(unit: ReadUnit, node_id: str, under_way: Collection[str]) -> list[Command]:
    """Return what a node has not begun, in the order in which it was asked."""
    wanted = (
        select(node_command)
        .where(node_command.c.node_id == node_id, node_command.c.finished_at.is_(None))
        .order_by(node_command.c.issued_at, node_command.c.id)
    )
    return [
        Command(
            id=row.id,
            kind=row.kind,
            args=msgspec.json.decode(row.args, type=dict[str, str]),
            deadline=row.deadline,
        )
        for row in unit.select(wanted)
        if row.id not in under_way
    ]


def settle(unit: WriteUnit, node_row: Any, results: Sequence[CommandResult], scene: Scene) -> None:
    """Take what became of a node's commands; those whose session is over, or whose time is up, are lost."""
    found = {one.id: one for one in results}
    wanted = select(node_command).where(node_command.c.node_id == node_row.id, node_command.c.finished_at.is_(None))
    for row in unit.select(wanted.order_by(node_command.c.id)).all():
        told = found.get(row.id)
        if told is not None:
            _finish(unit, node_row, row, "Completed" if told.ok else "Failed", told.output[:MAX_OUTPUT], scene)
        elif row.session_id not in (None, node_row.session_id):
            _finish(unit, node_row, row, "Lost", "The node began another session before it told of it.", scene)
        elif row.deadline is not None and row.deadline < scene.now:
            _finish(unit, node_row, row, "Lost", "The node did not tell of it in time.", scene)


def _finish(unit: WriteUnit, node_row: Any, row: Any, status: str, output: str, scene: Scene) -> None:
    done = {"status": status, "finished_at": scene.now, "output": output}
    unit.execute(update(node_command).where(node_command.c.id == row.id).values(**done))
    args = msgspec.json.decode(row.args, type=dict[str, str])
    detail = {**args, "status": status, "output": output[:1000]}
    happened(unit, f"nodes.{row.kind}_done", node_row.id, scene, owner_id=node_row.provider_id, detail=detail)


def latest(unit: ReadUnit, node_ids: Collection[str], limit: int) -> list[Any]:
    """Return the rows of what nodes were asked last, newest first."""
    wanted = select(node_command).where(node_command.c.node_id.in_(sorted(node_ids)))
    newest = wanted.order_by(node_command.c.issued_at.desc(), node_command.c.id.desc()).limit(limit)
    return list(unit.select(newest).all())
