"""Operations on the catalog: everybody sees what is on offer; admins say what is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marketplace.catalog import datacenters
from marketplace.catalog import service as catalog
from marketplace.catalog.datacenters import NameTakenError as DatacenterNameTakenError
from marketplace.catalog.offers import offers
from marketplace.catalog.service import InstanceType, InUseError, NameTakenError, Variant
from marketplace.catalog.wire import (
    ByName,
    ByServiceAndLocation,
    ByServiceAndProvider,
    DatacenterAnswer,
    DatacenterRequest,
    ListAnswer,
    ListRequest,
    ListTool,
    NameAnswer,
    RemoveRequest,
    TypeRequest,
    VariantRequest,
)
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Tool, Writes
from marketplace.http.wire import Json
from marketplace.providers import service as providers
from marketplace.relay import granting
from marketplace.relay.granting import Secret
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission


def list_types(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return what is on offer."""
    selector = request.selector
    names = selector.names if isinstance(selector, ByName) else None
    services = places = owners = None
    if isinstance(selector, ByServiceAndLocation):
        services, places = selector.wanted.services, _keys(selector.wanted.datacenters)
    elif isinstance(selector, ByServiceAndProvider):
        services, owners = selector.wanted.services, _keys(selector.wanted.providers)
    found = offers(unit, call.now, names=names, services=services, places=places, providers=owners)
    return ListAnswer(instance_types=found)


def _keys(names: list[str] | None) -> set[str] | None:
    return None if names is None else {name.casefold() for name in names}


def add_type(call: Call, unit: WriteUnit, request: TypeRequest) -> NameAnswer:
    """Add a type of machine."""
    try:
        catalog.add_type(unit, _type(request), call.now)
    except NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "There is a type of this name.", param="name") from error
    return _done(call, unit, "add", request.name)


def update_type(call: Call, unit: WriteUnit, request: TypeRequest) -> NameAnswer:
    """Describe a type anew. What runs keeps its price."""
    _check_type(unit, request.name, "name")
    catalog.change_type(unit, _type(request))
    return _done(call, unit, "update", request.name)


def remove_type(call: Call, unit: WriteUnit, request: RemoveRequest) -> NameAnswer:
    """Take a type and its variants off the catalog."""
    _check_type(unit, request.name, "name")
    try:
        catalog.remove_type(unit, request.name, call.now)
    except InUseError as error:
        raise Refusal(Code.IN_USE, "Nodes are of this type.", param="name") from error
    return _done(call, unit, "remove", request.name)


def add_variant(call: Call, unit: WriteUnit, request: VariantRequest) -> NameAnswer:
    """Add a variant of a type."""
    made = _variant(unit, request)
    try:
        catalog.add_variant(unit, made, call.now)
    except NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "There is a variant of this name.", param="name") from error
    return _done(call, unit, "add_variant", request.name)


def update_variant(call: Call, unit: WriteUnit, request: VariantRequest) -> NameAnswer:
    """Describe a variant anew. What runs keeps its shape and its price."""
    made = _variant(unit, request)
    _check_variant(unit, request.name)
    catalog.change_variant(unit, made)
    return _done(call, unit, "update_variant", request.name)


def remove_variant(call: Call, unit: WriteUnit, request: RemoveRequest) -> NameAnswer:
    """Take a variant off the catalog."""
    _check_variant(unit, request.name)
    catalog.remove_variant(unit, request.name, call.now)
    return _done(call, unit, "remove_variant", request.name)


def add_datacenter(call: Call, unit: WriteUnit, request: DatacenterRequest) -> DatacenterAnswer:
    """Add a datacenter of a provider."""
    owner = providers.find_by_name(unit, request.provider)
    if owner is None:
        raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider.", param="provider")
    if request.port_to < request.port_from:
        raise Refusal(Code.VALIDATION_FAILED, "port_to: it lies before port_from", param="port_to")
    secret = _relay(call, request)
    try:
        made = datacenters.create(
            unit,
            provider_id=owner.id,
            name=request.name,
            country_code=request.country_code,
            tunnel=request.tunnel,
            tunnel_host=request.tunnel_host,
            relay_port=request.relay_port,
            relay_sealed=None if secret is None else secret.sealed,
            ports=(request.port_from, request.port_to),
            now=call.now,
            random=call.context.random,
        )
    except DatacenterNameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "There is a datacenter of this name.", param="name") from error
    call.record(unit, "datacenters.add", owner_id=owner.id, subject_id=made, name=request.name)
    return DatacenterAnswer(id=made, name=request.name, relay_secret=None if secret is None else secret.text)


