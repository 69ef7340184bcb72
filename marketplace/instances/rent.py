"""Renting: from what is asked for to a place, a price, and a machine that its node is told to make. All of it happens
in one transaction, or nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from sqlalchemy import insert

from marketplace.accounts import service as accounts
from marketplace.catalog import datacenters
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.environments import service as environments
from marketplace.environments.service import EnvironmentGoneError
from marketplace.events.transitions import Scene, actor_of, begun
from marketplace.http.acting import Party, party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.instances import secrets
from marketplace.instances.config import Inside, inside
from marketplace.instances.naming import new_name
from marketplace.instances.no_place import refuse
from marketplace.instances.rules import MACHINE
from marketplace.instances.specs import Config
from marketplace.instances.tables import instance, instance_tag
from marketplace.instances.wire import (
    ByInstanceTypeAndLocation,
    ByNodeWithResources,
    ExistingReservation,
    NewReservation,
    RentRequest,
    Resources,
)
from marketplace.ledger.book import InsufficientFundsError
from marketplace.networks import service as networks
from marketplace.networks.service import NoAddressError, NoPortError
from marketplace.nodes import service as nodes
from marketplace.placement import claims
from marketplace.placement.choose import NoPlace, Placement, Wanted
from marketplace.placement.place import CrowdedError, place
from marketplace.presets import service as presets
from marketplace.presets.service import Shape
from marketplace.providers import service as providers
from marketplace.quotas import service as quotas
from marketplace.reservations import service as reservations
from marketplace.reservations.service import UnknownReservationError, UnknownTypeError
from marketplace.settings import service as settings
from marketplace.settings.rules import AppSettings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.users.permissions import Permission
from marketplace.volumes import service as volumes
from marketplace.volumes.service import UnknownVolumeError, VolumeBusyError

USERNAME = "ubuntu"


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found out about a request before it was placed."""

    call: Call
    request: RentRequest
    party: Party
    scene: Scene
    app: AppSettings
    variant: Variant | None
    inside: Inside
    wanted: Wanted


def rent(call: Call, unit: WriteUnit, request: RentRequest) -> str:
    """Rent an instance and return its id. Refusal."""
    deal = _understand(call, unit, request)
    placed = _place(unit, deal)
    kind = None if placed.node.instance_type is None else catalog.types(unit, [placed.node.instance_type])
    cost = _cost(deal, placed, (kind or {}).get(placed.node.instance_type or ""))
    free = request.billing_exempt or placed.quota_id is not None
    if not free and request.reservation is None:
        _check_funds(unit, deal.party.account_id, cost)
    instance_id = new_id(call.now, call.context.random)
    row = _row(unit, deal, placed, instance_id, cost)
    unit.execute(insert(instance).values(**row))
    unit.insert_rows(instance_tag, [{"instance_id": instance_id, "tag": tag} for tag in request.tags])
    claims.take(unit, instance_id, placed, call.now, cpu_policy=deal.wanted.cpu_policy)
    begun(unit, MACHINE, instance_id, "Initializing", "rent", deal.scene, owner_id=deal.party.id)
    _connect(unit, deal, placed, instance_id)
    if request.reuse_environment_id is not None:
        owner = deal.party.id
        environments.claim(
            unit, request.reuse_environment_id, deal.party.account_id, instance_id, deal.scene, owner_id=owner
        )
    nodes.touch(unit, placed.node.id)
    if deal.variant is None and call.caller.user is not None:
        wanted = deal.wanted
        shape = Shape(placed.node.instance_type, wanted.gpus, wanted.vcpu, wanted.dram, wanted.disk)
        presets.capture(unit, call.caller.id, shape, now=call.now, random=call.context.random)
    _reserve(unit, deal, placed, instance_id, cost)  # the ledger's locks come last
    return instance_id


def _understand(call: Call, unit: WriteUnit, request: RentRequest) -> Deal:
    """Check everything that does not depend on where it goes."""
    mine = party(call, unit, request.team_id)
    admin = Permission.INSTANCES_WRITE_ALL in call.caller.permissions
    terms = request.reservation
    if not admin and (request.billing_exempt or (isinstance(terms, NewReservation) and terms.new.billing_exempt)):
        raise Refusal(Code.PERMISSION_DENIED, "Only admins rent without being charged.", param="billing_exempt")
    app = settings.current(unit)
    variant = _variant(unit, request)
    within = inside(call, unit, request, mine)
    wanted = _wanted(call, unit, request, mine, app, variant, within)
    scene = Scene(actor_of(call), call.now, call.context.random)
    return Deal(
        call=call, request=request, party=mine, scene=scene, app=app, variant=variant, inside=within, wanted=wanted
    )


