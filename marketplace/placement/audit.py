"""Checks of compute: who has what, and that every status came about as its table allows.

Each reads one snapshot and changes nothing. What the tables cannot show (that no two machines on a node hold the same
device, that an agent touches nothing that is not ours) is shown by tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import Select, and_, exists, func, or_, select

from marketplace.environments.rules import MACHINE as ENVIRONMENTS
from marketplace.events.tables import event
from marketplace.events.transitions import Machine
from marketplace.instances.rules import MACHINE as INSTANCES
from marketplace.instances.tables import instance
from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.rental_tables import deposit, rental_meter
from marketplace.networks.tables import ip_lease, port_lease
from marketplace.nodes.rules import CONNECTIVITY, DRAIN
from marketplace.nodes.tables import gpu, node
from marketplace.placement import load
from marketplace.placement.tables import claim, cpu_claim, gpu_slice_claim, inference_lease
from marketplace.reservations.rules import MACHINE as RESERVATIONS
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit
from marketplace.volumes.rules import MACHINE as VOLUMES
from marketplace.volumes.tables import volume, volume_attachment

Query = Select[*tuple[Any, ...]]


def one_owner_per_slice(unit: ReadUnit) -> Checked:
    """A slice of a GPU has one live owner at most, who is there; parts of a GPU belong to MIG instances only, and what
    an instance has of GPUs is on its own node."""
    c = gpu_slice_claim.c
    live = c.released_at.is_(None)
    checked = Checked(_count(unit, select(func.count()).select_from(gpu_slice_claim).where(live)))
    twice = select(c.gpu_id, c.slice).where(live).group_by(c.gpu_id, c.slice).having(func.count() > 1)
    for row in unit.select(twice):
        checked.wrong(f"slice {row.slice} of GPU {row.gpu_id} has two owners")
    partial = (
        select(c.gpu_id, c.owner_id, func.count().label("slices"))
        .where(live, c.mig_start.is_(None))
        .group_by(c.gpu_id, c.owner_id)
        .having(func.count() != 8)
    )
    for row in unit.select(partial):
        checked.wrong(f"{row.owner_id} has {row.slices} slices of GPU {row.gpu_id} and no MIG instance")
    ownerless = (
        select(c.owner_id, c.gpu_id)
        .join(claim, and_(claim.c.instance_id == c.instance_id, claim.c.released_at.is_(None)), isouter=True)
        .join(
            inference_lease,
            and_(inference_lease.c.id == c.lease_id, inference_lease.c.released_at.is_(None)),
            isouter=True,
        )
        .where(live, claim.c.instance_id.is_(None), inference_lease.c.id.is_(None))
    )
    for row in unit.select(ownerless):
        checked.wrong(f"{row.owner_id} has a part of GPU {row.gpu_id} and nothing else")
    astray = select(c.owner_id, c.gpu_id).join(gpu, gpu.c.id == c.gpu_id).where(live, gpu.c.node_id != c.node_id)
    for row in unit.select(astray):
        checked.wrong(f"{row.owner_id} has a part of GPU {row.gpu_id}, which is on another node")
    return checked


def claims_within_capacity(unit: ReadUnit) -> Checked:
    """What is claimed of a node is within what it has, in every dimension; a thread has one owner, and the pages of
    a NUMA node are enough. A node that shrank under its instances is not wrong: nothing was promised since."""
    checked = Checked()
    grown = _shrunk(unit)
    for view in load.views(unit, 0):
        checked.count += 1
        if view.id in grown:
            continue
        used, has = view.used, view.capacity
        if used.threads > has.threads or used.dram > has.dram or used.disk > has.disk:
            checked.wrong(f"node {view.id} has {has}, {used} are claimed")
        for numa, pages in view.pages_used.items():
            if pages > view.hugepages.get(numa, 0):
                checked.wrong(f"NUMA node {numa} of node {view.id}: {pages} pages are claimed")
    c = cpu_claim.c
    twice = (
        select(c.node_id, c.thread)
        .where(c.released_at.is_(None))
        .group_by(c.node_id, c.thread)
        .having(func.count() > 1)
    )
    for row in unit.select(twice):
        checked.wrong(f"thread {row.thread} of node {row.node_id} has two owners")
    return checked


def _shrunk(unit: ReadUnit) -> set[str]:
    """Nodes whose latest inventory is younger than their oldest live claim, and lacks a GPU that they had."""
    return set(unit.select(select(gpu.c.node_id).where(gpu.c.present.is_(False)).distinct()).scalars())


def meters_have_what_they_are_of(unit: ReadUnit) -> Checked:
    """A meter, running or stopped, is of an instance or a volume that is there, and none runs for a volume that was
    deleted. (One that runs for an instance that is over is found where meters are compared with statuses.)"""
    checked = Checked(_count(unit, select(func.count()).select_from(rental_meter)))
    m = rental_meter.c
    told = select(m.id, m.resource_type, m.resource_id)
    lost = (
        told.join(instance, instance.c.id == m.resource_id, isouter=True).where(
            m.resource_type == "Compute", instance.c.id.is_(None)
        ),
        told.join(volume, volume.c.id == m.resource_id, isouter=True).where(
            m.resource_type == "Volume",
            or_(volume.c.id.is_(None), and_(volume.c.deleted_at.is_not(None), m.stopped_at.is_(None))),
        ),
    )
    for wanted in lost:
        for row in unit.select(wanted):
            checked.wrong(f"meter {row.id} is of {row.resource_type} {row.resource_id}, which is not there")
    return checked


def nothing_costs_before_it_is_ready(unit: ReadUnit) -> Checked:
    """A meter of an instance began when it was ready, never before, and stands nowhere else than the instance does."""
    checked = Checked(
        _count(unit, select(func.count()).select_from(rental_meter).where(rental_meter.c.resource_type == "Compute"))
    )
    early = (
        select(rental_meter.c.id, instance.c.status)
        .join(instance, instance.c.id == rental_meter.c.resource_id)
        .where(
            rental_meter.c.resource_type == "Compute",
            or_(instance.c.ready_at.is_(None), rental_meter.c.started_at < instance.c.ready_at),
        )
    )
    for row in unit.select(early):
        checked.wrong(f"meter {row.id} is of an instance that is {row.status} and was not ready when it began")
    running = exists().where(rental_meter.c.resource_id == instance.c.id, rental_meter.c.stopped_at.is_(None))
    unequal = select(instance.c.id, instance.c.status).where(
        or_(and_(instance.c.status == "Active", ~running), and_(instance.c.status != "Active", running))
    )
    for row in unit.select(unequal):
        checked.wrong(f"instance {row.id} is {row.status}, and its meter says otherwise")
    return checked


def what_is_over_has_nothing(unit: ReadUnit) -> Checked:
    """An instance that is over has no claim but as a zombie, no port, address or volume, and no reservation; one that
    failed never had a meter, and nothing is held for it."""
    over = instance.c.ended_at.is_not(None)
    checked = Checked(_count(unit, select(func.count()).select_from(instance).where(over)))

    def left(what: str, wanted: Query) -> None:
        for row in unit.select(wanted):
            checked.wrong(f"instance {row.id} is {row.status}, and still has {what}")

    told = select(instance.c.id, instance.c.status)
    left("a claim", _join(told, claim, claim.c.released_at.is_(None) & claim.c.zombie.is_(False)).where(over))
    left("a port", _join(told, port_lease, port_lease.c.released_at.is_(None)).where(over))
    left("an address", _join(told, ip_lease, ip_lease.c.released_at.is_(None)).where(over))
    left("a volume", _join(told, volume_attachment, volume_attachment.c.detached_at.is_(None)).where(over))
    left("a reservation", _join(told, reservation, reservation.c.state.in_(("Held", "Bound"))).where(over))
    failed = instance.c.status == "Failed"
    left("a meter", told.join(rental_meter, rental_meter.c.resource_id == instance.c.id).where(failed))
    held = told.join(reservation, reservation.c.instance_id == instance.c.id).join(
        deposit, and_(deposit.c.subject_id == reservation.c.id, deposit.c.state == "held")
    )
    left("money held", held.where(failed))
    return checked


def what_is_live_has_a_claim(unit: ReadUnit) -> Checked:
    """An instance that is not over has a claim, of its own node, and a zombie's instance is over."""
    checked = Checked(_count(unit, select(func.count()).select_from(instance).where(instance.c.ended_at.is_(None))))
    held = and_(claim.c.instance_id == instance.c.id, claim.c.released_at.is_(None))
    bare = (
        select(instance.c.id)
        .join(claim, held, isouter=True)
        .where(instance.c.ended_at.is_(None), or_(claim.c.node_id.is_(None), claim.c.node_id != instance.c.node_id))
    )
    for row in unit.select(bare):
        checked.wrong(f"instance {row.id} has no claim on its node")
    living = select(instance.c.id).join(claim, held).where(claim.c.zombie, instance.c.ended_at.is_(None))
    for row in unit.select(living):
        checked.wrong(f"instance {row.id} is not over, and its claim is a zombie's")
    return checked


