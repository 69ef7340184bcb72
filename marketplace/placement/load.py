"""Rows to views: the nodes as placement sees them, in a few queries whatever their number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Integer, Text, bindparam, cast, func, literal, select

from marketplace.agent.inventory_wire import Inventory, MigProfile
from marketplace.agent.wire import Capabilities
from marketplace.nodes.tables import gpu, node
from marketplace.placement.capacity import Amount
from marketplace.placement.tables import SLICES, claim, gpu_slice_claim, inference_lease
from marketplace.placement.view import Core, GpuView, Made, NodeView, Profile
from marketplace.quotas import service as quotas
from marketplace.quotas.service import Timetable
from marketplace.store.db import ReadUnit
from marketplace.store.gather import Part, gather
from marketplace.store.prepared import Prepared

_COLUMNS = (
    node.c.id,
    node.c.hostname,
    node.c.ip_address,
    node.c.provider_id,
    node.c.datacenter_id,
    node.c.instance_type,
    node.c.generation,
    node.c.status,
    node.c.drain_state,
    node.c.hibernated,
    node.c.listed,
    node.c.cpu_mode,
    node.c.overcommit_percent,
    node.c.inference_floor,
    node.c.dram_reserve,
    node.c.capabilities,
    node.c.inventory_digest,
)
_NODES = select(*_COLUMNS).where(node.c.deleted_at.is_(None))
_EVERY = Prepared(_NODES)
_BY_ID = Prepared(_NODES.where(node.c.id == bindparam("node")))
_BY_IDS = _NODES.where(node.c.id.in_(bindparam("ids", expanding=True)))
_MARK = node.c.id + " " + cast(node.c.generation, Text)
_TAKING = {
    dialect: Prepared(
        select(join(_MARK, ",")).where(
            node.c.deleted_at.is_(None),
            node.c.instance_type == bindparam("type"),
            node.c.status == "Ready",
            node.c.drain_state == "None",
            node.c.hibernated.is_(False),
        )
    )
    for dialect, join in (("sqlite", func.group_concat), ("postgresql", func.string_agg))
}


_GPUS = Part(
    select(
        gpu.c.node_id,
        gpu.c.id,
        gpu.c.number,
        gpu.c.pci_slot,
        gpu.c.numa,
        gpu.c.vram,
        gpu.c.brand,
        gpu.c.kernel_modules,
        (gpu.c.pci_valid & gpu.c.present & gpu.c.healthy & gpu.c.enabled).label("usable"),
        gpu.c.mig_enabled,
        gpu.c.mig,
    ),
    gpu.c.node_id,
)
_SLICES = Part(
    select(
        gpu_slice_claim.c.gpu_id,
        func.sum(literal(1, BigInteger).bitwise_lshift(cast(gpu_slice_claim.c.slice, Integer)).distinct()),
        gpu_slice_claim.c.lease_id,
        inference_lease.c.preemptible,
    )
    .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
    .join(inference_lease, inference_lease.c.id == gpu_slice_claim.c.lease_id, isouter=True)
    .where(gpu_slice_claim.c.released_at.is_(None))
    .group_by(gpu_slice_claim.c.gpu_id, gpu_slice_claim.c.lease_id, inference_lease.c.preemptible),
    gpu.c.node_id,
)
_CLAIMS = Part(
    select(claim.c.node_id, claim.c.threads, claim.c.dram, claim.c.disk, claim.c.hugepages, claim.c.cpus).where(
        claim.c.released_at.is_(None)
    ),
    claim.c.node_id,
)
_INVENTORY = select(node.c.id, node.c.inventory).where(node.c.id.in_(bindparam("ids", expanding=True)))

_MAX_KNOWN = 10_000
_known: dict[str, Hardware] = {}
"""Hardware by the digest of the inventory that tells of it: reading a large one takes longer than placing on it."""


class Hardware(msgspec.Struct, frozen=True):
    """What of an inventory placement needs."""

    cores: tuple[Core, ...]
    memory: int
    hugepages: Mapping[int, int]
    disk: int
    nvswitch: bool


class _Node(NamedTuple):
    """A row of a node: the members are _COLUMNS."""

    id: str
    hostname: str
    ip_address: str
    provider_id: str
    datacenter_id: str
    instance_type: str | None
    generation: int
    status: Literal["Ready", "NotResponding", "Offline"]
    drain_state: str
    hibernated: bool
    listed: bool
    cpu_mode: Literal["Legacy", "Pinned", "Mixed"]
    overcommit_percent: int
    inference_floor: int
    dram_reserve: int
    capabilities: str
    inventory_digest: str


class GpuMig(msgspec.Struct, frozen=True):
    """What is kept of a GPU's MIG abilities."""

    profiles: list[MigProfile] = []
    instances: list[Made] = []


