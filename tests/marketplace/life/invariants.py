"""What holds of the compute side at every moment: each invariant is one function over the tables, or over the tables
and the machines that nodes really have, and returns a sentence for each thing that is wrong.

They are asked after every step of every scenario, and share no code with what they judge.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import Table, select

from marketplace.agent.inventory_wire import Inventory
from marketplace.environments import rules as environment_rules
from marketplace.environments.tables import saved_environment
from marketplace.events.tables import event
from marketplace.events.transitions import Machine
from marketplace.instances import rules as instance_rules
from marketplace.instances.tables import instance
from marketplace.ledger.audit import CHECKS, audit
from marketplace.ledger.rental_tables import deposit, rental_meter
from marketplace.networks.tables import ip_lease, port_lease
from marketplace.nodes import rules as node_rules
from marketplace.nodes.tables import gpu, node
from marketplace.placement.tables import claim, cpu_claim, gpu_slice_claim, inference_lease
from marketplace.quotas.tables import quota
from marketplace.reservations import rules as reservation_rules
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit
from marketplace.volumes import rules as volume_rules
from marketplace.volumes.tables import volume, volume_attachment

GIB = 1 << 30
BOOKS = ("I1", "I2", "I3", "I4", "I13", "I20", "R1", "R2")
AMOUNTS = ("gpu", "vcpu", "dram", "disk")
SILENCE_US = 60_000_000
"""How long after its node's last sign of life a machine may cost something."""


class Thing(msgspec.Struct, frozen=True):
    """A machine that a hypervisor has, whoever knows of it."""

    node_id: str
    id: str
    gpus: tuple[str, ...]
    """PCI slots, or a part of one as `slot/first slice`"""


class Move(msgspec.Struct):
    """A change of a status, as its event tells it."""

    at: int
    trigger: str
    before: str | None
    after: str


class Facts:
    """The rows of one snapshot, read once for all invariants."""

    def __init__(self, unit: ReadUnit, *, now: int, things: Collection[Thing] = ()) -> None:
        self.unit = unit
        self.now = now
        self.things = things
        self.nodes = {row.id: row for row in self.rows(node)}
        self.gpus = {row.id: row for row in self.rows(gpu)}
        self.instances = {row.id: row for row in self.rows(instance)}
        self.claims = [row for row in self.rows(claim) if row.released_at is None]
        self.slices = [row for row in self.rows(gpu_slice_claim) if row.released_at is None]
        self.threads = [row for row in self.rows(cpu_claim) if row.released_at is None]
        self.leases = {row.id: row for row in self.rows(inference_lease)}
        self.meters = self.rows(rental_meter)
        self.deposits = self.rows(deposit)
        self.reservations = {row.id: row for row in self.rows(reservation)}
        self.volumes = {row.id: row for row in self.rows(volume)}
        self.environments = {row.id: row for row in self.rows(saved_environment)}
        self.addresses = [
            row for table in (port_lease, ip_lease) for row in self.rows(table) if row.released_at is None
        ]
        self.quotas = {row.id: row for row in self.rows(quota)}
        self.attached = [row for row in self.rows(volume_attachment) if row.detached_at is None]

    def rows(self, table: Table) -> list[Any]:
        """Every row of a table."""
        return list(self.unit.select(select(table)).all())

    def over(self, instance_id: str) -> bool:
        """Whether an instance has ended."""
        return self.instances[instance_id].ended_at is not None


Findings = Iterator[str]


def one_owner_of_each_slice(facts: Facts) -> Findings:
    """I1: nobody shares a slice of a GPU; whole GPUs are claimed whole, and split ones are split for everybody."""
    owners = Counter((row.gpu_id, row.slice) for row in facts.slices)
    yield from (f"slice {number} of {name} has {count} owners" for (name, number), count in owners.items() if count > 1)
    whole: dict[str, set[int]] = defaultdict(set)
    split: set[str] = set()
    for row in facts.slices:
        if row.mig_start is None:
            whole[f"{row.gpu_id} {row.owner_id}"].add(row.slice)
        else:
            split.add(row.gpu_id)
    for key, numbers in whole.items():
        if numbers != set(range(8)):
            yield f"{key} is claimed in part: {sorted(numbers)}"
        if key.split()[0] in split:
            yield f"{key} is claimed whole and in parts"


