"""Requests and answers of the catalog."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from marketplace.agent.inventory_wire import KernelModules
from marketplace.http.wire import Cents, CentsIn, Wire
from marketplace.placement.capacity import CpuPolicy

Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
Host = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9.:-]+$")]
Names = Annotated[list[Text], Field(min_length=1, max_length=100)]
Service = Literal["vm", "container"]
Weight = Annotated[int, Field(ge=0, le=1_000_000, description="millionths; the four sum to 1000000")]


class ServiceAndLocation(Wire):
    """What may run, and where."""

    services: list[Service] | None = None
    datacenters: list[Text] | None = None


class ByServiceAndLocation(Wire):
    """Variants for a service, in datacenters."""

    wanted: ServiceAndLocation = Field(alias="ByServiceAndLocation")


class ServiceAndProvider(Wire):
    """What may run, and whose."""

    services: list[Service] | None = None
    providers: list[Text] | None = None


class ByServiceAndProvider(Wire):
    """Variants for a service, of providers."""

    wanted: ServiceAndProvider = Field(alias="ByServiceAndProvider")


class ByName(Wire):
    """Types, by name."""

    names: Names = Field(alias="ByName")


class ListRequest(Wire):
    """Which types."""

    selector: Literal["All"] | ByServiceAndLocation | ByServiceAndProvider | ByName = "All"


class IpAvailability(Wire):
    """Whether instances may have public addresses of their own."""

    public_ips: bool


class VolumeTypeAnswer(Wire):
    """A type of volume that can be attached."""

    name: str
    cost_per_gb_per_month: Cents


class VariantAnswer(Wire):
    """A shape of a type, and how many nodes could take one now."""

    name: str
    gpu_count: int
    mig_profile: str | None
    cpu_count: int
    logical_cpu_count: int
    cpu_sharing_policy: str
    dram: int
    vram: int
    disk: int
    services: list[str]
    cost_per_hour: Cents
    nodes: int
    nodes_per_dc: dict[str, int]
    available_nodes: int
    available_nodes_per_dc: dict[str, int]
    ip_availability_per_dc: dict[str, IpAvailability]
    volume_types_per_dc: dict[str, list[VolumeTypeAnswer]]


class PlaceAnswer(Wire):
    """A datacenter that has nodes of a type."""

    name: str
    provider_name: str
    provider_logo: str | None
    country_code: str


class TypeAnswer(Wire):
    """A type of machine."""

    name: str
    brand_short: str
    manufacturer: str
    cost_per_hour: Cents
    gpuvendor_kernel_module_support: str | None
    datacenters: list[PlaceAnswer]
    variants: list[VariantAnswer]


class ListAnswer(Wire):
    """Types of machines."""

    instance_types: list[TypeAnswer]


class TypeRequest(Wire):
    """A type of machine. The cost is that of one GPU, or of a node without GPUs."""

    name: Name
    brand_short: Text
    manufacturer: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")] = ""
    cost_per_hour: CentsIn
    gpuvendor_kernel_module_support: KernelModules | None = None
    vcpu_weight: Weight = 60_000
    ram_weight: Weight = 50_000
    disk_weight: Weight = 10_000
    gpu_weight: Weight = 880_000


def _both() -> list[Service]:
    return ["vm", "container"]


class VariantRequest(Wire):
    """A shape of a type."""

    name: Name
    instance_type: Name
    gpu_count: Annotated[int, Field(ge=0, le=64)] = 0
    mig_profile: Annotated[str, StringConstraints(max_length=40, pattern=r"^\d+g\.\d+gb(\+me)?$")] | None = None
    cpu_count: Annotated[int, Field(ge=1, le=4096)]
    dram: Annotated[int, Field(ge=1 << 20, le=1 << 46)]
    disk: Annotated[int, Field(ge=0, le=1 << 52)]
    vram: Annotated[int, Field(ge=0, le=1 << 46)] = 0
    cpu_sharing_policy: CpuPolicy = "Dedicated"
    overcommit: bool = False
    services: Annotated[list[Service], Field(min_length=1, max_length=2)] = Field(default_factory=_both)
    cost_per_hour: CentsIn


class RemoveRequest(Wire):
    """What is no longer on offer."""

    name: Name


class NameAnswer(Wire):
    """What was changed."""

    name: str


class DatacenterRequest(Wire):
    """A datacenter of a provider. Ports of instances are published within the range."""

    name: Name
    provider: Text
    country_code: Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")]
    tunnel: Literal["none", "nat", "relay"] = "nat"
    tunnel_host: (
        Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9.:-]+$")] | None
    ) = None
    relay_port: (
        Annotated[int, Field(ge=1, le=65535, description="where nodes connect to the relay, on tunnel_host")] | None
    ) = None
    port_from: Annotated[int, Field(ge=1024, le=65535)] = 20_000
    port_to: Annotated[int, Field(ge=1024, le=65535)] = 39_999


class DatacenterAnswer(Wire):
    """A datacenter. The secret is that of its relay, where it has one, and is shown this once."""

    id: str
    name: str
    relay_secret: str | None = None


class ListTool(Wire):
    """Which types, to a language model."""

    service: Annotated[Service | None, Field(description="what is to run")] = None
    datacenters: Annotated[list[Text] | None, Field(description="where; without it anywhere")] = None
    gpu: Annotated[Text | None, Field(description="part of the name of a GPU or type, as H200")] = None
    max_cost_per_hour: Annotated[float | None, Field(ge=0, description="the most that a variant costs, in cents")] = (
        None
    )