def _relay(call: Call, request: DatacenterRequest) -> Secret | None:
    """A new secret where ports are published by a relay. Refusal where it cannot be found, or is named in vain."""
    if request.tunnel != "relay":
        if request.relay_port is not None:
            raise Refusal(Code.VALIDATION_FAILED, "relay_port: it is for tunnel relay alone", param="relay_port")
        return None
    if request.tunnel_host is None:
        raise Refusal(
            Code.VALIDATION_FAILED, "tunnel_host: a relay needs the address that people reach", param="tunnel_host"
        )
    if request.relay_port is None:
        raise Refusal(
            Code.VALIDATION_FAILED, "relay_port: a relay needs the port that nodes connect to", param="relay_port"
        )
    if request.port_from <= request.relay_port <= request.port_to:
        raise Refusal(
            Code.VALIDATION_FAILED, "relay_port: it is among the ports that are published", param="relay_port"
        )
    return granting.make_secret(call.context.vault, request.name, call.context.random)


def _type(request: TypeRequest) -> InstanceType:
    weights = (request.vcpu_weight, request.ram_weight, request.disk_weight, request.gpu_weight)
    if sum(weights) != catalog.PPM:
        raise Refusal(Code.VALIDATION_FAILED, f"gpu_weight: the weights sum to {sum(weights)}", param="gpu_weight")
    _check_cost(request.cost_per_hour)
    return InstanceType(
        name=request.name,
        brand_short=request.brand_short,
        manufacturer=request.manufacturer,
        cost_per_hour=request.cost_per_hour,
        kernel_modules=request.gpuvendor_kernel_module_support,
        vcpu_weight=request.vcpu_weight,
        ram_weight=request.ram_weight,
        disk_weight=request.disk_weight,
        gpu_weight=request.gpu_weight,
    )


def _variant(unit: ReadUnit, request: VariantRequest) -> Variant:
    _check_type(unit, request.instance_type, "instance_type")
    _check_cost(request.cost_per_hour)
    if request.cpu_sharing_policy == "Shared" and request.mig_profile is None:
        raise Refusal(Code.SHARED_POLICY_RESERVED, "Shared CPUs are for variants with MIG.", param="cpu_sharing_policy")
    if request.mig_profile is not None and request.gpu_count == 0:
        raise Refusal(Code.VALIDATION_FAILED, "gpu_count: how many MIG instances it has", param="gpu_count")
    return Variant(
        name=request.name,
        type_name=request.instance_type,
        gpu_count=request.gpu_count,
        mig_profile=request.mig_profile,
        vcpu=request.cpu_count,
        dram=request.dram,
        disk=request.disk,
        vram=request.vram,
        cpu_policy=request.cpu_sharing_policy,
        overcommit=request.overcommit,
        services=tuple(sorted(set(request.services), reverse=True)),
        cost_per_hour=request.cost_per_hour,
    )


MAX_COST = 10**15


def _check_cost(cost: int) -> None:
    if not 0 <= cost <= MAX_COST:
        raise Refusal(Code.VALIDATION_FAILED, "cost_per_hour: it is outside its range", param="cost_per_hour")


def _check_type(unit: ReadUnit, name: str, param: str) -> None:
    if name not in catalog.types(unit, [name]):
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "There is no such type.", param=param)


def _check_variant(unit: ReadUnit, name: str) -> None:
    if catalog.variant(unit, name) is None:
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "There is no such variant.", param="name")


def _done(call: Call, unit: WriteUnit, verb: str, name: str) -> NameAnswer:
    call.record(unit, f"instance_types.{verb}", owner_id="", subject_id=name)
    return NameAnswer(name=name)


def _list_body(arguments: Json) -> Json:
    service = arguments.get("service")
    where = {"services": None if service is None else [service], "datacenters": arguments.get("datacenters")}
    return {"selector": {"ByServiceAndLocation": where}}


def _list_shown(arguments: Json, answer: Json) -> Json:
    """Types with that in their names, and of their variants those that cost no more; without variants none."""
    gpu, most = (arguments.get("gpu") or "").casefold(), arguments.get("max_cost_per_hour")
    found = [one for one in answer["instance_types"] if gpu in f"{one['name']} {one['brand_short']}".casefold()]
    if most is not None:
        cheap = [[one for one in kind["variants"] if one["cost_per_hour"] <= most] for kind in found]
        found = [{**kind, "variants": left} for kind, left in zip(found, cheap, strict=True) if left]
    return {**answer, "instance_types": found}


