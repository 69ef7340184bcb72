"""Operations on nodes: their people and admins see them, empty them, take them back, and offer them or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select, update

from marketplace.catalog import datacenters
from marketplace.catalog import service as catalog
from marketplace.events.transitions import scene_of
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.nodes import draining, listing
from marketplace.nodes import service as nodes
from marketplace.nodes.tables import gpu, node
from marketplace.nodes.wire import (
    ById,
    ByName,
    DrainAnswer,
    DrainRequest,
    DrainResult,
    ForceAnswer,
    ForceRequest,
    ForceResult,
    IdsAnswer,
    ListAnswer,
    ListingRequest,
    ListRequest,
    SelectRequest,
    UpdateRequest,
    UpdateTypeRequest,
)
from marketplace.providers import service as providers
from marketplace.quotas import service as quotas
from marketplace.relay import granting
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

_NODE = "019a0f6c-2a00-7abc-8def-000000000021"


def list_nodes(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return nodes: admins all, or those of some providers; a provider's people their own."""
    selector = request.selector
    ids = selector.ids if isinstance(selector, ById) else None
    owned = owners(call, unit)
    if isinstance(selector, ByName):
        named = {found.id for name in selector.names if (found := providers.find_by_name(unit, name))}
        owned = named if owned is None else owned & named
    rows = listing.rows(unit, ids=ids, provider_ids=owned)
    return ListAnswer(nodes=listing.answers(unit, rows, call.now))


def drain(call: Call, unit: WriteUnit, request: DrainRequest) -> DrainAnswer:
    """Begin to empty nodes."""
    results = []
    for row in lock(call, unit, request.selector):
        if row.drain_state != "None":
            raise Refusal(Code.NODE_DRAINING, f"{row.hostname} is {row.drain_state} already.", param="selector")
        found = draining.drain(
            unit,
            row,
            grace_s=request.grace_period_secs,
            notify=request.notify_users,
            reason=request.custom_message,
            scene=scene_of(call),
        )
        after = nodes.find(unit, row.id)
        results.append(
            DrainResult(
                node_id=row.id,
                active_instance_count=found.active,
                users_notified=found.told,
                drain_info=listing.drain_info(after),
            )
        )
    return DrainAnswer(results=results)


def force_drain(call: Call, unit: WriteUnit, request: ForceRequest) -> ForceAnswer:
    """End all that still runs on nodes that are being emptied."""
    results = []
    for row in lock(call, unit, request.selector):
        if row.drain_state != "Draining":
            raise Refusal(Code.NODE_NOT_DRAINING, f"{row.hostname} is not being emptied.", param="selector")
        ended = draining.force(unit, row, scene_of(call))
        call.record(
            unit, "nodes.force", owner_id=row.provider_id, subject_id=row.id, ended=ended, reason=request.reason or ""
        )
        results.append(ForceResult(node_id=row.id, instances_terminated=ended))
    return ForceAnswer(results=results)


def cancel_drain(call: Call, unit: WriteUnit, request: SelectRequest) -> IdsAnswer:
    """Stop emptying nodes: they are as before."""
    rows = lock(call, unit, request.selector)
    for row in rows:
        if row.drain_state != "Draining":
            raise Refusal(Code.NODE_NOT_DRAINING, f"{row.hostname} is not being emptied.", param="selector")
        draining.restore(unit, row, "cancel_drain", scene_of(call))
    return _ids(rows)


def resume(call: Call, unit: WriteUnit, request: SelectRequest) -> IdsAnswer:
    """Take nodes that are empty back into service, and offer them."""
    rows = lock(call, unit, request.selector)
    for row in rows:
        left = len(draining.live(unit, row.id))
        if row.drain_state == "None" or left:
            reason = "is not drained" if row.drain_state == "None" else f"still has {left} instances"
            raise Refusal(
                Code.NODE_NOT_DRAINED,
                f"{row.hostname} {reason}.",
                param="selector",
                details={"node_id": row.id, "active_instance_count": left},
            )
        draining.restore(unit, row, "resume", scene_of(call))
    return _ids(rows)


