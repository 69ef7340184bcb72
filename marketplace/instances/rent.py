"""Renting: from what is asked for to a place, a price, and a machine that its node is told to make.

It is planned first, on a snapshot and without a lock: what is asked for, where it goes, what it costs, and every row
that depends on nothing else. Then it is written, all of it in one transaction or nothing. What a plan was made from may
have changed meanwhile: the node's generation, the epochs of what is on offer and the renter's standing are compared
where nobody can change them any more, and if one differs, the plan is made again there.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import msgspec
from sqlalchemy.exc import IntegrityError

from marketplace.catalog import service as catalog
from marketplace.environments import service as environments
from marketplace.environments.service import EnvironmentGoneError
from marketplace.events.transitions import Scene, begun, scene_of
from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, OvertakenError
from marketplace.instances import secrets
from marketplace.instances.deal import Deal, gone, understand
from marketplace.instances.naming import new_name
from marketplace.instances.no_place import refuse
from marketplace.instances.rules import MACHINE
from marketplace.instances.specs import Config
from marketplace.instances.standing import Standing, standing
from marketplace.instances.tables import instance, instance_tag
from marketplace.instances.wire import ExistingReservation, NewReservation, RentRequest
from marketplace.ledger.book import InsufficientFundsError
from marketplace.networks import service as networks
from marketplace.networks.service import NoAddressError, NoPortError
from marketplace.networks.tables import port_lease
from marketplace.placement import claims, load
from marketplace.placement.after import after
from marketplace.placement.choose import NoPlace, Placement, fit
from marketplace.placement.place import look
from marketplace.presets import service as presets
from marketplace.presets.service import Shape
from marketplace.reservations import service as reservations
from marketplace.reservations.service import UnknownReservationError, UnknownTypeError
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.volumes import service as volumes
from marketplace.volumes.service import OtherKindError, UnknownVolumeError, VolumeBusyError

USERNAME = "ubuntu"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A rental, ready to be written."""

    deal: Deal
    placed: Placement
    cost: int
    """nano-units an hour"""
    row: dict[str, Any]
    """of the instance"""
    ports: list[dict[str, Any]]
    """rows that publish its ports"""

    @property
    def prepaid(self) -> bool:
        """Whether it is paid for by something else than its renter's balance."""
        request = self.deal.request
        return request.billing_exempt or self.placed.quota_id is not None or request.reservation is not None


def plan(call: Call, unit: ReadUnit, request: RentRequest) -> Plan:
    """Work out a rental; nothing is written. Refusal."""
    deal = understand(call, unit, request)
    placed = look(unit, call.context.fleet, deal.wanted, call.now)
    if isinstance(placed, NoPlace):
        refuse(deal.wanted, placed)
    return _planned(unit, deal, placed)


def _planned(unit: ReadUnit, deal: Deal, placed: Placement) -> Plan:
    cost = _cost(deal, placed)
    row = _row(deal, placed, cost)
    made = Plan(deal=deal, placed=placed, cost=cost, row=row, ports=_ports(unit, deal, placed, str(row["id"])))
    _check_funds(made, deal.standing)
    return made


def rent(call: Call, unit: WriteUnit, request: RentRequest, planned: Plan) -> str:
    """Write a rental and return the instance's id. Refusal; OvertakenError when it has to be planned on another
    snapshot."""
    made = _seize(call, unit, request, planned)
    deal, placed, instance_id = made.deal, made.placed, str(made.row["id"])
    scene = scene_of(call)
    claims.reclaim(unit, placed, call.now)
    try:
        with unit.together():
            unit.insert_rows(instance, [made.row])
            unit.insert_rows(instance_tag, [{"instance_id": instance_id, "tag": tag} for tag in request.tags])
            claims.take(unit, instance_id, placed, call.now, cpu_policy=deal.wanted.cpu_policy)
            begun(unit, MACHINE, instance_id, "Initializing", "rent", scene, owner_id=deal.party.id)
            unit.insert_rows(port_lease, made.ports)
    except IntegrityError as error:
        # The unique indexes have the last word on who has what: a port of an address that several nodes share.
        raise OvertakenError("somebody else has what was chosen") from error
    _connect(unit, made, scene)
    if request.reuse_environment_id is not None:
        _reuse(unit, deal, request.reuse_environment_id, instance_id, scene)
    if deal.variant is None and call.caller.user is not None:
        wanted = deal.wanted
        shape = Shape(placed.node.instance_type, wanted.gpus, wanted.vcpu, wanted.dram, wanted.disk)
        presets.capture(unit, call.caller.id, shape, now=call.now, random=call.context.random)
    _reserve(unit, made, scene)  # the ledger's locks come last
    unit.afterwards(partial(_remember, call, placed))
    return instance_id


