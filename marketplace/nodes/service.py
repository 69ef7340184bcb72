"""Nodes as their agents tell of them: registering, sessions, signs of life, and what wakes a waiting agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import insert, select, update

from marketplace.agent.gpu_names import kernel_modules
from marketplace.agent.inventory_wire import Gpu, Inventory
from marketplace.agent.wire import Event, Register
from marketplace.catalog import datacenters
from marketplace.events.transitions import Scene, begun, transition
from marketplace.nodes.rules import CONNECTIVITY
from marketplace.nodes.tables import gpu, node, node_event
from marketplace.placement import claims, leases
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id

MAX_EVENTS = 200
"""Events of one report that are kept."""


class StaleSessionError(Exception):
    """Another registration of the machine came later, or there was none."""


class ForeignMachineError(Exception):
    """The machine belongs to another provider's node."""


def find(unit: ReadUnit, node_id: str) -> Any:
    """Return the row of a node that is not deleted, or None."""
    return unit.select(select(node).where(node.c.id == node_id, node.c.deleted_at.is_(None))).one_or_none()


def lock(unit: WriteUnit, node_id: str) -> Any:
    """Return the row of a node, locked until the unit ends, or None."""
    wanted = select(node).where(node.c.id == node_id, node.c.deleted_at.is_(None)).with_for_update()
    return unit.select(wanted).one_or_none()


def of_session(unit: ReadUnit, provider_id: str, session_id: str, epoch: int | None) -> Any:
    """Return the row of the node whose session it is; in a write unit it is locked. StaleSessionError."""
    wanted = select(node).where(
        node.c.session_id == session_id, node.c.provider_id == provider_id, node.c.deleted_at.is_(None)
    )
    if isinstance(unit, WriteUnit):
        wanted = wanted.with_for_update()
    row = unit.select(wanted).one_or_none()
    if row is None or (epoch is not None and row.epoch != epoch):
        raise StaleSessionError(session_id)
    return row


def touch(unit: WriteUnit, node_id: str) -> None:
    """Raise the revision of what a node should do: its agent, which waits for that, asks again."""
    unit.execute(update(node).where(node.c.id == node_id).values(desired_rev=node.c.desired_rev + 1))


def register(unit: WriteUnit, provider_id: str, asked: Register, scene: Scene) -> Any:
    """Begin a session of a machine and return its node's row. Facts of the hardware are taken over; what people set
    stays. ForeignMachineError."""
    mine = select(node).where(node.c.machine_id == asked.machine_id, node.c.deleted_at.is_(None)).with_for_update()
    row = unit.select(mine).one_or_none()
    if row is None:
        node_id = _add(unit, provider_id, asked, scene)
    else:
        if row.provider_id != provider_id:
            raise ForeignMachineError(asked.machine_id)
        node_id = row.id
        _again(unit, row, asked, scene)
    take_inventory(unit, node_id, asked.inventory)
    return find(unit, node_id)


def _add(unit: WriteUnit, provider_id: str, asked: Register, scene: Scene) -> str:
    owner = providers.find(unit, provider_id)
    assert owner is not None, "its key names it"
    node_id = new_id(scene.now, scene.random)
    unit.execute(
        insert(node).values(
            id=node_id,
            provider_id=provider_id,
            datacenter_id=datacenters.home_of(unit, owner, scene.now, scene.random),
            machine_id=asked.machine_id,
            status="Ready",
            health="",
            listed=True,
            drain_state="None",
            drain_notified=False,
            cpu_mode="Pinned",
            overcommit_percent=100,
            epoch=1,
            generation=1,
            desired_rev=1,
            dram_reserve=0,
            inference_floor=0,
            reclaim_notice_s=30,
            next_fence=1,
            inventory="",
            inventory_digest="",
            registered_at=scene.now,
            **_session(asked, scene),
        )
    )
    begun(unit, CONNECTIVITY, node_id, "Ready", "register", scene, owner_id=provider_id)
    return node_id


def _again(unit: WriteUnit, row: Any, asked: Register, scene: Scene) -> None:
    if row.boot_id != asked.boot_id:
        leases.release_all(unit, row.id, scene.now)
    turns = {"epoch": row.epoch + 1, "generation": row.generation + 1, "desired_rev": row.desired_rev + 1}
    values = {**turns, **_session(asked, scene)}
    unit.execute(update(node).where(node.c.id == row.id).values(**values))
    heard(unit, row, scene)


