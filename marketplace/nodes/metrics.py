"""What GPUs measured last, for those who run nodes; and for renters, of exactly the GPUs and MIG instances that are
theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import and_, func, select

from marketplace.agent.inventory_wire import MigInstance
from marketplace.nodes.tables import gpu, gpu_sample
from marketplace.placement.tables import gpu_slice_claim
from marketplace.store.db import ReadUnit

MIB = 1 << 20


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a MIG instance on it, as it was measured last. None is what the device does not tell."""

    node_id: str
    at: int
    number: int
    """of the GPU among its node's slots"""
    pci_slot: str
    uuid: str
    mig_profile: str | None
    utilization: int | None
    temperature: int | None
    vram_used: int | None
    vram_total: int | None
    power: int | None


class Held(msgspec.Struct, frozen=True):
    """What of a GPU an instance has: all of it, or the MIG instance that begins at a slice."""

    node_id: str
    pci_slot: str
    mig_start: int | None


class _Mig(msgspec.Struct, frozen=True):
    instances: list[MigInstance] = []


def latest(unit: ReadUnit, node_ids: Collection[str]) -> list[Measured]:
    """Return what is known last of every GPU and MIG instance of these nodes, in the order of their slots."""
    newest = (
        select(
            gpu_sample.c.node_id,
            gpu_sample.c.pci_slot,
            gpu_sample.c.uuid,
            func.max(gpu_sample.c.at).label("at"),
        )
        .where(gpu_sample.c.node_id.in_(sorted(node_ids)))
        .group_by(gpu_sample.c.node_id, gpu_sample.c.pci_slot, gpu_sample.c.uuid)
        .subquery()
    )
    same = [gpu_sample.c[name] == newest.c[name] for name in ("node_id", "pci_slot", "uuid", "at")]
    at_slot = and_(gpu.c.node_id == gpu_sample.c.node_id, gpu.c.pci_slot == gpu_sample.c.pci_slot)
    wanted = (
        select(gpu_sample, gpu.c.number, gpu.c.mig)
        .join(newest, and_(*same))
        .join(gpu, at_slot)
        .order_by(gpu_sample.c.node_id, gpu.c.number, gpu_sample.c.uuid)
    )
    return [_measured(row) for row in unit.select(wanted)]


def of_instances(unit: ReadUnit, instance_ids: Collection[str]) -> dict[str, list[Measured]]:
    """Return what is known last of the GPUs that instances have, by instance; who has none is absent."""
    wanted = (
        select(
            gpu_slice_claim.c.instance_id,
            gpu_slice_claim.c.created_at,
            gpu.c.node_id,
            gpu.c.pci_slot,
            gpu_slice_claim.c.mig_start,
        )
        .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
        .where(gpu_slice_claim.c.owner_id.in_(sorted(instance_ids)), gpu_slice_claim.c.released_at.is_(None))
        .distinct()
    )
    held: dict[str, dict[Held, int]] = {}
    for instance_id, since, *what in unit.select(wanted):
        held.setdefault(instance_id, {})[Held(*what)] = since
    nodes = {one.node_id for parts in held.values() for one in parts}
    measured = latest(unit, nodes) if nodes else []
    starts = _starts(unit, nodes)
    return {
        instance_id: [one for one in measured if _holds(parts, one, starts.get(one.uuid))]
        for instance_id, parts in held.items()
    }


def _holds(parts: Mapping[Held, int], one: Measured, start: int | None) -> bool:
    """Whether a measurement is of something that an instance has, since it has it: what whoever had it before did there
    is not told. Of a GPU that is cut into MIG instances, nobody who has one of them is told about the others, or about
    the whole."""
    since = parts.get(Held(one.node_id, one.pci_slot, start))
    return since is not None and since <= one.at


def _starts(unit: ReadUnit, node_ids: Collection[str]) -> dict[str, int]:
    """At which slice each MIG instance begins, by UUID."""
    texts = unit.select(select(gpu.c.mig).where(gpu.c.node_id.in_(sorted(node_ids)))).scalars()
    return {one.uuid: one.start for text in texts for one in _instances(text)}


def _instances(text: str) -> Sequence[MigInstance]:
    return msgspec.json.decode(text, type=_Mig).instances


def _measured(row: Any) -> Measured:
    profile = next((one.profile for one in _instances(row.mig) if one.uuid == row.uuid), None)
    return Measured(
        node_id=row.node_id,
        at=row.at,
        number=row.number,
        pci_slot=row.pci_slot,
        uuid=row.uuid,
        mig_profile=profile,
        utilization=row.utilization,
        temperature=row.temperature,
        vram_used=row.vram_used,
        vram_total=row.vram_total,
        power=row.power,
    )
