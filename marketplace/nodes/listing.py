"""Nodes as those who run them see them: what they are made of, what of it is free, and who holds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from marketplace.agent.inventory_wire import Inventory
from marketplace.agent.wire import Capabilities
from marketplace.catalog import datacenters
from marketplace.catalog import service as catalog
from marketplace.catalog.datacenters import Datacenter
from marketplace.catalog.service import PPM, InstanceType
from marketplace.nodes import draining
from marketplace.nodes.tables import gpu, node
from marketplace.nodes.wire import (
    Allocation,
    CpuAnswer,
    CustomPricing,
    DiskAnswer,
    Drain,
    GpuAnswer,
    Hardware,
    NodeAnswer,
    NodeType,
    Shape,
    Utilization,
)
from marketplace.placement import load
from marketplace.placement.capacity import GIB, Amount, unallocated
from marketplace.placement.view import GpuView, NodeView
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit
from marketplace.teams.tables import team
from marketplace.users.tables import users


def answers(unit: ReadUnit, rows: Sequence[Any], now: int) -> list[NodeAnswer]:
    """Tell of nodes, given their rows."""
    ids = [row.id for row in rows]
    if not ids:
        return []
    views = {view.id: view for view in load.views(unit, now, ids)}
    gpus: dict[str, list[Any]] = {}
    for one in unit.select(select(gpu).where(gpu.c.node_id.in_(ids)).order_by(gpu.c.number)):
        gpus.setdefault(one.node_id, []).append(one)
    homes, kinds = datacenters.every(unit), catalog.types(unit)
    counts, held = draining.counts(unit, ids), _holders(unit, views)
    return [
        _answer(row, views[row.id], gpus.get(row.id, []), homes[row.datacenter_id], kinds, counts.get(row.id, 0), held)
        for row in rows
    ]


def drain_info(row: Any) -> Drain:
    """How far a drain of a node is."""
    return Drain(
        state=row.drain_state,
        notification_sent=row.drain_state != "None" and row.drain_notified,
        started_at=row.drain_started_at,
        scheduled_stop_at=row.drain_deadline,
        grace_period_secs=row.drain_grace_s,
        reason=row.drain_reason,
    )


def shape(amount: Amount) -> Shape:
    """An amount on the wire; CPUs are hardware threads."""
    return Shape(gpu_count=amount.gpu, cpu_count=amount.threads, dram=amount.dram, disk=amount.disk)


def utilization(view: NodeView) -> Utilization:
    """What of a node is free."""
    free = view.capacity.less(view.taken)
    threads = [thread for core in view.cores for thread in core.threads if thread not in view.threads_claimed]
    available = [one for one in view.gpus if one.usable and not one.rented]
    return Utilization(
        cpu_cores_available=free.threads,
        cpu_cores_available_mask=_mask(threads),
        gpus_available=len(available),
        gpus_available_mask=_mask([one.number for one in available]),
        rentable_gpus=sum(one.free and not one.mig_enabled for one in view.gpus),
        mig_gpu_mask=_mask([one.number for one in view.gpus if one.mig_enabled]),
        dram_available=free.dram,
        disk_available=free.disk,
    )


def _mask(numbers: Collection[int]) -> str:
    return f"{sum(1 << number for number in numbers):x}"


def _holders(unit: ReadUnit, views: dict[str, NodeView]) -> dict[str, tuple[str, str]]:
    """Name of each quota and of its holder, by the quota's id."""
    ids = [standing.id for view in views.values() for standing in view.standings]
    wanted = (
        select(quota.c.id, quota.c.name, users.c.name.label("person"), team.c.name.label("team"))
        .join(users, users.c.id == quota.c.holder_id, isouter=True)
        .join(team, team.c.id == quota.c.holder_id, isouter=True)
        .where(quota.c.id.in_(ids))
    )
    return {row.id: (row.name, row.team or row.person or "") for row in unit.select(wanted)} if ids else {}