def _session(asked: Register, scene: Scene) -> dict[str, Any]:
    inventory = asked.inventory
    return {
        "boot_id": asked.boot_id,
        "hostname": inventory.hostname,
        "ip_address": inventory.ip,
        "hibernated": asked.hibernated,
        "capabilities": msgspec.json.encode(asked.capabilities).decode(),
        "agent_version": asked.agent_version,
        "session_id": new_id(scene.now, scene.random),
        "last_seen": scene.now,
        "observed_digest": "",
    }


def heard(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Note a sign of life."""
    if row.status == "Ready":
        unit.execute(update(node).where(node.c.id == row.id).values(last_seen=scene.now))
        return
    transition(
        unit,
        CONNECTIVITY,
        row.id,
        row.status,
        "heard",
        scene,
        owner_id=row.provider_id,
        values={"last_seen": scene.now, "generation": node.c.generation + 1},
    )


def leave(unit: WriteUnit, row: Any, scene: Scene) -> None:
    """Note that the agent goes, in an orderly way. Its machines keep running."""
    if row.status != "Offline":
        transition(unit, CONNECTIVITY, row.id, row.status, "leave", scene, owner_id=row.provider_id)


def take_inventory(unit: WriteUnit, node_id: str, inventory: Inventory) -> None:
    """Take over what a node is made of. GPUs that people switched off stay so, and those that are gone stay as such."""
    digest = inventory.digest()
    changed = unit.execute(
        update(node)
        .where(node.c.id == node_id, node.c.inventory_digest != digest)
        .values(
            inventory=msgspec.json.encode(inventory).decode(),
            inventory_digest=digest,
            hostname=inventory.hostname,
            ip_address=inventory.ip,
        )
    )
    if changed.rowcount:
        _merge_gpus(unit, node_id, inventory.gpus)
        claims.changed(unit, node_id)


def _merge_gpus(unit: WriteUnit, node_id: str, told: Sequence[Gpu]) -> None:
    known = {row.pci_slot: row for row in unit.select(select(gpu).where(gpu.c.node_id == node_id))}
    numbers = {slot: number for number, slot in enumerate(sorted({*known, *(one.pci_slot for one in told)}))}
    for one in told:
        row = known.pop(one.pci_slot, None)
        facts = _facts(one, numbers[one.pci_slot])
        if row is None:
            gpu_id = f"{node_id}-{one.pci_slot.replace(':', '').replace('.', '')}"
            unit.execute(insert(gpu).values(id=gpu_id, node_id=node_id, pci_slot=one.pci_slot, enabled=True, **facts))
        else:
            # A GPU inside a virtual machine tells less of itself: what was known stays.
            kept = {name: value for name, value in facts.items() if value not in (None, "", 0, "Unknown", "{}")}
            always = {
                name: facts[name] for name in ("number", "numa", "pci_valid", "present", "healthy", "mig_enabled")
            }
            unit.execute(update(gpu).where(gpu.c.id == row.id).values(**{**kept, **always, "problem": one.problem}))
    for slot, row in known.items():
        unit.execute(update(gpu).where(gpu.c.id == row.id).values(present=False, number=numbers[slot]))


def _facts(one: Gpu, number: int) -> dict[str, Any]:
    modules = one.kernel_modules if one.kernel_modules != "Unknown" else kernel_modules(one.architecture)
    mig = {"profiles": one.mig_profiles, "instances": one.mig_instances}
    return {
        "uuid": one.uuid,
        "number": number,
        "numa": one.numa,
        "brand": one.brand,
        "architecture": one.architecture,
        "kernel_modules": modules,
        "vram": one.vram_bytes,
        "pci_valid": one.pci_valid,
        "present": True,
        "healthy": one.healthy,
        "problem": one.problem,
        "mig_enabled": one.mig_enabled,
        "mig": msgspec.json.encode(mig).decode() if one.mig_profiles or one.mig_instances else "{}",
        "fabric_partition": one.fabric_partition,
    }


def keep_events(unit: WriteUnit, node_id: str, told: Sequence[Event]) -> list[Event]:
    """Keep what happened on a node, whose row is locked; what is told again is kept once. Returns what is news."""
    if not told:
        return []
    said = node_event.c.id.in_(sorted({one.id for one in told}))
    known = set(unit.select(select(node_event.c.id).where(node_event.c.node_id == node_id, said)).scalars())
    fresh = [one for one in {one.id: one for one in told[:MAX_EVENTS]}.values() if one.id not in known]
    rows = [
        {
            "node_id": node_id,
            "id": one.id,
            "at": one.at,
            "kind": one.kind,
            "message": one.message[:2000],
            "instance_id": one.instance_id,
            "data": msgspec.json.encode(one.data).decode(),
        }
        for one in fresh
    ]
    unit.insert_missing(node_event, rows)
    return fresh
