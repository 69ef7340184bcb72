"""Claims: rows that say what of a node an instance has. They are taken together, under the node's generation, and
released together; a claim whose instance is over while its node is silent stays as a zombie, and still counts."""

from __future__ import annotations

import msgspec
from sqlalchemy import bindparam, select, update

from marketplace.nodes.tables import node
from marketplace.placement.choose import Placement
from marketplace.placement.tables import claim, cpu_claim, gpu_slice_claim, inference_lease
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.prepared import Prepared

_SEIZE = Prepared(
    update(node)
    .where(
        node.c.id == bindparam("node"),
        node.c.generation == bindparam("seen"),
        node.c.drain_state == "None",
        node.c.status == "Ready",
        node.c.hibernated.is_(False),
        node.c.deleted_at.is_(None),
    )
    .values(generation=node.c.generation + 1, desired_rev=node.c.desired_rev + 1)
)

_QUEUE = Prepared(select(node.c.id).where(node.c.id == bindparam("node")).with_for_update())


def seize(unit: WriteUnit, node_id: str, generation: int) -> bool:
    """Raise the node's generation from the one that was looked at, and the revision of what it should do. False, and
    nothing is done, when it is another by now, or when the node takes nothing new any more. Until the unit ends nobody
    else can."""
    return unit.change(_SEIZE, {"node": node_id, "seen": generation}) == 1


def queue(unit: WriteUnit, node_id: str) -> None:
    """Wait for whoever claims something on a node, and hold its row until the unit ends."""
    unit.rows(_QUEUE, {"node": node_id})


def changed(unit: WriteUnit, node_id: str) -> None:
    """Raise the node's generation: whoever placed on what it was looks again."""
    unit.execute(update(node).where(node.c.id == node_id).values(generation=node.c.generation + 1))


def take(unit: WriteUnit, instance_id: str, placed: Placement, now: int, *, cpu_policy: str) -> None:
    """Write the claims of an instance that has a row. The caller has raised the node's generation, and reclaimed what
    inference has of it."""
    unit.insert_rows(
        claim,
        [
            {
                "instance_id": instance_id,
                "node_id": placed.node.id,
                "gpus": placed.amount.gpu,
                "threads": placed.amount.threads,
                "dram": placed.amount.dram,
                "disk": placed.amount.disk,
                "cpu_policy": cpu_policy,
                "hugepages": _json(placed.hugepages),
                "cpus": _json(placed.cpus),
                "quota_id": placed.quota_id,
                "zombie": False,
                "created_at": now,
                "released_at": None,
            }
        ],
    )
    unit.insert_rows(
        gpu_slice_claim,
        [
            {
                "gpu_id": part.gpu.id,
                "slice": number,
                "owner_id": instance_id,
                "node_id": placed.node.id,
                "instance_id": instance_id,
                "lease_id": None,
                "mig_start": part.start,
                "created_at": now,
                "released_at": None,
            }
            for part in placed.slices
            for number in part.slices
        ],
    )
    unit.insert_rows(
        cpu_claim,
        [
            {"instance_id": instance_id, "thread": thread, "node_id": placed.node.id, "released_at": None}
            for threads in placed.cpus.values()
            for thread in threads
        ],
    )


def reclaim(unit: WriteUnit, placed: Placement, now: int) -> None:
    """Take the GPUs of a placement from the inference leases that have them: a whole lease at a time, because its
    engine ends as a whole. Each is told when it must be gone; the node starts nothing on its GPUs before it is."""
    taken = [part.gpu.id for part in placed.slices if part.gpu.leased]
    if not taken:
        return
    holding = (
        select(gpu_slice_claim.c.lease_id)
        .where(
            gpu_slice_claim.c.gpu_id.in_(taken),
            gpu_slice_claim.c.lease_id.is_not(None),
            gpu_slice_claim.c.released_at.is_(None),
        )
        .distinct()
    )
    for lease_id in sorted(unit.select(holding).scalars()):
        unit.execute(
            update(gpu_slice_claim)
            .where(gpu_slice_claim.c.owner_id == lease_id, gpu_slice_claim.c.released_at.is_(None))
            .values(released_at=now)
        )
        unit.execute(
            update(inference_lease)
            .where(inference_lease.c.id == lease_id, inference_lease.c.revoke_at.is_(None))
            .values(revoke_at=now + inference_lease.c.notice_s * 1_000_000)
        )


def release(unit: WriteUnit, instance_id: str, now: int) -> bool:
    """Give back everything that an instance has; says whether it had anything. Safe to repeat."""
    node_id = unit.select(
        select(claim.c.node_id).where(claim.c.instance_id == instance_id, claim.c.released_at.is_(None))
    ).scalar_one_or_none()
    if node_id is None:
        return False
    changed(unit, node_id)
    for table, owner in (
        (gpu_slice_claim, gpu_slice_claim.c.owner_id),
        (cpu_claim, cpu_claim.c.instance_id),
        (claim, claim.c.instance_id),
    ):
        mine = (owner == instance_id, table.c.released_at.is_(None))
        unit.execute(update(table).where(*mine).values(released_at=now))
    return True


def orphan(unit: WriteUnit, instance_id: str) -> None:
    """Mark the claim of an instance that is over while its node is silent: the machine may still be there."""
    unit.execute(
        update(claim).where(claim.c.instance_id == instance_id, claim.c.released_at.is_(None)).values(zombie=True)
    )


def zombies(unit: ReadUnit, node_id: str) -> list[str]:
    """Return the instances of a node that are over, whose claims wait for its word."""
    wanted = select(claim.c.instance_id).where(
        claim.c.node_id == node_id, claim.c.zombie, claim.c.released_at.is_(None)
    )
    return sorted(unit.select(wanted).scalars())


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