def hardware(inventory: Inventory) -> Hardware:
    """Read an inventory."""
    cores: dict[tuple[int, int, int], list[int]] = {}
    for thread in inventory.cpu.threads:
        cores.setdefault((thread.numa, thread.package, thread.core), []).append(thread.cpu)
    return Hardware(
        tuple(Core(numa, tuple(sorted(threads))) for (numa, _, _), threads in sorted(cores.items())),
        inventory.memory_bytes,
        {one.node: one.hugepages_1g for one in inventory.numa if one.hugepages_1g},
        inventory.disk.total_bytes,
        inventory.nvswitch,
    )


def views(unit: ReadUnit, now: int, node_ids: Collection[str] | None = None) -> list[NodeView]:
    """Return nodes as they are now: these, or all."""
    return _of_rows(unit, _rows(unit, node_ids), now)


def _rows(unit: ReadUnit, node_ids: Collection[str] | None) -> list[tuple[Any, ...]]:
    if node_ids is None:
        return unit.rows(_EVERY, {})
    if len(node_ids) == 1:
        return unit.rows(_BY_ID, {"node": next(iter(node_ids))})
    return [tuple(row) for row in unit.select(_BY_IDS, {"ids": sorted(node_ids)})]


def taking(unit: ReadUnit, instance_type: str) -> frozenset[str]:
    """The marks of the nodes of a type that take anything new at all. They come as one text: a row for each node takes
    several times as long."""
    ((marks,),) = unit.rows(_TAKING[unit.dialect], {"type": instance_type})
    return frozenset(marks.split(",")) if marks else frozenset()


def mark(view: NodeView) -> str:
    """A node at a generation, as `taking` names it."""
    return f"{view.id} {view.generation}"


def marked(mark: str) -> str:
    """The id of the node of a mark."""
    return mark.partition(" ")[0]


def _of_rows(unit: ReadUnit, found: Collection[tuple[Any, ...]], now: int) -> list[NodeView]:
    if not found:
        return []
    nodes = [_Node(*row) for row in found]
    ids = [row.id for row in nodes]
    known = _hardware_of(unit, {row.id: row.inventory_digest for row in nodes})
    of_gpus, of_slices, of_claims, of_quotas = gather(unit, (_GPUS, _SLICES, _CLAIMS, quotas.OF_NODES), ids, now=now)
    gpus = _gpus(of_gpus, of_slices)
    used = _used(of_claims)
    held = quotas.timetables(unit, of_quotas, now)
    return [
        _view(row, known[row.id], gpus.get(row.id, ()), used.get(row.id, _Used()), held.get(row.id, Timetable()))
        for row in nodes
    ]


class _Used(msgspec.Struct):
    """What claims of one node sum to."""

    threads: int = 0
    dram: int = 0
    disk: int = 0
    pages: dict[int, int] = msgspec.field(default_factory=dict)
    claimed: set[int] = msgspec.field(default_factory=set)


