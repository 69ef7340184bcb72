"""What a request to rent means: who asks, what of the catalog or of their own, with what inside, and where it may go.
Nothing here is written."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.catalog.board import Board
from marketplace.catalog.service import Variant
from marketplace.environments import service as environments
from marketplace.environments.service import EnvironmentGoneError
from marketplace.http.acting import Party, party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.instances.config import Inside, inside
from marketplace.instances.standing import Standing, standing
from marketplace.instances.wire import (
    ByInstanceTypeAndLocation,
    ByNodeWithResources,
    ManualNuma,
    NewReservation,
    RentRequest,
    Resources,
)
from marketplace.nodes import service as nodes
from marketplace.placement.choose import Wanted
from marketplace.providers import service as providers
from marketplace.quotas import service as quotas
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission
from marketplace.volumes import service as volumes
from marketplace.volumes.service import UnknownVolumeError, VolumeBusyError


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found out about a request before it was placed."""

    call: Call
    request: RentRequest
    party: Party
    standing: Standing
    board: Board
    variant: Variant | None
    inside: Inside
    wanted: Wanted


def understand(call: Call, unit: ReadUnit, request: RentRequest) -> Deal:
    """Check everything that does not depend on where it goes. Refusal."""
    mine = party(call, unit, request.team_id)
    _check_exemptions(call, request)
    stands = standing(unit, mine.account_id, call.now)
    board = call.context.board.at(unit, stands.stamp)
    variant = _variant(board, request)
    within = inside(call, unit, request, mine)
    return Deal(
        call=call,
        request=request,
        party=mine,
        standing=stands,
        board=board,
        variant=variant,
        inside=within,
        wanted=_wanted(call, unit, request, mine, stands, board, variant, within),
    )


def _check_exemptions(call: Call, request: RentRequest) -> None:
    terms = request.reservation
    exempt = request.billing_exempt or (isinstance(terms, NewReservation) and terms.new.billing_exempt)
    if exempt and not _is_admin(call):
        raise Refusal(Code.PERMISSION_DENIED, "Only admins rent without being charged.", param="billing_exempt")


def _is_admin(call: Call) -> bool:
    return Permission.INSTANCES_WRITE_ALL in call.caller.permissions


def _variant(board: Board, request: RentRequest) -> Variant | None:
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
    found = board.variants.get(selector.wanted.instance_type)
    if found is None:
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "There is no such variant on offer.", param="selector")
    _check_policy(found, request)
    return found


def _check_policy(variant: Variant, request: RentRequest) -> None:
    """A variant has its policy and its price: one that is named with it can only be the same."""
    if request.cpu_sharing_policy in (None, variant.cpu_policy):
        return
    reserved = request.cpu_sharing_policy == "Shared" and variant.mig_profile is None
    raise Refusal(
        Code.SHARED_POLICY_RESERVED if reserved else Code.VALIDATION_FAILED,
        f"cpu_sharing_policy: {variant.name} has {variant.cpu_policy} CPUs, not {request.cpu_sharing_policy}; "
        "leave it out, or choose another variant",
        param="cpu_sharing_policy",
    )


def _wanted(
    call: Call,
    unit: ReadUnit,
    request: RentRequest,
    mine: Party,
    stands: Standing,
    board: Board,
    variant: Variant | None,
    within: Inside,
) -> Wanted:
    selector = request.selector
    if isinstance(selector, ByNodeWithResources):
        _may_customise(call, unit, board, selector, mine)
    node_id = None if isinstance(selector, ByInstanceTypeAndLocation) else selector.wanted.node_id
    node_id, places = _where_its_disks_are(unit, request, mine, within, node_id, _places(board, selector), call.now)
    if within.ports:
        places = _where_ports_are(unit, board, request, within, node_id, places)
    shape: Any = variant
    if isinstance(selector, ByNodeWithResources):
        shape = _custom(selector.wanted.resources)
    manual = _chosen(call, request, shape)
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
        walled=stands.walled,
        auto_assign_quota_nodes=board.settings.auto_assign_quota_nodes,
        require_coverage=request.require_quota_coverage,
        operates=frozenset() if node_id is None else _operates(call, unit),
        image_tags=frozenset() if request.reuse_environment_id else within.image_tags,
        gpu_numbers=None if manual.gpu_indices is None else tuple(manual.gpu_indices),
        cpu_ids=None if manual.cpu_ids is None else tuple(manual.cpu_ids),
    )