def _answer(
    row: Any,
    view: NodeView,
    gpus: Sequence[Any],
    home: Datacenter,
    kinds: dict[str, InstanceType],
    live: int,
    held: dict[str, tuple[str, str]],
) -> NodeAnswer:
    inventory = msgspec.json.decode(row.inventory, type=Inventory)
    kind = kinds.get(row.instance_type or "")
    return NodeAnswer(
        id=row.id,
        hostname=row.hostname,
        ip_address=row.ip_address,
        status="Hibernated" if row.status == "Ready" and row.hibernated else row.status,
        health_state="Healthy" if all(one.healthy for one in gpus) else "Unhealthy",
        client_version=row.agent_version,
        provider_name=home.provider_name,
        datacenter=home.name,
        country_code=home.country_code,
        list_on_marketplace=row.listed and row.drain_state == "None",
        drain_info=drain_info(row),
        hardware=_hardware(inventory, gpus, {one.id: one for one in view.gpus}),
        vm_ram_capacity=sum(view.hugepages.values()) * GIB or view.memory,
        storage_disk_size=view.disk,
        container_disk_limit=msgspec.json.decode(row.capabilities, type=Capabilities).container_disk,
        cpu_allocation_mode=row.cpu_mode,
        utilization=utilization(view),
        unallocated=shape(unallocated(view.capacity, view.taken, view.standings)),
        allocations=[
            Allocation(
                id=one.id,
                name=held[one.id][0],
                holder_name=held[one.id][1],
                budget=shape(one.budget),
                consumed=shape(one.consumed),
            )
            for one in view.standings
        ],
        active_instance_count=live,
        instance=None if kind is None else _type(kind, view.capacity.gpu),
        last_seen_at=row.last_seen,
        ssh_host=row.ssh_host,
        ssh_port=row.ssh_port,
        ssh_user=row.ssh_user,
        proxy_jump=row.proxy_jump,
        proxy_user=row.proxy_user,
        proxy_port=row.proxy_port,
    )


def _type(kind: InstanceType, gpus: int) -> NodeType:
    return NodeType(
        name=kind.name,
        cost_per_hour=catalog.node_cost(kind, gpus),
        custom_pricing=CustomPricing(
            vcpu_weight=kind.vcpu_weight / PPM,
            ram_weight=kind.ram_weight / PPM,
            disk_weight=kind.disk_weight / PPM,
            gpu_weight=kind.gpu_weight / PPM,
        ),
    )


def _hardware(inventory: Inventory, gpus: Sequence[Any], views: dict[str, GpuView]) -> Hardware:
    threads = inventory.cpu.threads
    return Hardware(
        cpu=CpuAnswer(
            brand=inventory.cpu.brand,
            physical_core_count=len({(one.package, one.core) for one in threads}),
            logical_core_count=len(threads),
        ),
        dram=inventory.memory_bytes,
        disks=[DiskAnswer(mount_point=inventory.disk.path, size=inventory.disk.total_bytes)],
        gpus=[
            GpuAnswer(
                index=one.number,
                brand_short=one.brand,
                vram=one.vram,
                pci_slot=one.pci_slot,
                pci_valid=one.pci_valid and one.present,
                enabled=one.enabled,
                gpuvendor_kernel_module_support=one.kernel_modules,
                mig_profile="enabled" if one.mig_enabled else None,
                tenant=_tenant(views[one.id]),
            )
            for one in gpus
        ],
    )


def _tenant(one: GpuView) -> str:
    if one.rented:
        return "Rental"
    return "Inference" if one.leased else "None"


def rows(
    unit: ReadUnit,
    *,
    ids: Collection[str] | None = None,
    provider_ids: Collection[str] | None = None,
) -> list[Any]:
    """Rows of nodes that are not deleted: all, these, or those of providers; by host name."""
    wanted = select(node).where(node.c.deleted_at.is_(None)).order_by(node.c.hostname, node.c.id)
    if ids is not None:
        wanted = wanted.where(node.c.id.in_(sorted(ids)))
    if provider_ids is not None:
        wanted = wanted.where(node.c.provider_id.in_(sorted(provider_ids)))
    return list(unit.select(wanted).all())
