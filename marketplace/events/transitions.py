"""Every change of a status goes through here: it must be in the noun's table of transitions, it is made only from the
status that it was decided on, and it leaves one event, in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Table, update

from marketplace.events import service as events
from marketplace.http.operation import Call
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random

Moves = Mapping[tuple[str, str], str]
"""(status, trigger) → next status. What is not in it cannot happen."""


class IllegalMoveError(ValueError):
    """The table of transitions has no such move."""

    def __init__(self, noun: str, state: str, trigger: str) -> None:
        super().__init__(f"{noun}: {trigger} is not possible from {state}")
        self.state = state
        self.trigger = trigger


class MovedError(Exception):
    """The row has another status by now than the one that the move was decided on."""


class Actor(msgspec.Struct, frozen=True):
    """Who does it."""

    kind: str
    id: str = ""
    credential_id: str = ""
    request_id: str = ""


SYSTEM = Actor("system")


def actor_of(call: Call) -> Actor:
    """The caller of an operation."""
    who = call.principal
    if who is None:
        return Actor("anonymous", request_id=call.request_id)
    return Actor(who.kind, who.id, who.credential_id, call.request_id)


class Machine(msgspec.Struct, frozen=True):
    """A status column and the moves that it may make."""

    noun: str
    """what its events begin with"""
    table: Table
    """its key is `id`"""
    column: str
    moves: Moves

    def next(self, state: str, trigger: str) -> str:
        """Where a trigger leads. IllegalMoveError."""
        found = self.moves.get((state, trigger))
        if found is None:
            raise IllegalMoveError(self.noun, state, trigger)
        return found


class Scene(msgspec.Struct, frozen=True):
    """Who moves something, when."""

    actor: Actor
    now: int
    random: Random


def scene_of(call: Call) -> Scene:
    """An operation's caller, now."""
    return Scene(actor_of(call), call.now, call.context.random)


def transition(
    unit: WriteUnit,
    machine: Machine,
    row_id: str,
    state: str,
    trigger: str,
    scene: Scene,
    *,
    owner_id: str,
    values: Mapping[str, Any] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> str:
    """Move a row on from `state` and return its new status; `values` are written with it.

    IllegalMoveError; MovedError when the row is not in `state`, which whoever locked it first never sees.
    """
    after = machine.next(state, trigger)
    table = machine.table
    changed = unit.execute(
        update(table)
        .where(table.c.id == row_id, table.c[machine.column] == state)
        .values({machine.column: after, **(values or {})})
    )
    if changed.rowcount != 1:
        raise MovedError(f"{machine.noun} {row_id} is not {state}")
    _tell(unit, machine, row_id, trigger, state, after, scene, owner_id, detail)
    return after


def begun(
    unit: WriteUnit,
    machine: Machine,
    row_id: str,
    state: str,
    trigger: str,
    scene: Scene,
    *,
    owner_id: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Tell that a row was made in a status."""
    _tell(unit, machine, row_id, trigger, None, state, scene, owner_id, detail)


def happened(
    unit: WriteUnit, action: str, row_id: str, scene: Scene, *, owner_id: str, detail: Mapping[str, Any]
) -> None:
    """Tell of something that changed no status."""
    actor = scene.actor
    events.record(
        unit,
        action=action,
        actor_kind=actor.kind,
        actor_id=actor.id,
        credential_id=actor.credential_id,
        owner_id=owner_id,
        subject_id=row_id,
        detail=detail,
        request_id=actor.request_id,
        now=scene.now,
        random=scene.random,
    )


def _tell(
    unit: WriteUnit,
    machine: Machine,
    row_id: str,
    trigger: str,
    before: str | None,
    after: str,
    scene: Scene,
    owner_id: str,
    detail: Mapping[str, Any] | None,
) -> None:
    told = {machine.column: [before, after], **(detail or {})}
    happened(unit, f"{machine.noun}.{trigger}", row_id, scene, owner_id=owner_id, detail=told)