def _chosen(call: Call, request: RentRequest, shape: Any) -> ManualNuma:
    """The threads and GPUs that an admin chose, as far as they did. Refusal for GPUs that are not as many as it has."""
    manual, where = request.manual_numa_config, "manual_numa_config"
    if isinstance(request.selector, ByNodeWithResources):
        own = request.selector.wanted.resources.manual_numa_config
        if own is not None:
            manual, where = own, "selector.ByNodeWithResources.resources.manual_numa_config"
    if manual is None:
        return ManualNuma()
    if not _is_admin(call):
        raise Refusal(Code.PERMISSION_DENIED, "Only admins choose CPUs and GPUs.", param="manual_numa_config")
    wrong = _wrong_gpus(manual.gpu_indices, shape)
    if wrong:
        param = f"{where}.gpu_indices"
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: {wrong}", param=param)
    return manual


def _wrong_gpus(indices: list[int] | None, shape: Any) -> str:
    """What is wrong with GPUs that were named for a shape; empty where nothing is."""
    if not indices and (indices is None or not shape.gpu_count):
        return ""
    named = len(indices)
    if len(set(indices)) != named:
        return "each GPU once"
    if not shape.gpu_count:
        return f"what is rented has no GPU, and {named} named"
    if shape.mig_profile is not None and 1 <= named <= shape.gpu_count:
        return ""  # parts of one GPU may lie on it together
    if named != shape.gpu_count:
        return f"what is rented has {shape.gpu_count} of them, and {named} named"
    return ""


def _operates(call: Call, unit: ReadUnit) -> frozenset[str] | None:
    """Providers on whose unlisted nodes the caller may rent, where they name them; None is all."""
    if _is_admin(call):
        return None
    operated = providers.provider_of(unit, call.caller.id)
    return frozenset() if operated is None else frozenset({operated.id})


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


def _may_customise(call: Call, unit: ReadUnit, board: Board, selector: ByNodeWithResources, mine: Party) -> None:
    if not board.settings.allow_custom_instances:
        raise Refusal(Code.CUSTOM_INSTANCES_DISABLED, "Custom instances are switched off here.", param="selector")
    node_id = selector.wanted.node_id
    operated = _operates(call, unit)
    row = nodes.find(unit, node_id)
    operates = operated is None or (row is not None and row.provider_id in operated)
    if not operates and node_id not in quotas.held_nodes(unit, [mine.account_id], call.now):
        raise Refusal(
            Code.NOT_NODE_OPERATOR,
            "Custom instances are for admins, the node's provider, and who holds an allocation on it.",
            param="selector",
        )


def _places(board: Board, selector: Any) -> frozenset[str] | None:
    if not isinstance(selector, ByInstanceTypeAndLocation) or selector.wanted.datacenters is None:
        return None
    asked = {name.casefold() for name in selector.wanted.datacenters}
    found = {one.name.casefold(): one.id for one in board.datacenters.values()}
    missing = sorted(asked - found.keys())
    if missing:
        raise Refusal(Code.DATACENTER_NOT_FOUND, f"There is no datacenter {missing[0]}.", param="selector")
    return frozenset(found[name] for name in asked)


def _where_its_disks_are(
    unit: ReadUnit,
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
            raise gone("A container has no saved disk.")
        try:
            kept = environments.find(unit, request.reuse_environment_id, mine.account_id, now)
        except EnvironmentGoneError as error:
            raise gone("The disk of this environment no longer exists.") from error
        if node_id not in (None, kept.node_id):
            raise gone("The disk of this environment is on another node.")
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


def _where_ports_are(
    unit: ReadUnit,
    board: Board,
    request: RentRequest,
    within: Inside,
    node_id: str | None,
    places: frozenset[str] | None,
) -> frozenset[str] | None:
    """Narrow the places down to datacenters that publish these ports. Refusal where none of them does."""
    udp = any(proto == "udp" for _, proto, _ in within.ports)
    unfit = {"none", "relay"} if udp else {"none"}
    closed = {one.id for one in board.datacenters.values() if one.tunnel in unfit}
    if not closed:
        return places
    if node_id is not None:
        row = nodes.find(unit, node_id)
        asked = places if row is None else frozenset({row.datacenter_id})
    else:
        asked = frozenset(board.datacenters) if places is None else places
    left = None if asked is None else asked - closed
    if asked and not left:
        param = "ports" if request.ports else "config"
        relayed = any(board.datacenters[one].tunnel == "relay" for one in asked)
        why = "is behind a relay, which carries TCP and no UDP" if relayed else "publishes none"
        raise Refusal(Code.VALIDATION_FAILED, f"ports: the datacenter {why}; rent without, or elsewhere", param=param)
    return places if left is None or node_id is not None else left


def gone(message: str) -> Refusal:
    """A saved disk that cannot be used."""
    return Refusal(Code.ENVIRONMENT_GONE, message, param="reuse_environment_id")