def one_machine_on_each_gpu(facts: Facts) -> Findings:
    """I1 on the machines themselves: no two have the same device, and each has a live claim on all that it has."""
    seen = Counter((thing.node_id, name) for thing in facts.things for name in thing.gpus)
    yield from (f"{count} machines have {where}" for where, count in seen.items() if count > 1)
    held: dict[str, set[str]] = defaultdict(set)
    for row in facts.slices:
        slot = facts.gpus[row.gpu_id].pci_slot
        held[row.owner_id].add(slot if row.mig_start is None else f"{slot}/{row.mig_start}")
    for thing in facts.things:
        beyond = set(thing.gpus) - held[thing.id]
        if beyond:
            yield f"machine {thing.id} has {sorted(beyond)}, which nobody claimed for it"


def claims_within_hardware(facts: Facts) -> Findings:
    """I2: what is claimed of a node is there, in every dimension; no thread and no page is given twice."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    paged: Counter[tuple[str, int]] = Counter()
    for row in facts.claims:
        used[row.node_id].update({"threads": row.threads, "dram": row.dram, "disk": row.disk, "gpu": row.gpus})
        for numa, count in json.loads(row.hugepages).items():
            paged[row.node_id, int(numa)] += count
    for node_id, amounts in used.items():
        has = _hardware(facts.nodes[node_id].inventory)
        yield from (
            f"{node_id}: {amounts[name]} {name} of {has[name]}" for name in amounts if amounts[name] > has[name]
        )
    for (node_id, numa), count in paged.items():
        told = msgspec.json.decode(facts.nodes[node_id].inventory, type=Inventory)
        pool = {one.node: one.hugepages_1g for one in told.numa}.get(numa, 0)
        if count > pool:
            yield f"{node_id}: {count} pages of NUMA node {numa}, which has {pool}"
    threads = Counter((row.node_id, row.thread) for row in facts.threads)
    yield from (f"thread {where} has {count} owners" for where, count in threads.items() if count > 1)
    live = {row.instance_id for row in facts.claims}
    for row in (*facts.slices, *facts.threads):
        if row.instance_id is not None and row.instance_id not in live:
            yield f"{row.instance_id} has a part of {row.node_id} without a claim"
    for row in facts.slices:
        if row.lease_id is not None and facts.leases[row.lease_id].released_at is not None:
            yield f"lease {row.lease_id} is over and has slices"


def claims_follow_life(facts: Facts) -> Findings:
    """Claims last exactly as long as what they are for: until it is over, or until its node says so afterwards."""
    claimed = {row.instance_id: row for row in facts.claims}
    for row in facts.instances.values():
        mine = claimed.get(row.id)
        if row.ended_at is None and (mine is None or mine.zombie):
            yield f"{row.status} instance {row.id} has no claim"
        if row.ended_at is not None and mine is not None and not mine.zombie:
            yield f"{row.status} instance {row.id} has a claim"


def meters_begin_when_ready(facts: Facts) -> Findings:
    """I4: nothing costs before it is ready, after its end was asked for, or beyond its node's last sign of life."""
    running = {row.resource_id for row in facts.meters if row.stopped_at is None}
    for row in facts.meters:
        rented = facts.instances.get(row.resource_id)
        if row.resource_type != "Compute" or rented is None:
            continue
        if rented.ready_at is None or row.started_at < rented.ready_at or row.metered_to < rented.ready_at:
            yield f"{rented.id} was metered from {row.started_at} on, and ready at {rented.ready_at}"
        if rented.stop_at is not None and row.stopped_at is None:
            yield f"{rented.id} is being ended, and its meter runs"
        end = min(
            facts.now if rented.stop_at is None else rented.stop_at,
            int(facts.nodes[rented.node_id].last_seen) + SILENCE_US,
        )
        if row.metered_to > max(end, row.started_at):
            yield f"{rented.id} was metered to {row.metered_to}, it cost until {end} at most"
        if row.stopped_at is not None and row.charged_us > rented.stop_at - rented.ready_at:
            yield f"{rented.id} was charged for more time than it ran"
    for row in facts.instances.values():
        if (row.status == "Active") != (row.id in running):
            yield f"{row.status} instance {row.id}: its meter {'runs' if row.id in running else 'does not run'}"