def nothing_came_to_a_node_that_is_emptied(unit: ReadUnit) -> Checked:
    """No instance on a node that is being emptied, or is, was made after that began."""
    drained = node.c.drain_state != "None"
    checked = Checked(_count(unit, select(func.count()).select_from(node).where(drained)))
    late = (
        select(instance.c.id, node.c.id.label("node_id"))
        .join(node, node.c.id == instance.c.node_id)
        .where(drained, instance.c.created_at > node.c.drain_started_at)
    )
    for row in unit.select(late):
        checked.wrong(f"instance {row.id} was placed on node {row.node_id} while that was being emptied")
    return checked


def statuses_follow_their_tables(unit: ReadUnit) -> Checked:
    """Every change of a status has one event and is in the table of transitions: of each row, as many changes lead into
    a status as out of it, but for one more into that which it has."""
    checked = Checked()
    for machine in (INSTANCES, CONNECTIVITY, DRAIN, RESERVATIONS, VOLUMES, ENVIRONMENTS):
        _follow(unit, machine, checked)
    return checked


def _follow(unit: ReadUnit, machine: Machine, checked: Checked) -> None:
    flows: dict[str, Counter[str]] = {}
    told = select(event.c.action, event.c.subject_id, event.c.detail).where(event.c.action.like(f"{machine.noun}.%"))
    for row in unit.stream(told):
        change = msgspec.json.decode(row.detail).get(machine.column)
        if not isinstance(change, list):
            continue
        before, after = change
        trigger = row.action.partition(".")[2]
        if before is not None and machine.moves.get((before, trigger)) != after:
            checked.wrong(f"{machine.noun} {row.subject_id}: {trigger} led from {before} to {after}")
        flow = flows.setdefault(row.subject_id, Counter())
        flow[after] += 1
        if before is not None:
            flow[before] -= 1
    starts = {"None"} if machine is DRAIN else set()
    for row_id, status in unit.stream(select(machine.table.c.id, machine.table.c[machine.column])):
        checked.count += 1
        flow = Counter(flows.get(row_id, Counter()))
        for start in starts:  # where every row begins, without an event
            flow[start] += 1
        if {name: number for name, number in flow.items() if number} != {status: 1}:
            checked.wrong(f"{machine.noun} {row_id} is {status}, its events say {dict(flow)}")


def _join(told: Query, table: Any, condition: Any) -> Query:
    return told.join(table, and_(table.c.instance_id == instance.c.id, condition))


def _count(unit: ReadUnit, wanted: Select[int]) -> int:
    return int(unit.select(wanted).scalar_one())


CHECKS: dict[str, tuple[str, Callable[[ReadUnit], Checked]]] = {
    "C1": ("every slice of a GPU has one owner", one_owner_per_slice),
    "C2": ("what is claimed of a node is within what it has", claims_within_capacity),
    "C3": ("every meter is of something that is there", meters_have_what_they_are_of),
    "C4": ("nothing costs before it is ready", nothing_costs_before_it_is_ready),
    "C5": ("what is over has nothing", what_is_over_has_nothing),
    "C6": ("what is not over has a claim on its node", what_is_live_has_a_claim),
    "C8": ("nothing came to a node that is being emptied", nothing_came_to_a_node_that_is_emptied),
    "C11": ("every status came about as its table allows", statuses_follow_their_tables),
}
