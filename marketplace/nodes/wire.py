"""Requests and answers of nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from marketplace.http.wire import Cents, Id, Instant, Wire

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00]*$")]


class ById(Wire):
    """Nodes, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(alias="ById")


class ByName(Wire):
    """Nodes of providers, by the providers' names."""

    names: Annotated[list[Text], Field(min_length=1, max_length=100)] = Field(alias="ByName")


class ListRequest(Wire):
    """Which nodes."""

    selector: Literal["All"] | ById | ByName = "All"


class SelectRequest(Wire):
    """Nodes to do something to."""

    selector: ById


class DrainRequest(SelectRequest):
    """Nodes to empty, and how."""

    grace_period_secs: Annotated[int, Field(ge=0, le=31_536_000)] = 0
    """after which what still runs is ended; 0 never"""
    notify_users: bool = True
    custom_message: Text | None = None


class ForceRequest(SelectRequest):
    """Nodes to empty now."""

    reason: Text | None = None


class ListingRequest(SelectRequest):
    """Nodes to offer on the market, or not."""

    list_on_marketplace: bool


class UpdateTypeRequest(SelectRequest):
    """Nodes, and the type that they are of."""

    instance_type: Text | None


class UpdateRequest(Wire):
    """What people set of a node. What is left out stays."""

    node_id: Id
    datacenter: Text | None = None
    cpu_allocation_mode: Literal["Legacy", "Pinned", "Mixed"] | None = None
    overcommit_percent: Annotated[int, Field(ge=100, le=1600)] | None = None
    erase_grace_period: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    inference_floor: Annotated[int, Field(ge=0, le=256)] | None = None
    dram_reserve: Annotated[int, Field(ge=0, le=1 << 46)] | None = None
    disabled_gpus: Annotated[list[Text], Field(max_length=256)] | None = None
    """PCI slots; all others are switched on"""


class Drain(Wire):
    """How far a drain is."""

    state: str
    notification_sent: bool
    started_at: Instant | None
    scheduled_stop_at: Instant | None
    grace_period_secs: int | None
    reason: str | None


class CpuAnswer(Wire):
    """Processors."""

    brand: str
    physical_core_count: int
    logical_core_count: int


class DiskAnswer(Wire):
    """The disk that instances are given."""

    mount_point: str
    size: int


class GpuAnswer(Wire):
    """A GPU, and who has it."""

    index: int
    brand_short: str
    vram: int
    pci_slot: str
    pci_valid: bool
    enabled: bool
    gpuvendor_kernel_module_support: str
    mig_profile: str | None
    tenant: str


class Hardware(Wire):
    """What a node is made of."""

    cpu: CpuAnswer
    dram: int
    disks: list[DiskAnswer]
    gpus: list[GpuAnswer]


class Utilization(Wire):
    """What of it is free."""

    cpu_cores_available: int
    cpu_cores_available_mask: str
    gpus_available: int
    gpus_available_mask: str
    rentable_gpus: int
    mig_gpu_mask: str
    dram_available: int
    disk_available: int


class Shape(Wire):
    """So much of everything."""

    gpu_count: int
    cpu_count: int
    dram: int
    disk: int


class Allocation(Wire):
    """A quota on the node."""

    id: str
    name: str
    holder_name: str
    budget: Shape
    consumed: Shape


class CustomPricing(Wire):
    """What part of the price of the node each of its things is; together one."""

    vcpu_weight: float
    ram_weight: float
    disk_weight: float
    gpu_weight: float


class NodeType(Wire):
    """What kind of node it is, and what all of it costs."""

    name: str
    cost_per_hour: Cents
    custom_pricing: CustomPricing


class NodeAnswer(Wire):
    """A node."""

    id: str
    hostname: str
    ip_address: str
    status: str
    health_state: str
    client_version: str
    provider_name: str
    datacenter: str
    country_code: str
    list_on_marketplace: bool
    drain_info: Drain
    hardware: Hardware
    vm_ram_capacity: int
    storage_disk_size: int
    container_disk_limit: str | None
    """what holds containers to their disks: "quota" is the file system, "watched" stops who is beyond it"""
    cpu_allocation_mode: str
    utilization: Utilization
    unallocated: Shape
    allocations: list[Allocation]
    active_instance_count: int
    instance: NodeType | None
    last_seen_at: Instant
    ssh_host: str | None
    ssh_port: int | None
    ssh_user: str | None
    proxy_jump: str | None
    proxy_user: str | None
    proxy_port: int | None


class ListAnswer(Wire):
    """Nodes."""

    nodes: list[NodeAnswer]


class DrainResult(Wire):
    """What the beginning of a drain found on a node."""

    node_id: str
    active_instance_count: int
    users_notified: int
    drain_info: Drain


class DrainAnswer(Wire):
    """What was found on each node."""

    results: list[DrainResult]


class ForceResult(Wire):
    """How many were ended on a node."""

    node_id: str
    instances_terminated: int


class ForceAnswer(Wire):
    """How many were ended on each node."""

    results: list[ForceResult]


class IdsAnswer(Wire):
    """The nodes that were changed."""

    node_ids: list[str]
