"""Types of machines and their variants. Every change raises their epoch in the same transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import insert, select, update

from marketplace.catalog.tables import instance_type, instance_variant
from marketplace.nodes.tables import node
from marketplace.placement.capacity import Amount, CpuPolicy
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit

PPM = 1_000_000


class NameTakenError(ValueError):
    """Another type or variant has this name."""


class InUseError(ValueError):
    """Nodes are of this type."""


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of machine. Weights are millionths of a node's price, and sum to one."""

    name: str
    brand_short: str
    manufacturer: str = ""
    cost_per_hour: int
    kernel_modules: str | None = None
    vcpu_weight: int = 60_000
    ram_weight: int = 50_000
    disk_weight: int = 10_000
    gpu_weight: int = 880_000


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A shape of a type that may be rented."""

    name: str
    type_name: str
    gpu_count: int = 0
    mig_profile: str | None = None
    vcpu: int
    dram: int
    disk: int
    vram: int = 0
    cpu_policy: CpuPolicy = "Dedicated"
    overcommit: bool = False
    services: tuple[str, ...] = ("vm", "container")
    cost_per_hour: int


_TYPE = tuple(instance_type.c[name] for name in InstanceType.__struct_fields__)
_VARIANT = tuple(instance_variant.c[name] for name in Variant.__struct_fields__)
_THERE, _OFFERED = instance_type.c.removed_at.is_(None), instance_variant.c.removed_at.is_(None)


def add_type(unit: WriteUnit, made: InstanceType, now: int) -> None:
    """Add a type; one that was removed comes back as described. NameTakenError."""
    known = unit.select(
        select(instance_type.c.removed_at).where(instance_type.c.name == made.name).with_for_update()
    ).one_or_none()
    values = {**msgspec.structs.asdict(made), "removed_at": None}
    if known is None:
        unit.execute(insert(instance_type).values(**values, created_at=now))
    elif known.removed_at is None:
        raise NameTakenError(made.name)
    else:
        unit.execute(update(instance_type).where(instance_type.c.name == made.name).values(**values))
    epochs.bump(unit, epochs.CATALOG)


def add_variant(unit: WriteUnit, made: Variant, now: int) -> None:
    """Add a variant; one that was removed comes back as described. NameTakenError."""
    known = unit.select(
        select(instance_variant.c.removed_at).where(instance_variant.c.name == made.name).with_for_update()
    ).one_or_none()
    values = {**_columns(made), "removed_at": None}
    if known is None:
        unit.execute(insert(instance_variant).values(**values, created_at=now))
    elif known.removed_at is None:
        raise NameTakenError(made.name)
    else:
        unit.execute(update(instance_variant).where(instance_variant.c.name == made.name).values(**values))
    epochs.bump(unit, epochs.CATALOG)


def change_type(unit: WriteUnit, changed: InstanceType) -> None:
    """Write a type. What runs keeps the price that it was rented at."""
    unit.execute(
        update(instance_type).where(instance_type.c.name == changed.name).values(**msgspec.structs.asdict(changed))
    )
    epochs.bump(unit, epochs.CATALOG)


def change_variant(unit: WriteUnit, changed: Variant) -> None:
    """Write a variant. What runs keeps the shape and the price that it was rented at."""
    unit.execute(update(instance_variant).where(instance_variant.c.name == changed.name).values(**_columns(changed)))
    epochs.bump(unit, epochs.CATALOG)


def remove_type(unit: WriteUnit, name: str, now: int) -> None:
    """Offer a type and its variants no more. InUseError while nodes are of it."""
    used = select(node.c.id).where(node.c.instance_type == name, node.c.deleted_at.is_(None)).limit(1)
    if unit.select(used).first() is not None:
        raise InUseError(name)
    unit.execute(update(instance_type).where(instance_type.c.name == name).values(removed_at=now))
    unit.execute(update(instance_variant).where(instance_variant.c.type_name == name, _OFFERED).values(removed_at=now))
    epochs.bump(unit, epochs.CATALOG)


def remove_variant(unit: WriteUnit, name: str, now: int) -> None:
    """Offer a variant no more."""
    unit.execute(update(instance_variant).where(instance_variant.c.name == name).values(removed_at=now))
    epochs.bump(unit, epochs.CATALOG)


def types(unit: ReadUnit, names: Collection[str] | None = None) -> dict[str, InstanceType]:
    """Return the types on offer: these, or all, by name."""
    wanted = select(*_TYPE).where(_THERE).order_by(instance_type.c.name)
    if names is not None:
        wanted = wanted.where(instance_type.c.name.in_(sorted(names)))
    return {row.name: InstanceType(**row._mapping) for row in unit.select(wanted)}


def variants(unit: ReadUnit) -> list[Variant]:
    """Return every variant on offer."""
    wanted = select(*_VARIANT).where(_OFFERED).order_by(instance_variant.c.gpu_count, instance_variant.c.name)
    return [_variant(row) for row in unit.select(wanted)]


def variant(unit: ReadUnit, name: str) -> Variant | None:
    """Return a variant on offer."""
    row = unit.select(select(*_VARIANT).where(instance_variant.c.name == name, _OFFERED)).one_or_none()
    return None if row is None else _variant(row)


def node_cost(kind: InstanceType, gpus: int) -> int:
    """What a whole node of a type costs an hour, in nano-units: each of its GPUs, or itself where it has none."""
    return kind.cost_per_hour * max(1, gpus)


def custom_cost(kind: InstanceType, capacity: Amount, asked: Amount) -> int:
    """What a part of a node costs an hour: of every thing its share of the node's price, weighted. Pure integers; the
    part of the GPUs is rounded down, and so is the sum."""
    whole = node_cost(kind, capacity.gpu)
    parts = (
        (kind.gpu_weight, asked.gpu, capacity.gpu),
        (kind.vcpu_weight, asked.threads, capacity.threads),
        (kind.ram_weight, asked.dram, capacity.dram),
        (kind.disk_weight, asked.disk, capacity.disk),
    )
    return sum(whole * weight * part // (total * PPM) for weight, part, total in parts if total)


def _columns(made: Variant) -> dict[str, Any]:
    return {**msgspec.structs.asdict(made), "services": msgspec.json.encode(made.services).decode()}


def _variant(row: Any) -> Variant:
    values = dict(row._mapping)
    return Variant(**{**values, "services": tuple(msgspec.json.decode(values["services"]))})