def set_listing(call: Call, unit: WriteUnit, request: ListingRequest) -> IdsAnswer:
    """Offer nodes on the market, or not."""
    rows = lock(call, unit, request.selector)
    for row in rows:
        if row.drain_state != "None":
            raise Refusal(Code.NODE_DRAINING, f"{row.hostname} is {row.drain_state}.", param="selector")
        draining.set_listing(unit, row.id, request.list_on_marketplace)
        call.record(
            unit, "nodes.listing", owner_id=row.provider_id, subject_id=row.id, listed=request.list_on_marketplace
        )
    return _ids(rows)


def update_type(call: Call, unit: WriteUnit, request: UpdateTypeRequest) -> IdsAnswer:
    """Say of which type nodes are."""
    rows = lock(call, unit, request.selector)
    kind = request.instance_type
    if kind is not None and kind not in catalog.types(unit, [kind]):
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "There is no such type.", param="instance_type")
    for row in rows:
        _write(unit, row.id, instance_type=kind)
        call.record(unit, "nodes.type", owner_id=row.provider_id, subject_id=row.id, instance_type=kind)
    return _ids(rows)


def change(call: Call, unit: WriteUnit, request: UpdateRequest) -> IdsAnswer:
    """Change what people set of a node."""
    (row,) = lock(call, unit, ById(ById=[request.node_id]))
    values: dict[str, Any] = {}
    for name, column in (
        ("cpu_allocation_mode", "cpu_mode"),
        ("overcommit_percent", "overcommit_percent"),
        ("erase_grace_period", "erase_grace_s"),
        ("inference_floor", "inference_floor"),
        ("dram_reserve", "dram_reserve"),
    ):
        if getattr(request, name) is not None:
            values[column] = getattr(request, name)
    if request.datacenter is not None:
        homes = [one for one in datacenters.by_name(unit, [request.datacenter]) if one.provider_id == row.provider_id]
        if not homes:
            raise Refusal(Code.DATACENTER_NOT_FOUND, "The provider has no such datacenter.", param="datacenter")
        if homes[0].id != row.datacenter_id and granting.publishes(unit, row.id):
            raise Refusal(
                Code.NODE_IN_USE, "The relay of its datacenter publishes ports of its machines.", param="datacenter"
            )
        values["datacenter_id"] = homes[0].id
        nodes.touch(unit, row.id)
    if request.disabled_gpus is not None:
        there = set(unit.select(select(gpu.c.pci_slot).where(gpu.c.node_id == row.id)).scalars())
        if unknown := sorted(set(request.disabled_gpus) - there):
            raise Refusal(
                Code.VALIDATION_FAILED,
                f"disabled_gpus: the node has no GPU at {', '.join(unknown)[:200]}",
                param="disabled_gpus",
            )
        off = gpu.c.pci_slot.in_(request.disabled_gpus)
        unit.execute(update(gpu).where(gpu.c.node_id == row.id, off).values(enabled=False))
        unit.execute(update(gpu).where(gpu.c.node_id == row.id, ~off).values(enabled=True))
        nodes.touch(unit, row.id)
    _write(unit, row.id, **values)
    call.record(
        unit,
        "nodes.update",
        owner_id=row.provider_id,
        subject_id=row.id,
        changed=sorted(request.model_fields_set - {"node_id"}),
    )
    return _ids([row])


def delete(call: Call, unit: WriteUnit, request: SelectRequest) -> IdsAnswer:
    """Delete nodes for good: those that are empty, under no allocation, and offline or drained."""
    rows = lock(call, unit, request.selector)
    for row in rows:
        left = len(draining.live(unit, row.id))
        held = quotas.standings(unit, [row.id], call.now)
        if left or held or (row.status != "Offline" and row.drain_state != "Drained"):
            raise Refusal(
                Code.NODE_IN_USE,
                f"{row.hostname} is not offline or drained, or something is still on it.",
                param="selector",
                details={"node_id": row.id, "active_instance_count": left},
            )
        _write(unit, row.id, deleted_at=call.now, listed=False)
        call.record(unit, "nodes.delete", owner_id=row.provider_id, subject_id=row.id)
    return _ids(rows)