def _used(rows: Collection[Any]) -> dict[str, _Used]:
    found: dict[str, _Used] = {}
    for node_id, threads, dram, disk, hugepages, cpus in rows:
        used = found.setdefault(node_id, _Used())
        used.threads += threads
        used.dram += dram
        used.disk += disk
        for numa, count in msgspec.json.decode(hugepages, type=dict[int, int]).items():
            used.pages[numa] = used.pages.get(numa, 0) + count
        for taken in msgspec.json.decode(cpus, type=dict[int, list[int]]).values():
            used.claimed.update(taken)
    return found


_OF_MASK = [frozenset(number for number in range(SLICES) if mask >> number & 1) for mask in range(1 << SLICES)]
"""Slices by the sum of their powers of two."""


def _gpus(rows: Collection[Any], slices: Collection[Any]) -> dict[str, list[GpuView]]:
    rented: dict[str, int] = {}
    leased: dict[str, int] = {}
    fixed: set[str] = set()
    for gpu_id, mask, lease_id, preemptible in slices:
        if lease_id is None:
            rented[gpu_id] = int(mask)
        else:
            leased[gpu_id] = leased.get(gpu_id, 0) | int(mask)
            if not preemptible:
                fixed.add(gpu_id)
    found: dict[str, list[GpuView]] = {}
    for row in rows:
        node_id, gpu_id, number, slot, numa, vram, brand, modules, usable, mig_enabled, mig = row
        found.setdefault(node_id, []).append(
            GpuView(
                id=gpu_id,
                number=number,
                pci_slot=slot,
                numa=numa,
                vram=vram,
                brand=brand,
                modules=modules,
                usable=bool(usable),
                mig_enabled=mig_enabled,
                profiles=profiles(mig) if len(mig) > 2 else {},
                made=tuple(msgspec.json.decode(mig, type=GpuMig).instances) if len(mig) > 2 else (),
                rented=_OF_MASK[rented.get(gpu_id, 0)],
                leased=_OF_MASK[leased.get(gpu_id, 0)],
                reclaimable=gpu_id in leased and gpu_id not in fixed,
            )
        )
    for gpus in found.values():
        gpus.sort(key=lambda one: one.number)
    return found


def profiles(mig: str) -> dict[str, Profile]:
    """The MIG profiles that a GPU offers, from the column that keeps them."""
    kept = msgspec.json.decode(mig, type=GpuMig)
    return {one.profile: Profile(one.size, tuple(sorted(one.placements))) for one in kept.profiles}


def _hardware_of(unit: ReadUnit, digests: dict[str, str]) -> dict[str, Hardware]:
    missing = sorted(node_id for node_id, digest in digests.items() if digest not in _known)
    if missing:
        if len(_known) > _MAX_KNOWN:
            _known.clear()
        for node_id, text in unit.select(_INVENTORY, {"ids": missing}).all():
            _known[digests[node_id]] = hardware(msgspec.json.decode(text, type=Inventory))
    return {node_id: _known[digest] for node_id, digest in digests.items()}


def _view(row: _Node, known: Hardware, gpus: Collection[GpuView], used: _Used, held: Timetable) -> NodeView:
    able = msgspec.json.decode(row.capabilities, type=Capabilities)
    return NodeView(
        id=row.id,
        hostname=row.hostname,
        ip_address=row.ip_address,
        provider_id=row.provider_id,
        datacenter_id=row.datacenter_id,
        instance_type=row.instance_type,
        generation=row.generation,
        status=row.status,
        drain_state=row.drain_state,
        hibernated=row.hibernated,
        listed=row.listed,
        cpu_mode=row.cpu_mode,
        overcommit_percent=row.overcommit_percent,
        vm=able.vm,
        container=able.container,
        vm_mig=able.vm_mig,
        nvswitch=known.nvswitch,
        inference_floor=row.inference_floor,
        cores=known.cores,
        memory=max(0, known.memory - row.dram_reserve),
        hugepages=known.hugepages,
        disk=known.disk,
        gpus=tuple(gpus),
        used=Amount(sum(bool(gpu.rented) for gpu in gpus), used.threads, used.dram, used.disk),
        pages_used=used.pages,
        threads_claimed=frozenset(used.claimed),
        standings=held.standings,
        until=held.until,
    )