def _remember(call: Call, placed: Placement) -> None:
    """Whoever rents next need not read what has become of the node."""
    view = after(placed)
    if view is not None:
        call.context.fleet.learn(view, call.now)


def _seize(call: Call, unit: WriteUnit, request: RentRequest, planned: Plan) -> Plan:
    """Lock the node of a plan that still holds, or of another that is made under the lock. Refusal, OvertakenError."""
    node, stands = planned.placed.node, _standing(call, unit, request, planned)
    if stands is not None and claims.seize(unit, node.id, node.generation):
        return planned
    claims.queue(unit, node.id)  # who was overtaken once stands in line, and is not again
    made = None if stands is None else _beside(unit, planned, stands)
    if made is None and unit.dialect == "postgresql":
        # Under the first node's lock no other is waited for: somebody may hold them the other way round.
        raise OvertakenError(f"node {node.id} was taken")
    made = made or plan(call, unit, request)
    if not claims.seize(unit, made.placed.node.id, made.placed.node.generation):
        raise OvertakenError(f"node {made.placed.node.id} takes nothing new")
    return made


def _beside(unit: WriteUnit, planned: Plan, stands: Standing) -> Plan | None:
    """The plan once more on the same node, beside what was placed there meanwhile; None if it does not fit any more."""
    deal = msgspec.structs.replace(planned.deal, standing=stands)
    for view in load.views(unit, deal.call.now, [planned.placed.node.id]):
        placed = fit(view, deal.wanted)
        if isinstance(placed, Placement):
            return _planned(unit, deal, placed)
    return None


def _standing(call: Call, unit: WriteUnit, request: RentRequest, planned: Plan) -> Standing | None:
    """How the renter stands now; None if the plan does not hold any more, whatever its node is like. Refusal when they
    may not, or cannot pay any more."""
    deal = planned.deal
    if request.team_id is not None and party(call, unit, request.team_id) != deal.party:
        return None
    stands = standing(unit, deal.party.account_id, call.now)
    if not stands.agrees(deal.standing):
        return None
    _check_funds(planned, stands)
    return stands


def _check_funds(made: Plan, stands: Standing) -> None:
    if not made.prepaid and not stands.covers(made.cost):
        raise _poor()


def _cost(deal: Deal, placed: Placement) -> int:
    """What it costs an hour, in nano-units."""
    if deal.variant is not None:
        return deal.variant.cost_per_hour
    kind = deal.board.types.get(placed.node.instance_type or "")
    if kind is None:
        raise Refusal(Code.INSTANCE_TYPE_NOT_FOUND, "The node has no type, and so no price.", param="selector")
    return catalog.custom_cost(kind, placed.node.capacity, placed.amount)


def _row(deal: Deal, placed: Placement, cost: int) -> dict[str, Any]:
    call, request, wanted, within = deal.call, deal.request, deal.wanted, deal.inside
    context = call.context
    instance_id = new_id(call.now, context.random)
    token = context.random(32).hex()
    sealed = msgspec.structs.replace(within.secret, token=token)
    return {
        **_BEGIN,
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
        "created_at": call.now,
        "cost_per_hour": cost,
        "provider_share": deal.board.settings.provider_share,
        "billing_exempt": request.billing_exempt,
        "quota_id": placed.quota_id,
        "reuse_environment_id": request.reuse_environment_id,
        "readiness_digest": hashlib.sha256(token.encode()).digest(),
    }


_BEGIN: dict[str, Any] = {
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
}
"""What every instance begins with."""