def failed_costs_and_keeps_nothing(facts: Facts) -> Findings:
    """I5: what has failed has no meter, and, like all that is over, no address, volume, reservation or deposit."""
    metered = {row.resource_id for row in facts.meters}
    bound = {row.instance_id for row in facts.reservations.values() if row.state in ("Held", "Bound")}
    addressed = {row.instance_id for row in facts.addresses}
    mounted = {row.instance_id for row in facts.attached}
    for row in facts.instances.values():
        if row.ended_at is None:
            continue
        if row.status == "Failed" and row.id in metered:
            yield f"{row.id} failed and was metered"
        for what, having in (("a reservation", bound), ("an address", addressed), ("a volume", mounted)):
            if row.id in having:
                yield f"{row.status} instance {row.id} has {what}"
    for row in facts.attached:
        if facts.volumes[row.volume_id].status != "Attached":
            yield f"volume {row.volume_id} is {facts.volumes[row.volume_id].status}, and {row.instance_id} has it"


def books_balance(facts: Facts) -> Findings:
    """I6: the ledger's own checks of books and of what rentals cost."""
    for check in BOOKS:
        yield from CHECKS[check][1](facts.unit).findings


def whole_audit(facts: Facts) -> list[str]:
    """Every check that the platform has, of everything: at the end of a scenario."""
    return [line for line in audit(facts.unit, now=facts.now).lines() if line.startswith("     - ")]


def deposits_resolved_once(facts: Facts) -> Findings:
    """I7: a reservation has one instance at most, an instance one reservation; what was set aside for one was captured
    or given back, exactly once, as its state says."""
    bound = Counter(row.instance_id for row in facts.reservations.values() if row.state in ("Held", "Bound"))
    yield from (f"instance {name} has {count} reservations" for name, count in bound.items() if count > 1)
    held: Counter[str] = Counter()
    captured: Counter[str] = Counter()
    for row in facts.deposits:
        held[row.subject_id] += row.state == "held"
        captured[row.subject_id] += row.amount if row.state == "captured" else 0
    for row in facts.reservations.values():
        if held[row.id] > 1 or (held[row.id] and row.state != "Held"):
            yield f"reservation {row.id} is {row.state}, with {held[row.id]} deposits held"
        if captured[row.id] != row.prepaid:
            yield f"reservation {row.id} was paid {row.prepaid}, and {captured[row.id]} captured"
        rented = facts.instances.get(row.instance_id)
        expected = {"Held": ("Initializing", "Deactivating"), "Bound": ("Initializing", "Active", "Deactivating")}
        if row.state in expected and (rented is None or rented.status not in expected[row.state]):
            yield f"reservation {row.id} is {row.state}, its instance {None if rented is None else rented.status}"


def nothing_comes_to_a_drained_node(facts: Facts) -> Findings:
    """I8: nothing was rented on a node after its drain began, and a drained one is empty."""
    live = {row.node_id for row in facts.instances.values() if row.ended_at is None}
    for row in facts.nodes.values():
        if row.drain_state == "Drained" and row.id in live:
            yield f"node {row.id} is drained, and something is on it"
        for rented in facts.instances.values():
            if row.drain_state != "None" and rented.node_id == row.id and rented.created_at > row.drain_started_at:
                yield f"{rented.id} came to {row.id} after its drain began"


def history_tells_every_state(facts: Facts) -> Findings:
    """I11: the events of a row lead from nothing to the status that it has, one legal move after the other."""
    told: dict[tuple[str, str], list[Move]] = defaultdict(list)
    for row in facts.unit.select(select(event).order_by(event.c.at, event.c.id)):
        noun, _, trigger = row.action.partition(".")
        for column, change in msgspec.json.decode(row.detail).items():
            if isinstance(change, list) and len(change) == 2:
                told[f"{noun}.{column}", row.subject_id].append(Move(row.at, trigger, *change))
    for machine, rows in _machines(facts):
        for row in rows.values():
            state: str | None = "None" if machine.column == "drain_state" else None
            left = told[f"{machine.noun}.{machine.column}", row.id]
            while left:
                # Those of one transaction have one time: they are in the order in which they lead on.
                move = next((one for one in left if one.before == state and one.at == left[0].at), left[0])
                left.remove(move)
                legal = move.before is None or machine.moves.get((move.before, move.trigger)) == move.after
                if move.before != state or not legal:
                    yield f"{machine.noun} {row.id}: {move}, it was {state}"
                state = move.after
            if state != getattr(row, machine.column):
                yield f"{machine.noun} {row.id} is {getattr(row, machine.column)}, its events end with {state}"


