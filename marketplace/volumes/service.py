"""Volumes and the instances that they are attached to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import insert, select, update

from marketplace.events.transitions import Scene, transition
from marketplace.instances.tables import instance
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.volumes.rules import MACHINE
from marketplace.volumes.tables import volume, volume_attachment


class UnknownVolumeError(LookupError):
    """The account has no such volume."""


class VolumeBusyError(Exception):
    """The volume is attached, on another node, or not ready."""


class OtherKindError(Exception):
    """What is on the volume was written by the other kind of machine."""


class Mounted(msgspec.Struct, frozen=True):
    """A volume as an instance has it."""

    id: str
    name: str
    size_gb: int
    mount_path: str


def home_of(unit: ReadUnit, account_id: str, volume_ids: Collection[str]) -> tuple[frozenset[str], str | None]:
    """Return the datacenters that these volumes are in, and the node that has their files, if any has. Raises
    UnknownVolumeError."""
    wanted = select(volume.c.id, volume.c.datacenter_id, volume.c.node_id).where(
        volume.c.account_id == account_id, volume.c.id.in_(sorted(volume_ids)), volume.c.status != "Deleted"
    )
    rows = unit.select(wanted).all()
    if len(rows) != len(set(volume_ids)):
        raise UnknownVolumeError("the account has no such volume")
    nodes = sorted({row.node_id for row in rows if row.node_id is not None})
    if len(nodes) > 1:
        raise VolumeBusyError("the volumes are on different nodes")
    return frozenset(row.datacenter_id for row in rows), nodes[0] if nodes else None


def attach(
    unit: WriteUnit,
    instance_id: str,
    node_id: str,
    account_id: str,
    mounts: Sequence[tuple[str, str]],
    scene: Scene,
    *,
    owner_id: str,
) -> None:
    """Attach volumes of an account, given as (id, mount path), to a new instance. UnknownVolumeError, VolumeBusyError,
    OtherKindError."""
    for volume_id, path in mounts:
        mine = (volume.c.id == volume_id, volume.c.account_id == account_id)
        row = unit.select(select(volume.c.status, volume.c.node_id).where(*mine).with_for_update()).one_or_none()
        if row is None:
            raise UnknownVolumeError("the account has no such volume")
        if row.status != "Available" or row.node_id not in (None, node_id):
            raise VolumeBusyError(f"the volume is {row.status}")
        _check_kind(unit, volume_id, instance_id)
        moved = {"node_id": node_id, "updated_at": scene.now}
        transition(unit, MACHINE, volume_id, row.status, "attach", scene, owner_id=owner_id, values=moved)
        unit.execute(
            insert(volume_attachment).values(
                volume_id=volume_id, instance_id=instance_id, mount_path=path, attached_at=scene.now, detached_at=None
            )
        )


def _check_kind(unit: WriteUnit, volume_id: str, instance_id: str) -> None:
    """OtherKindError. For a virtual machine a volume is a disk, for a container a folder: neither sees what is on the
    other, and would take the volume for empty."""
    kind = unit.select(select(instance.c.kind).where(instance.c.id == instance_id)).scalar_one()
    used = (
        select(instance.c.kind)
        .join(volume_attachment, volume_attachment.c.instance_id == instance.c.id)
        .where(volume_attachment.c.volume_id == volume_id, instance.c.started_at.is_not(None), instance.c.kind != kind)
    )
    if unit.select(used.limit(1)).one_or_none() is not None:
        other = "containers" if kind == "VirtualMachine" else "virtual machines"
        raise OtherKindError(f"what is on the volume can be read by {other} alone")


def of_instances(unit: ReadUnit, instance_ids: Collection[str]) -> dict[str, list[Mounted]]:
    """Return the volumes that are attached to instances, by instance."""
    wanted = (
        select(
            volume_attachment.c.instance_id,
            volume.c.id,
            volume.c.name,
            volume.c.size_gb,
            volume_attachment.c.mount_path,
        )
        .join(volume, volume.c.id == volume_attachment.c.volume_id)
        .where(volume_attachment.c.instance_id.in_(sorted(instance_ids)), volume_attachment.c.detached_at.is_(None))
        .order_by(volume_attachment.c.mount_path)
    )
    found: dict[str, list[Mounted]] = {}
    for instance_id, *rest in unit.select(wanted):
        found.setdefault(instance_id, []).append(Mounted(*rest))
    return found


def on_over(unit: WriteUnit, instance_id: str, scene: Scene, *, owner_id: str) -> None:
    """Detach what an instance that is over had."""
    for mounted in of_instances(unit, [instance_id]).get(instance_id, []):
        moved = {"updated_at": scene.now}
        transition(unit, MACHINE, mounted.id, "Attached", "detach", scene, owner_id=owner_id, values=moved)
    unit.execute(
        update(volume_attachment)
        .where(volume_attachment.c.instance_id == instance_id, volume_attachment.c.detached_at.is_(None))
        .values(detached_at=scene.now)
    )


def measured(unit: WriteUnit, node_id: str, told: Mapping[str, int]) -> None:
    """Keep what volumes take of a node's disk, in bytes; those that are not on this node stay as they are."""
    here = select(volume.c.id, volume.c.disk_usage).where(volume.c.node_id == node_id, volume.c.status != "Deleted")
    for volume_id, known in unit.select(here.order_by(volume.c.id)).all():
        used = told.get(volume_id, 0)
        if used != known:
            unit.execute(update(volume).where(volume.c.id == volume_id).values(disk_usage=used))


def erasing(unit: ReadUnit, node_id: str) -> list[str]:
    """Return the volumes whose files a node is to remove."""
    wanted = select(volume.c.id).where(volume.c.node_id == node_id, volume.c.status == "Deleting")
    return sorted(unit.select(wanted).scalars())


def erased(unit: WriteUnit, node_id: str, scene: Scene) -> None:
    """A node has done everything that it was asked to: the files of volumes that are being deleted are gone."""
    for volume_id in erasing(unit, node_id):
        row = unit.select(select(volume).where(volume.c.id == volume_id).with_for_update()).one()
        if row.status == "Deleting":
            values = {"deleted_at": scene.now, "updated_at": scene.now}
            owner = row.team_id or row.user_id or row.account_id
            transition(unit, MACHINE, volume_id, "Deleting", "deleted", scene, owner_id=owner, values=values)
