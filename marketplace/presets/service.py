"""Presets are captured when a custom shape is rented, and kept once for each shape."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from sqlalchemy import delete, select, update

from marketplace.http.pagination import newest_first
from marketplace.presets.tables import instance_preset
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id


class Shape(msgspec.Struct, frozen=True):
    """A shape that somebody rented."""

    instance_type: str | None
    gpu_count: int
    vcpu: int
    dram: int
    disk: int


def shape_hash(shape: Shape) -> str:
    """A name for the values of a shape."""
    return hashlib.sha256(msgspec.json.encode(shape)).hexdigest()[:32]


def capture(unit: WriteUnit, user_id: str, shape: Shape, *, now: int, random: Random) -> None:
    """Remember that a person rented a shape."""
    name = shape_hash(shape)
    row = {
        "id": new_id(now, random),
        "user_id": user_id,
        "shape_hash": name,
        **msgspec.structs.asdict(shape),
        "created_at": now,
        "last_used_at": now,
    }
    unit.insert_missing(instance_preset, [row])
    mine = (instance_preset.c.user_id == user_id, instance_preset.c.shape_hash == name)
    unit.execute(update(instance_preset).where(*mine).values(last_used_at=now))


def page(unit: ReadUnit, user_id: str, *, cursor: str | None, limit: int) -> list[Any]:
    """Return rows of a person's presets, newest first, one more than `limit` when there are more."""
    mine = select(instance_preset).where(instance_preset.c.user_id == user_id)
    ordered = newest_first(mine, instance_preset.c.created_at, instance_preset.c.id, cursor, limit)
    return list(unit.select(ordered).all())


def remove(unit: WriteUnit, user_id: str, preset_id: str) -> bool:
    """Forget a preset of a person's; says whether there was one."""
    mine = (instance_preset.c.user_id == user_id, instance_preset.c.id == preset_id)
    return unit.execute(delete(instance_preset).where(*mine)).rowcount == 1
