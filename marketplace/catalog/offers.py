"""What is on offer now: types with their variants, and how many nodes could take each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select

from marketplace.catalog import datacenters
from marketplace.catalog import service as catalog
from marketplace.catalog.datacenters import Datacenter
from marketplace.catalog.service import InstanceType, Variant
from marketplace.catalog.wire import IpAvailability, PlaceAnswer, TypeAnswer, VariantAnswer, VolumeTypeAnswer
from marketplace.networks.tables import ip_range, network
from marketplace.placement import load
from marketplace.placement.choose import Placement, Wanted, fit
from marketplace.placement.view import NodeView
from marketplace.store.db import ReadUnit
from marketplace.volumes.tables import volume_type

Homes = Mapping[str, Datacenter]


def offers(
    unit: ReadUnit,
    now: int,
    *,
    names: Collection[str] | None = None,
    services: Collection[str] | None = None,
    places: Collection[str] | None = None,
    providers: Collection[str] | None = None,
) -> list[TypeAnswer]:
    """Tell what is on offer: everything, or types of these names, variants for one of these services, and nodes in
    these datacenters or of these providers, by name."""
    homes = {
        home.id: home
        for home in datacenters.every(unit).values()
        if (places is None or home.name.casefold() in places)
        and (providers is None or home.provider_name.casefold() in providers)
    }
    nodes: dict[str, list[NodeView]] = {}
    for view in load.views(unit, now):
        if (
            view.instance_type is not None
            and view.datacenter_id in homes
            and view.listed
            and view.drain_state == "None"
        ):
            nodes.setdefault(view.instance_type, []).append(view)
    variants: dict[str, list[Variant]] = {}
    for one in catalog.variants(unit):
        if services is None or set(services) & set(one.services):
            variants.setdefault(one.type_name, []).append(one)
    extras = _Extras(unit, homes)
    return [
        _type(kind, variants.get(kind.name, []), nodes.get(kind.name, []), homes, extras)
        for kind in catalog.types(unit, names).values()
    ]


class _Extras:
    """What else a datacenter has for instances."""

    def __init__(self, unit: ReadUnit, homes: Homes) -> None:
        public = (
            select(network.c.datacenter_id)
            .join(ip_range, ip_range.c.network_id == network.c.id)
            .where(network.c.deleted_at.is_(None), network.c.team_id.is_(None), ip_range.c.external_first.is_not(None))
        )
        self.public = set(unit.select(public).scalars())
        self.volumes: dict[str, list[VolumeTypeAnswer]] = {}
        for row in unit.select(
            select(volume_type).where(volume_type.c.removed_at.is_(None)).order_by(volume_type.c.name)
        ):
            told = VolumeTypeAnswer(name=row.name, cost_per_gb_per_month=row.cost_per_gb_month)
            self.volumes.setdefault(row.datacenter_id, []).append(told)


def _type(
    kind: InstanceType, variants: list[Variant], nodes: list[NodeView], homes: Homes, extras: _Extras
) -> TypeAnswer:
    places = sorted({view.datacenter_id for view in nodes}, key=lambda place: homes[place].name)
    return TypeAnswer(
        name=kind.name,
        brand_short=kind.brand_short,
        manufacturer=kind.manufacturer,
        cost_per_hour=kind.cost_per_hour,
        gpuvendor_kernel_module_support=kind.kernel_modules,
        datacenters=[
            PlaceAnswer(
                name=homes[place].name,
                provider_name=homes[place].provider_name,
                provider_logo=homes[place].provider_logo,
                country_code=homes[place].country_code,
            )
            for place in places
        ],
        variants=[_variant(one, nodes, places, homes, extras) for one in variants],
    )


def _variant(one: Variant, nodes: list[NodeView], places: list[str], homes: Homes, extras: _Extras) -> VariantAnswer:
    wanted = _wanted(one)
    here = _per_place(nodes, homes)
    free = _per_place([view for view in nodes if isinstance(fit(view, wanted), Placement)], homes)
    return VariantAnswer(
        name=one.name,
        gpu_count=one.gpu_count,
        mig_profile=one.mig_profile,
        cpu_count=one.vcpu,
        logical_cpu_count=max(
            (view.threads(one.vcpu, one.cpu_policy, overcommit=False) for view in nodes), default=one.vcpu
        ),
        cpu_sharing_policy=one.cpu_policy,
        dram=one.dram,
        vram=one.vram,
        disk=one.disk,
        services=list(one.services),
        cost_per_hour=one.cost_per_hour,
        nodes=len(nodes),
        nodes_per_dc=here,
        available_nodes=sum(free.values()),
        available_nodes_per_dc=free,
        ip_availability_per_dc={
            homes[place].name: IpAvailability(public_ips=place in extras.public) for place in places
        },
        volume_types_per_dc={homes[place].name: extras.volumes.get(place, []) for place in places},
    )


def _wanted(one: Variant) -> Wanted:
    return Wanted(
        kind="VirtualMachine" if "vm" in one.services and one.mig_profile is None else "Container",
        gpus=one.gpu_count,
        mig_profile=one.mig_profile,
        vcpu=one.vcpu,
        dram=one.dram,
        disk=one.disk,
        cpu_policy=one.cpu_policy,
        overcommit=one.overcommit,
        instance_type=one.type_name,
    )


def _per_place(nodes: list[NodeView], homes: Homes) -> dict[str, Any]:
    found: dict[str, int] = {}
    for view in nodes:
        name = homes[view.datacenter_id].name
        found[name] = found.get(name, 0) + 1
    return found