def _variant(unit: ReadUnit, request: RentRequest) -> Variant | None:
    selector = request.selector
    if isinstance(selector, ByNodeWithResources):
        if request.cpu_sharing_policy is None:
            raise Refusal(
                Code.CPU_SHARING_POLICY_REQUIRED,
                "A custom rental states how it uses CPUs: Dedicated or Packed.",
                param="cpu_sharing_policy",
            )
        if request.cpu_sharing_policy == "Shared":
            raise Refusal(
                Code.SHARED_POLICY_RESERVED, "Shared CPUs are for variants with MIG.", param="cpu_sharing_policy"
            )
        return None
    name = selector.wanted.instance_type
    found = catalog.variant(unit, name)
    if found is None:
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "There is no such variant on offer.", param="selector")
    return found


def _wanted(
    call: Call,
    unit: WriteUnit,
    request: RentRequest,
    mine: Party,
    app: AppSettings,
    variant: Variant | None,
    within: Inside,
) -> Wanted:
    selector = request.selector
    admin = Permission.INSTANCES_WRITE_ALL in call.caller.permissions
    operated = providers.provider_of(unit, call.caller.id)
    held = quotas.held_nodes(unit, [mine.account_id], call.now)
    node_id = None if isinstance(selector, ByInstanceTypeAndLocation) else selector.wanted.node_id
    if isinstance(selector, ByNodeWithResources):
        _may_customise(unit, app, selector, admin, None if operated is None else operated.id, held)
    places = _places(unit, selector)
    node_id, places = _where_its_disks_are(unit, request, mine, within, node_id, places, call.now)
    manual = request.manual_numa_config
    if isinstance(selector, ByNodeWithResources):
        manual = selector.wanted.resources.manual_numa_config or manual
    if manual is not None and not admin:
        raise Refusal(Code.PERMISSION_DENIED, "Only admins choose CPUs and GPUs.", param="manual_numa_config")
    shape: Any = variant
    if isinstance(selector, ByNodeWithResources):
        shape = _custom(selector.wanted.resources)
    tags = frozenset() if request.reuse_environment_id else within.image_tags
    return Wanted(
        kind=within.kind,
        gpus=shape.gpu_count,
        mig_profile=shape.mig_profile,
        vcpu=shape.vcpu,
        dram=shape.dram,
        disk=shape.disk,
        cpu_policy=request.cpu_sharing_policy or shape.cpu_policy,
        overcommit=shape.overcommit,
        node_id=node_id,
        instance_type=None if variant is None else variant.type_name,
        datacenters=places,
        accounts=frozenset({mine.account_id}),
        walled=bool(held),
        auto_assign_quota_nodes=app.auto_assign_quota_nodes,
        require_coverage=request.require_quota_coverage,
        operates=None if admin else frozenset() if operated is None else frozenset({operated.id}),
        image_tags=tags,
        gpu_numbers=None if manual is None or manual.gpu_indices is None else tuple(manual.gpu_indices),
        cpu_ids=None if manual is None or manual.cpu_ids is None else tuple(manual.cpu_ids),
    )


class _Custom(msgspec.Struct, frozen=True):
    """A custom shape, with the members of a variant."""

    gpu_count: int
    vcpu: int
    dram: int
    disk: int
    mig_profile: str | None = None
    cpu_policy: str = "Dedicated"
    overcommit: bool = False


def _custom(asked: Resources) -> _Custom:
    return _Custom(asked.gpu, asked.vcpu, asked.dram, asked.disk)


def _may_customise(
    unit: ReadUnit,
    app: AppSettings,
    selector: ByNodeWithResources,
    admin: bool,
    provider_id: str | None,
    held: frozenset[str],
) -> None:
    if not app.allow_custom_instances:
        raise Refusal(Code.CUSTOM_INSTANCES_DISABLED, "Custom instances are switched off here.", param="selector")
    row = nodes.find(unit, selector.wanted.node_id)
    operates = row is not None and provider_id is not None and row.provider_id == provider_id
    if not (admin or operates or selector.wanted.node_id in held):
        raise Refusal(
            Code.NOT_NODE_OPERATOR,
            "Custom instances are for admins, the node's provider, and who holds an allocation on it.",
            param="selector",
        )


