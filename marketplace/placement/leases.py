"""Leases of GPUs to inference engines, in the same claims as rentals: neither can have what the other has.

An engine asks its node, the node asks the server with its next poll, and what the server grants is part of the node's
desired state. A lease has a fence number that rises with every grant of the node. A preemptible lease may be revoked:
its GPUs then belong to the rental at once, but the node starts nothing on them before it has said that the engine is
gone. A node that is cut off from the server keeps what its engines hold; only a node that is heard, and no longer
reports a lease, has lost it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import insert, select, update

from marketplace.agent.wire import LeaseGrant, LeaseReport
from marketplace.nodes.tables import gpu, node
from marketplace.placement import claims, load
from marketplace.placement.choose import gpu_set
from marketplace.placement.tables import gpu_slice_claim, inference_lease
from marketplace.placement.view import ALL_SLICES, GpuView, NodeView
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

SECOND = 1_000_000
LIFE_US = 90 * SECOND
"""How long a lease lasts beyond the last poll that reported it."""


def sync(unit: WriteUnit, node_id: str, reports: Sequence[LeaseReport], now: int, random: Random) -> bool:
    """Take what a node says of its leases; says whether what it should know of them changed."""
    changed = False
    known = {row.name: row for row in _live(unit, node_id)}
    for report in reports:
        row = known.pop(report.id, None)
        if report.state == "Released":
            changed |= row is not None and _end(unit, row.id, node_id, now)
        elif row is None:
            _ask(unit, node_id, report, now, random)
            changed = True
        else:
            unit.execute(update(inference_lease).where(inference_lease.c.id == row.id).values(expires_at=now + LIFE_US))
    for row in known.values():
        if row.expires_at < now:
            changed |= _end(unit, row.id, node_id, now)
    return changed


def release_all(unit: WriteUnit, node_id: str, now: int) -> None:
    """End every lease of a node that was started anew: its engines are gone with it."""
    for row in _live(unit, node_id):
        _end(unit, row.id, node_id, now)


def grants(unit: ReadUnit, node_id: str) -> list[LeaseGrant]:
    """The server's word on every lease of a node."""
    rows = _live(unit, node_id)
    slots = _slots(unit, [row.id for row in rows])
    return [
        LeaseGrant(
            id=row.name, fence=row.fence, gpus=slots.get(row.id, []), revoke_at=row.revoke_at, refused=row.refused
        )
        for row in rows
    ]


def being_left(unit: ReadUnit, node_id: str) -> frozenset[str]:
    """GPUs whose engine was told to leave and has not said that it did: by id."""
    wanted = (
        select(gpu_slice_claim.c.gpu_id)
        .join(inference_lease, inference_lease.c.id == gpu_slice_claim.c.lease_id)
        .where(
            inference_lease.c.node_id == node_id,
            inference_lease.c.revoke_at.is_not(None),
            inference_lease.c.released_at.is_(None),
        )
        .distinct()
    )
    return frozenset(unit.select(wanted).scalars())


def _ask(unit: WriteUnit, node_id: str, report: LeaseReport, now: int, random: Random) -> None:
    """Grant what was asked for, or say why not. Whoever held something before a change of server is given the same."""
    (view,) = load.views(unit, now, [node_id])
    picked = _pick(view, report)
    fence = _next_fence(unit, node_id)
    lease_id = new_id(now, random)
    unit.execute(
        insert(inference_lease).values(
            id=lease_id,
            node_id=node_id,
            name=report.id,
            holder=report.holder,
            fence=fence,
            preemptible=report.preemptible,
            notice_s=report.notice_s,
            created_at=now,
            expires_at=now + LIFE_US,
            revoke_at=None,
            refused=picked if isinstance(picked, str) else None,
            released_at=None,
        )
    )
    if isinstance(picked, str):
        return
    claims.changed(unit, node_id)
    unit.insert_rows(
        gpu_slice_claim, [_row(one, number, lease_id, node_id, now) for one in picked for number in range(8)]
    )


def _pick(view: NodeView, report: LeaseReport) -> list[GpuView] | str:
    if view.drain_state != "None" and report.state == "Requested":
        return "the node is being emptied"
    idle = [
        one
        for one in view.gpus
        if one.usable
        and not one.rented
        and not one.leased
        and not one.mig_enabled
        and one.vram >= report.min_vram_bytes
    ]
    if report.gpus:
        asked = [one for one in idle if one.pci_slot in report.gpus]
        return asked if len(asked) == len(set(report.gpus)) else "some of these GPUs are not free"
    return gpu_set(view, idle, report.count) or f"{report.count} GPUs asked for, {len(idle)} are free"


def _row(one: GpuView, number: int, lease_id: str, node_id: str, now: int) -> dict[str, Any]:
    assert number in ALL_SLICES, "a lease has whole GPUs"
    return {
        "gpu_id": one.id,
        "slice": number,
        "owner_id": lease_id,
        "node_id": node_id,
        "instance_id": None,
        "lease_id": lease_id,
        "mig_start": None,
        "created_at": now,
        "released_at": None,
    }


def _next_fence(unit: WriteUnit, node_id: str) -> int:
    unit.execute(update(node).where(node.c.id == node_id).values(next_fence=node.c.next_fence + 1))
    return int(unit.select(select(node.c.next_fence).where(node.c.id == node_id)).scalar_one()) - 1


def _end(unit: WriteUnit, lease_id: str, node_id: str, now: int) -> bool:
    done = unit.execute(
        update(inference_lease)
        .where(inference_lease.c.id == lease_id, inference_lease.c.released_at.is_(None))
        .values(released_at=now)
    )
    unit.execute(
        update(gpu_slice_claim)
        .where(gpu_slice_claim.c.owner_id == lease_id, gpu_slice_claim.c.released_at.is_(None))
        .values(released_at=now)
    )
    claims.changed(unit, node_id)
    return done.rowcount == 1


def _live(unit: ReadUnit, node_id: str) -> list[Any]:
    wanted = select(inference_lease).where(
        inference_lease.c.node_id == node_id, inference_lease.c.released_at.is_(None)
    )
    return list(unit.select(wanted.order_by(inference_lease.c.fence)).all())


def _slots(unit: ReadUnit, lease_ids: Collection[str]) -> dict[str, list[str]]:
    wanted = (
        select(gpu_slice_claim.c.lease_id, gpu.c.pci_slot)
        .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
        .where(gpu_slice_claim.c.owner_id.in_(sorted(lease_ids)))
        .distinct()
        .order_by(gpu.c.pci_slot)
    )
    found: dict[str, list[str]] = {}
    for lease_id, slot in unit.select(wanted):
        found.setdefault(lease_id, []).append(slot)
    return found