def _ports(unit: ReadUnit, deal: Deal, placed: Placement, instance_id: str) -> list[dict[str, Any]]:
    """Where its ports are published; a virtual machine's SSH among them."""
    node, call = placed.node, deal.call
    home = deal.board.datacenters[node.datacenter_id]
    if home.tunnel == "none":
        return []
    guests = list(deal.inside.ports)
    ssh = (22, "tcp", None)
    if deal.inside.kind == "VirtualMachine" and not any(guest[:2] == ssh[:2] for guest in guests):
        guests.insert(0, ssh)
    try:
        return networks.choose_ports(
            unit, instance_id, node.id, node.ip_address, home, guests, now=call.now, random=call.context.random
        )
    except NoPortError as error:
        raise _full(error) from error


def _full(error: Exception) -> Refusal:
    return Refusal(Code.INSUFFICIENT_CAPACITY, f"There is no room for it: {error}.")


def _connect(unit: WriteUnit, made: Plan, scene: Scene) -> None:
    """Give it an address and volumes."""
    deal, node, instance_id = made.deal, made.placed.node, str(made.row["id"])
    try:
        _join(unit, deal, node.datacenter_id, instance_id, scene)
    except NoAddressError as error:
        raise _full(error) from error
    try:
        if deal.inside.mounts:
            account_id, owner_id = deal.party.account_id, deal.party.id
            volumes.attach(unit, instance_id, node.id, account_id, deal.inside.mounts, scene, owner_id=owner_id)
    except UnknownVolumeError as error:
        raise Refusal(Code.VOLUME_NOT_FOUND, "There is no such volume.", param="config") from error
    except VolumeBusyError as error:
        raise Refusal(Code.VOLUME_ATTACHED, str(error), param="config") from error
    except OtherKindError as error:
        raise Refusal(Code.VALIDATION_FAILED, f"config: {error}", param="config") from error


def _join(unit: WriteUnit, deal: Deal, home_id: str, instance_id: str, scene: Scene) -> None:
    request = deal.request
    if request.network is None:
        if request.with_public_ip:
            raise Refusal(Code.VALIDATION_FAILED, "with_public_ip: name its network", param="network")
        return
    teams = [deal.party.id] if deal.party.kind == "team" else []
    found = networks.visible(unit, home_id, request.network, teams)
    if found is None:
        raise Refusal(Code.NETWORK_NOT_FOUND, "There is no such network in its datacenter.", param="network")
    networks.join(unit, found.id, instance_id, public=request.with_public_ip, now=scene.now, random=scene.random)


def _reuse(unit: WriteUnit, deal: Deal, environment_id: str, instance_id: str, scene: Scene) -> None:
    try:
        environments.claim(unit, environment_id, deal.party.account_id, instance_id, scene, owner_id=deal.party.id)
    except EnvironmentGoneError as error:
        raise gone("The disk of this environment no longer exists.") from error


def _reserve(unit: WriteUnit, made: Plan, scene: Scene) -> None:
    deal, call, instance_id = made.deal, made.deal.call, str(made.row["id"])
    terms = deal.request.reservation
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
                node_id=made.placed.node.id if deal.variant is None else None,
                resources=None if deal.variant is not None else msgspec.json.encode(resources).decode(),
                cost_per_hour=made.cost,
                billing_exempt=terms.new.billing_exempt,
                scene=scene,
            )
        elif isinstance(terms, ExistingReservation):
            bound = reservations.bind(unit, terms.id, deal.party.account_id, instance_id, scene)
            if bound.variant != (None if deal.variant is None else deal.variant.name):
                raise Refusal(Code.VALIDATION_FAILED, "reservation: it is for another variant", param="reservation")
    except (UnknownTypeError, UnknownReservationError) as error:
        raise Refusal(Code.RESERVATION_NOT_FOUND, "There is no such reservation.", param="reservation") from error
    except InsufficientFundsError as error:
        raise _poor() from error


def _poor() -> Refusal:
    return Refusal(Code.INSUFFICIENT_FUNDS, "The balance and the credit do not cover an hour of it.")