def owners(call: Call, unit: ReadUnit) -> set[str] | None:
    """The provider that the caller acts for; None for admins: all."""
    if Permission.NODES_READ_ALL in call.caller.permissions:
        return None
    mine = providers.provider_of(unit, call.caller.id)
    return set() if mine is None else {mine.id}


def lock(call: Call, unit: WriteUnit, selector: ById, *, param: str = "selector") -> list[Any]:
    """Lock nodes that the caller runs, by id. Refusal: NodeNotFound, for one or all."""
    wanted = select(node).where(node.c.id.in_(sorted(set(selector.ids))), node.c.deleted_at.is_(None))
    rows = list(unit.select(wanted.order_by(node.c.id).with_for_update()).all())
    owned = owners(call, unit)
    if len(rows) != len(set(selector.ids)) or any(owned is not None and row.provider_id not in owned for row in rows):
        raise Refusal(Code.NODE_NOT_FOUND, "You run no such node.", param=param)
    return rows


def _write(unit: WriteUnit, node_id: str, **values: Any) -> None:
    unit.execute(update(node).where(node.c.id == node_id).values(**values, generation=node.c.generation + 1))


def _ids(rows: list[Any]) -> IdsAnswer:
    return IdsAnswer(node_ids=[row.id for row in rows])


_SELECTED = {"selector": {"ById": [_NODE]}}
_DRAIN = {
    "state": "Draining",
    "notification_sent": True,
    "started_at": "2026-11-21T01:00:00Z",
    "scheduled_stop_at": "2026-11-22T01:00:00Z",
    "grace_period_secs": 86400,
    "reason": None,
}
_SHAPE = {"gpu_count": 1, "cpu_count": 22, "dram": 274877906944, "disk": 1099511627776}
_EXAMPLE: dict[str, Any] = {
    "id": _NODE,
    "hostname": "g07",
    "ip_address": "198.51.100.7",
    "status": "Ready",
    "health_state": "Healthy",
    "client_version": "0.1.3",
    "provider_name": "acme",
    "datacenter": "eu-1",
    "country_code": "IT",
    "list_on_marketplace": False,
    "drain_info": _DRAIN,
    "hardware": {
        "cpu": {"brand": "EPYC", "physical_core_count": 64, "logical_core_count": 128},
        "dram": 1099511627776,
        "disks": [{"mount_point": "/var/lib/headrace", "size": 7681501126656}],
        "gpus": [
            {
                "index": 0,
                "brand_short": "H200",
                "vram": 150323855360,
                "pci_slot": "0000:1b:00.0",
                "pci_valid": True,
                "enabled": True,
                "gpuvendor_kernel_module_support": "OpenOrProprietary",
                "mig_profile": None,
                "tenant": "Inference",
            }
        ],
    },
    "vm_ram_capacity": 1030792151040,
    "storage_disk_size": 7681501126656,
    "container_disk_limit": "quota",
    "cpu_allocation_mode": "Pinned",
    "utilization": {
        "cpu_cores_available": 96,
        "cpu_cores_available_mask": "ff",
        "gpus_available": 6,
        "gpus_available_mask": "fc",
        "rentable_gpus": 5,
        "mig_gpu_mask": "0",
        "dram_available": 755914244096,
        "disk_available": 6000000000000,
    },
    "unallocated": _SHAPE,
    "allocations": [{"id": "q", "name": "KMG-2026", "holder_name": "team-a", "budget": _SHAPE, "consumed": _SHAPE}],
    "active_instance_count": 2,
    "instance": {
        "name": "h200-141gb",
        "cost_per_hour": 2000,
        "custom_pricing": {"vcpu_weight": 0.06, "ram_weight": 0.05, "disk_weight": 0.01, "gpu_weight": 0.88},
    },
    "last_seen_at": "2026-11-21T01:00:00Z",
    "ssh_host": "198.51.100.7",
    "ssh_port": 22,
    "ssh_user": "ops",
    "proxy_jump": None,
    "proxy_user": None,
    "proxy_port": None,
}


