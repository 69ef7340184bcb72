"""Operations that tell what GPUs measured last: of nodes to those who run them, of instances to those who rent them."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import select

from marketplace.http.errors import Code
from marketplace.http.operation import Call, Operation, Reads
from marketplace.http.pagination import DEFAULT_LIMIT, newest_first, next_cursor
from marketplace.http.wire import CursorText, Instant, Limit, Wire
from marketplace.instances import selection
from marketplace.instances.wire import ActRequest
from marketplace.nodes import metrics
from marketplace.nodes.metrics import MIB, Measured
from marketplace.nodes.tables import node
from marketplace.nodes.wire import ById
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission


class NodesRequest(Wire):
    """Nodes whose GPUs to tell about, newest first; those that the caller does not run are absent."""

    selector: Literal["All"] | ById = "All"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class InstancesRequest(ActRequest):
    """Instances whose GPUs to tell about, newest first."""

    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class GpuMetrics(Wire):
    """A GPU, or a MIG instance on it, as it was measured last. Null is what the device does not tell."""

    at: Instant
    gpu_index: int
    gpu_uuid: str | None
    pci_bdf: str
    mig_profile: str | None
    """null for a whole GPU"""
    gpu_utilization_percent: int | None
    gr_activity: float | None
    tensor_activity: float | None
    fb_used_mib: int | None
    fb_free_mib: int | None
    power_usage_watts: int | None
    temperature_celsius: int | None


class OfNode(Wire):
    """What the GPUs of a node measured."""

    node_id: str
    gpus: list[GpuMetrics]


class NodesAnswer(Wire):
    """Nodes, and where to go on."""

    metrics: list[OfNode]
    next_cursor: str | None


class OfInstance(Wire):
    """What the GPUs of an instance measured. Those inside a virtual machine are seen by its own system alone."""

    instance_id: str
    gpus: list[GpuMetrics]


class InstancesAnswer(Wire):
    """Instances, and where to go on."""

    metrics: list[OfInstance]
    next_cursor: str | None


def of_nodes(call: Call, unit: ReadUnit, request: NodesRequest) -> NodesAnswer:
    """Return what the GPUs of a page of nodes measured last."""
    wanted = select(node.c.id, node.c.registered_at).where(node.c.deleted_at.is_(None))
    if isinstance(request.selector, ById):
        wanted = wanted.where(node.c.id.in_(sorted(request.selector.ids)))
    if Permission.NODES_READ_ALL not in call.caller.permissions:
        own = providers.provider_of(unit, call.caller.id)
        wanted = wanted.where(node.c.provider_id == ("" if own is None else own.id))
    rows = unit.select(newest_first(wanted, node.c.registered_at, node.c.id, request.cursor, request.limit)).all()
    ids = [row.id for row in rows[: request.limit]]
    found = metrics.latest(unit, ids)
    return NodesAnswer(
        metrics=[OfNode(node_id=one, gpus=[_shown(item) for item in found if item.node_id == one]) for one in ids],
        next_cursor=next_cursor([(row.registered_at, row.id) for row in rows], request.limit),
    )


def of_instances(call: Call, unit: ReadUnit, request: InstancesRequest) -> InstancesAnswer:
    """Return what the GPUs of a page of instances measured last."""
    rows = selection.page(call, unit, request.selector, request.cursor, request.limit)
    ids = [row.id for row in rows[: request.limit]]
    found = metrics.of_instances(unit, ids)
    return InstancesAnswer(
        metrics=[OfInstance(instance_id=one, gpus=[_shown(item) for item in found.get(one, [])]) for one in ids],
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], request.limit),
    )


def _shown(one: Measured) -> GpuMetrics:
    known = one.vram_used is not None and one.vram_total is not None
    return GpuMetrics(
        at=one.at,
        gpu_index=one.number,
        gpu_uuid=one.uuid or None,
        pci_bdf=one.pci_slot,
        mig_profile=one.mig_profile,
        gpu_utilization_percent=one.utilization,
        gr_activity=None,
        tensor_activity=None,
        fb_used_mib=None if one.vram_used is None else one.vram_used // MIB,
        fb_free_mib=((one.vram_total or 0) - (one.vram_used or 0)) // MIB if known else None,
        power_usage_watts=one.power,
        temperature_celsius=one.temperature,
    )


_NODE = "019a0f6c-2a00-7abc-8def-000000000061"
_INSTANCE = "019a0f6c-2a00-7abc-8def-000000000031"
_GPU = {
    "at": "2026-11-21T01:00:00Z",
    "gpu_index": 0,
    "gpu_uuid": "GPU-7c9f3d1e-0000-1111-2222-333344445555",
    "pci_bdf": "0000:1b:00.0",
    "mig_profile": None,
    "gpu_utilization_percent": 87,
    "gr_activity": None,
    "tensor_activity": None,
    "fb_used_mib": 61440,
    "fb_free_mib": 81920,
    "power_usage_watts": 512,
    "temperature_celsius": 61,
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="nodes.metrics_list",
        summary="What GPUs and MIG instances of the caller's nodes measured last.",
        path="/api/v1/nodes/metrics/list",
        request=NodesRequest,
        response=NodesAnswer,
        permission=Permission.NODES_READ,
        rate="read",
        handler=Reads(of_nodes),
        example={"selector": {"ById": [_NODE]}},
        answer={"metrics": [{"node_id": _NODE, "gpus": [_GPU]}], "next_cursor": None},
    ),
    Operation(
        name="instances.metrics",
        summary="What the GPUs and MIG instances that instances have measured last, and nothing of others'.",
        path="/api/v1/instances/metrics",
        request=InstancesRequest,
        response=InstancesAnswer,
        permission=Permission.INSTANCES_READ,
        rate="read",
        handler=Reads(of_instances),
        example={"selector": {"ById": [_INSTANCE]}},
        answer={"metrics": [{"instance_id": _INSTANCE, "gpus": [_GPU]}], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER, Code.NOT_NODE_OPERATOR),
    ),
)