def machines_are_claimed(facts: Facts) -> Findings:
    """I12: whatever a node really runs for us, the tables still count with: nothing is given away under it."""
    claimed = {(row.node_id, row.instance_id) for row in facts.claims}
    for thing in facts.things:
        if (thing.node_id, thing.id) not in claimed:
            known = facts.instances.get(thing.id)
            yield f"machine {thing.id} of {thing.node_id} runs, and is {None if known is None else known.status}"


def environments_are_claimed_once(facts: Facts) -> Findings:
    """A saved disk is given to one instance that lives."""
    for row in facts.environments.values():
        if row.state == "Claimed" and facts.over(row.claimed_by):
            yield f"environment {row.id} waits for {row.claimed_by}, which is over"


INVARIANTS: Mapping[str, Callable[[Facts], Findings]] = {
    "I1": one_owner_of_each_slice,
    "I1 machines": one_machine_on_each_gpu,
    "I2": claims_within_hardware,
    "I2 life": claims_follow_life,
    "I4": meters_begin_when_ready,
    "I5": failed_costs_and_keeps_nothing,
    "I6": books_balance,
    "I7": deposits_resolved_once,
    "I8": nothing_comes_to_a_drained_node,
    "I11": history_tells_every_state,
    "I12": machines_are_claimed,
    "environments": environments_are_claimed_once,
}
"""Those that one snapshot shows. What needs two moments, a caller or a node's own records is in the machine."""


def broken(facts: Facts, names: Collection[str] = tuple(INVARIANTS)) -> list[str]:
    """What is wrong, as sentences; empty where all of them hold."""
    return [f"{name}: {finding}" for name in names for finding in INVARIANTS[name](facts)]


def overcommitted(facts: Facts, node_id: str) -> bool:
    """I3: whether quotas hold, and machines use, more of a node than it has."""
    has = _hardware(facts.nodes[node_id].inventory)
    used: Counter[str] = Counter()
    consumed: dict[str | None, Counter[str]] = defaultdict(Counter)
    for row in facts.claims:
        if row.node_id == node_id:
            amounts = {"gpu": row.gpus, "vcpu": row.threads, "dram": row.dram, "disk": row.disk}
            used.update(amounts)
            consumed[row.quota_id].update(amounts)
    names = dict(zip(AMOUNTS, ("gpu", "threads", "dram", "disk"), strict=True))
    for row in facts.quotas.values():
        over = row.valid_till is not None and row.valid_till <= facts.now
        if row.node_id == node_id and row.active and row.valid_from <= facts.now and not over:
            used.update({name: max(0, getattr(row, name) - consumed[row.id][name]) for name in AMOUNTS})
    return any(used[name] > has[names[name]] for name in AMOUNTS)


def beyond_budget(facts: Facts, quota_id: str) -> bool:
    """I3: whether more runs under a quota than it grants."""
    row = facts.quotas[quota_id]
    mine = [one for one in facts.claims if one.quota_id == quota_id]
    return any(
        sum(getattr(one, column) for one in mine) > getattr(row, name)
        for name, column in zip(AMOUNTS, ("gpus", "threads", "dram", "disk"), strict=True)
    )


def _hardware(text: str) -> dict[str, int]:
    told = msgspec.json.decode(text, type=Inventory)
    pages = sum(one.hugepages_1g for one in told.numa)
    return {
        "gpu": len(told.gpus),
        "threads": len(told.cpu.threads),
        "dram": pages * GIB or told.memory_bytes,
        "disk": told.disk.total_bytes,
    }


def _machines(facts: Facts) -> list[tuple[Machine, dict[str, Any]]]:
    return [
        (instance_rules.MACHINE, facts.instances),
        (node_rules.CONNECTIVITY, facts.nodes),
        (node_rules.DRAIN, facts.nodes),
        (reservation_rules.MACHINE, facts.reservations),
        (volume_rules.MACHINE, facts.volumes),
        (environment_rules.MACHINE, facts.environments),
    ]