def _places(unit: ReadUnit, selector: Any) -> frozenset[str] | None:
    if not isinstance(selector, ByInstanceTypeAndLocation) or selector.wanted.datacenters is None:
        return None
    names = selector.wanted.datacenters
    found = datacenters.by_name(unit, names)
    missing = sorted({name.casefold() for name in names} - {one.name.casefold() for one in found})
    if missing:
        raise Refusal(Code.DATACENTER_NOT_FOUND, f"There is no datacenter {missing[0]}.", param="selector")
    return frozenset(one.id for one in found)


def _where_its_disks_are(
    unit: WriteUnit,
    request: RentRequest,
    mine: Party,
    within: Inside,
    node_id: str | None,
    places: frozenset[str] | None,
    now: int,
) -> tuple[str | None, frozenset[str] | None]:
    """Narrow the places down to where its saved disk and its volumes are."""
    if request.reuse_environment_id is not None:
        if within.kind != "VirtualMachine":
            raise _gone("A container has no saved disk.")
        try:
            kept = environments.find(unit, request.reuse_environment_id, mine.account_id, now)
        except EnvironmentGoneError as error:
            raise _gone("The disk of this environment no longer exists.") from error
        if node_id not in (None, kept.node_id):
            raise _gone("The disk of this environment is on another node.")
        node_id = kept.node_id
    if within.mounts:
        try:
            homes, holder = volumes.home_of(unit, mine.account_id, [name for name, _ in within.mounts])
        except UnknownVolumeError as error:
            raise Refusal(Code.VOLUME_NOT_FOUND, "There is no such volume.", param="config") from error
        except VolumeBusyError as error:
            raise Refusal(Code.VOLUME_ATTACHED, str(error), param="config") from error
        places = homes if places is None else places & homes
        if holder is not None and node_id not in (None, holder):
            raise Refusal(Code.VOLUME_ATTACHED, "The volume is on another node.", param="config")
        node_id = node_id or holder
    return node_id, places


def _place(unit: WriteUnit, deal: Deal) -> Placement:
    try:
        found = place(unit, deal.wanted, deal.call.now)
    except CrowdedError as error:
        raise Refusal(
            Code.SERVICE_UNAVAILABLE, "Others rent there right now.", headers=(("Retry-After", "1"),)
        ) from error
    if isinstance(found, NoPlace):
        refuse(deal.wanted, found)
    return found


def _cost(deal: Deal, placed: Placement, kind: catalog.InstanceType | None) -> int:
    """What it costs an hour, in nano-units."""
    if deal.variant is not None:
        return deal.variant.cost_per_hour
    if kind is None:
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "The node has no type, and so no price.", param="selector")
    return catalog.custom_cost(kind, placed.node.capacity, placed.amount)


def _check_funds(unit: ReadUnit, account_id: str, cost: int) -> None:
    state = accounts.get(unit, account_id)
    if not state.unlimited and (state.available < cost or state.available <= 0 < cost):
        raise _poor()


def _row(unit: ReadUnit, deal: Deal, placed: Placement, instance_id: str, cost: int) -> dict[str, Any]:
    call, request, wanted, within = deal.call, deal.request, deal.wanted, deal.inside
    context = call.context
    token = context.random(32).hex()
    sealed = msgspec.structs.replace(within.secret, token=token)
    return {
        "id": instance_id,
        "name": request.name or new_name(context.random),
        "account_id": deal.party.account_id,
        "user_id": None if call.caller.user is None else call.caller.id,
        "team_id": deal.party.id if deal.party.kind == "team" else None,
        "cluster_name": request.cluster_name,
        "node_id": placed.node.id,
        "provider_id": placed.node.provider_id,
        "kind": within.kind,
        "instance_type": placed.node.instance_type,
        "variant": None if deal.variant is None else deal.variant.name,
        "gpu_count": wanted.gpus,
        "vcpu": wanted.vcpu,
        "dram": wanted.dram,
        "disk": wanted.disk,
        "cpu_policy": wanted.cpu_policy,
        "mig_profile": wanted.mig_profile,
        "config": msgspec.json.encode(
            Config(image=within.image, image_path=within.image_path, ssh_keys=within.ssh_keys, recipe=request.recipe)
        ).decode(),
        "secret": secrets.seal(context.vault, sealed, instance_id, context.random),
        "username": USERNAME if within.kind == "VirtualMachine" else "",
        "has_password": within.secret.password is not None,
        "ssh_key_auth": bool(within.ssh_keys),
        "status": "Initializing",
        "failing": False,
        "want": "Running",
        "gen": 1,
        "reset_seq": 0,
        "gen_applied": 0,
        "reset_applied": 0,
        "phase": "",
        "power": "",
        "missing_rounds": 0,
        "addresses": "[]",
        "memory_kb": None,
        "created_at": call.now,
        "cost_per_hour": cost,
        "provider_share": deal.app.provider_share,
        "billing_exempt": request.billing_exempt,
        "quota_id": placed.quota_id,
        "reuse_environment_id": request.reuse_environment_id,
        "readiness_digest": hashlib.sha256(token.encode()).digest(),
    }