def _row(
    verb: str,
    summary: str,
    request: Any,
    response: Any,
    handler: Callable[..., Any],
    *errors: Code,
    example: dict[str, Any] | None = None,
    answer: dict[str, Any] | None = None,
    permission: Permission = Permission.NODES_WRITE,
) -> Operation[Any]:
    return Operation(
        name=f"nodes.{verb}",
        summary=summary,
        path=f"/api/v1/nodes/{verb}",
        request=request,
        response=response,
        permission=permission,
        rate="write",
        handler=Writes(handler),
        example={**_SELECTED, **(example or {})},
        answer=answer or {"node_ids": [_NODE]},
        errors=(Code.NODE_NOT_FOUND, *errors),
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="nodes.list",
        summary="Nodes with what of them is free; a provider's people see their own.",
        path="/api/v1/nodes/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.NODES_READ,
        rate="read",
        handler=Reads(list_nodes),
        example={"selector": {"ByName": ["acme"]}},
        answer={"nodes": [_EXAMPLE]},
    ),
    _row(
        "drain",
        "Empty nodes: nothing new comes, and who is there is told.",
        DrainRequest,
        DrainAnswer,
        drain,
        Code.NODE_DRAINING,
        example={"grace_period_secs": 86400},
        answer={"results": [{"node_id": _NODE, "active_instance_count": 2, "users_notified": 2, "drain_info": _DRAIN}]},
    ),
    _row(
        "force_drain",
        "End all that still runs on nodes that are being emptied.",
        ForceRequest,
        ForceAnswer,
        force_drain,
        Code.NODE_NOT_DRAINING,
        answer={"results": [{"node_id": _NODE, "instances_terminated": 2}]},
    ),
    _row(
        "cancel_drain",
        "Stop emptying nodes: they are as before.",
        SelectRequest,
        IdsAnswer,
        cancel_drain,
        Code.NODE_NOT_DRAINING,
    ),
    _row(
        "resume",
        "Take empty nodes back into service, and offer them.",
        SelectRequest,
        IdsAnswer,
        resume,
        Code.NODE_NOT_DRAINED,
    ),
    _row(
        "set_marketplace_listing",
        "Offer nodes on the market, or hide them.",
        ListingRequest,
        IdsAnswer,
        set_listing,
        Code.NODE_DRAINING,
        example={"list_on_marketplace": False},
    ),
    _row(
        "update_instance_type",
        "Say of which type nodes are.",
        UpdateTypeRequest,
        IdsAnswer,
        update_type,
        Code.INSTANCE_TYPE_NOT_FOUND,
        example={"instance_type": "h200-141gb"},
        permission=Permission.CATALOG_WRITE,
    ),
    _row(
        "delete",
        "Delete nodes for good, once nothing is on them.",
        SelectRequest,
        IdsAnswer,
        delete,
        Code.NODE_IN_USE,
        permission=Permission.NODES_DELETE,
    ),
    Operation(
        name="nodes.update",
        summary="Change what people set of a node: its datacenter, CPU mode, GPUs out of service.",
        path="/api/v1/nodes/update",
        request=UpdateRequest,
        response=IdsAnswer,
        permission=Permission.NODES_WRITE,
        rate="write",
        handler=Writes(change),
        example={"node_id": _NODE, "disabled_gpus": ["0000:1b:00.0"]},
        answer={"node_ids": [_NODE]},
        errors=(Code.NODE_NOT_FOUND, Code.DATACENTER_NOT_FOUND, Code.NODE_IN_USE),
    ),
)