_TYPE = {
    "name": "h200-141gb",
    "brand_short": "H200",
    "manufacturer": "GPU vendor",
    "cost_per_hour": 250,
    "gpuvendor_kernel_module_support": "OpenOrProprietary",
}
_VARIANT = {
    "name": "h200-141gb.1",
    "instance_type": "h200-141gb",
    "gpu_count": 1,
    "cpu_count": 8,
    "dram": 137438953472,
    "disk": 1099511627776,
    "vram": 150323855360,
    "cost_per_hour": 250,
}
_OFFER = {
    **_TYPE,
    "datacenters": [
        {"name": "eu-1", "provider_name": "acme", "provider_logo": "https://acme.example/l.svg", "country_code": "IT"}
    ],
    "variants": [
        {
            "name": "h200-141gb.1",
            "gpu_count": 1,
            "mig_profile": None,
            "cpu_count": 8,
            "logical_cpu_count": 16,
            "cpu_sharing_policy": "Dedicated",
            "dram": 137438953472,
            "vram": 150323855360,
            "disk": 1099511627776,
            "services": ["vm", "container"],
            "cost_per_hour": 250,
            "nodes": 2,
            "nodes_per_dc": {"eu-1": 2},
            "available_nodes": 1,
            "available_nodes_per_dc": {"eu-1": 1},
            "ip_availability_per_dc": {"eu-1": {"public_ips": False}},
            "volume_types_per_dc": {"eu-1": [{"name": "standard", "cost_per_gb_per_month": 10}]},
        }
    ],
}


def _row(
    verb: str, summary: str, request: Any, handler: Callable[..., Any], example: dict[str, Any], *errors: Code
) -> Operation[Any]:
    return Operation(
        name=f"instance_types.{verb}",
        summary=summary,
        path=f"/api/v1/instance-types/{verb}",
        request=request,
        response=NameAnswer,
        permission=Permission.CATALOG_WRITE,
        rate="write",
        handler=Writes(handler),
        example=example,
        answer={"name": example["name"]},
        errors=errors,
    )


_UNKNOWN, _TAKEN = Code.INSTANCE_TYPE_NOT_FOUND, Code.NAME_EXISTS

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="instance_types.list",
        summary="Types of machines with their variants, prices, and where how many are free.",
        path="/api/v1/instance-types/list",
        request=ListRequest,
        response=ListAnswer,
        permission=None,
        rate="read",
        handler=Reads(list_types),
        example={"selector": {"ByServiceAndLocation": {"services": ["vm"], "datacenters": ["eu-1"]}}},
        answer={"instance_types": [_OFFER]},
        tool=Tool(
            name="list_instance_types",
            description="Machines that can be rented: variants, their price an hour, and how many are free where.",
            arguments=ListTool,
            body=_list_body,
            shown=_list_shown,
        ),
    ),
    _row("add", "Add a type of machine.", TypeRequest, add_type, _TYPE, _TAKEN),
    _row("update", "Describe a type anew; what runs keeps its price.", TypeRequest, update_type, _TYPE, _UNKNOWN),
    _row(
        "remove",
        "Take a type and its variants off the catalog.",
        RemoveRequest,
        remove_type,
        {"name": "h200-141gb"},
        _UNKNOWN,
        Code.IN_USE,
    ),
    _row(
        "add_variant",
        "Add a variant of a type.",
        VariantRequest,
        add_variant,
        _VARIANT,
        _UNKNOWN,
        _TAKEN,
        Code.SHARED_POLICY_RESERVED,
    ),
    _row(
        "update_variant",
        "Describe a variant anew; what runs keeps its shape and price.",
        VariantRequest,
        update_variant,
        _VARIANT,
        _UNKNOWN,
        Code.SHARED_POLICY_RESERVED,
    ),
    _row(
        "remove_variant",
        "Take a variant off the catalog.",
        RemoveRequest,
        remove_variant,
        {"name": "h200-141gb.1"},
        _UNKNOWN,
    ),
    Operation(
        name="datacenters.add",
        summary="Add a datacenter of a provider.",
        path="/api/v1/datacenters/add",
        request=DatacenterRequest,
        response=DatacenterAnswer,
        permission=Permission.CATALOG_WRITE,
        rate="write",
        handler=Writes(add_datacenter),
        example={"name": "eu-1", "provider": "acme", "country_code": "IT"},
        answer={"id": "019a0f6c-2a00-7abc-8def-000000000022", "name": "eu-1", "relay_secret": None},
        errors=(Code.PROVIDER_NOT_FOUND, _TAKEN),
    ),
)