def _connect(unit: WriteUnit, deal: Deal, placed: Placement, instance_id: str) -> None:
    """Give it ports, an address and volumes."""
    call = deal.call
    home = datacenters.find(unit, placed.node.datacenter_id)
    node_row = nodes.find(unit, placed.node.id)
    guests = list(deal.inside.ports)
    ssh = (22, "tcp", None)
    if deal.inside.kind == "VirtualMachine" and not any(guest[:2] == ssh[:2] for guest in guests):
        guests.insert(0, ssh)
    try:
        if home.tunnel != "none":
            networks.lease_ports(
                unit,
                instance_id,
                placed.node.id,
                node_row.ip_address,
                home,
                guests,
                now=call.now,
                random=call.context.random,
            )
        _join(unit, deal, home.id, instance_id)
    except (NoPortError, NoAddressError) as error:
        raise Refusal(Code.INSUFFICIENT_CAPACITY, f"There is no room for it: {error}.") from error
    if deal.inside.mounts:
        try:
            volumes.attach(
                unit,
                instance_id,
                placed.node.id,
                deal.party.account_id,
                deal.inside.mounts,
                deal.scene,
                owner_id=deal.party.id,
            )
        except VolumeBusyError as error:
            raise Refusal(Code.VOLUME_ATTACHED, str(error), param="config") from error


def _join(unit: WriteUnit, deal: Deal, home_id: str, instance_id: str) -> None:
    request, call = deal.request, deal.call
    if request.network is None:
        if request.with_public_ip:
            raise Refusal(Code.VALIDATION_FAILED, "with_public_ip: name its network", param="network")
        return
    teams = [deal.party.id] if deal.party.kind == "team" else []
    found = networks.visible(unit, home_id, request.network, teams)
    if found is None:
        raise Refusal(Code.NETWORK_NOT_FOUND, "There is no such network in its datacenter.", param="network")
    networks.join(unit, found.id, instance_id, public=request.with_public_ip, now=call.now, random=call.context.random)


def _reserve(unit: WriteUnit, deal: Deal, placed: Placement, instance_id: str, cost: int) -> None:
    terms, call = deal.request.reservation, deal.call
    try:
        if isinstance(terms, NewReservation):
            wanted = deal.wanted
            resources = {"vcpu": wanted.vcpu, "gpu": wanted.gpus, "dram": wanted.dram, "disk": wanted.disk}
            reservations.hold_new(
                unit,
                type_id=terms.new.type_id,
                account_id=deal.party.account_id,
                user_id=None if call.caller.user is None else call.caller.id,
                team_id=deal.party.id if deal.party.kind == "team" else None,
                instance_id=instance_id,
                variant=None if deal.variant is None else deal.variant.name,
                node_id=placed.node.id if deal.variant is None else None,
                resources=None if deal.variant is not None else msgspec.json.encode(resources).decode(),
                cost_per_hour=cost,
                billing_exempt=terms.new.billing_exempt,
                scene=deal.scene,
            )
        elif isinstance(terms, ExistingReservation):
            bound = reservations.bind(unit, terms.id, deal.party.account_id, instance_id, deal.scene)
            if bound.variant != (None if deal.variant is None else deal.variant.name):
                raise Refusal(Code.VALIDATION_FAILED, "reservation: it is for another variant", param="reservation")
    except (UnknownTypeError, UnknownReservationError) as error:
        raise Refusal(Code.RESERVATION_NOT_FOUND, "There is no such reservation.", param="reservation") from error
    except InsufficientFundsError as error:
        raise _poor() from error


def _poor() -> Refusal:
    return Refusal(Code.INSUFFICIENT_FUNDS, "The balance and the credit do not cover an hour of it.")


def _gone(message: str) -> Refusal:
    return Refusal(Code.ENVIRONMENT_GONE, message, param="reuse_environment_id")
