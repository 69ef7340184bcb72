"""What the server answers to nodes: each function is one message of the protocol, in one transaction."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec
from sqlalchemy import delete, select, update

from marketplace.agent.wire import (
    Event,
    Metrics,
    Poll,
    Polled,
    Ready,
    Register,
    Registered,
    Sample,
    Settings,
)
from marketplace.events.transitions import Scene, happened
from marketplace.instances import life, observe, specs
from marketplace.instances.life import PUBLIC
from marketplace.instances.tables import instance
from marketplace.nodes import commands
from marketplace.nodes import service as nodes
from marketplace.nodes.rules import SILENT_US
from marketplace.nodes.tables import gpu_sample, instance_sample, node
from marketplace.placement import leases
from marketplace.relay import granting
from marketplace.relay.access import RelayAnswer, Relaying
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.vault import Vault
from marketplace.volumes import service as volumes

SECOND = 1_000_000
POLL_WAIT_S = 20
SAMPLES_US = 3600 * SECOND
"""How long measurements of GPUs are kept."""


TOLD = {"DiskFull": "instances.disk_full", "GpuLost": "instances.gpu_lost"}
"""What of a node's events renters are told, and as what."""


class UnknownInstanceError(LookupError):
    """The provider has no such instance on a node, or the token is not its own."""


class Taken(msgspec.Struct, frozen=True):
    """A poll that was taken: whose node it is, and what of it needs an answer at once."""

    node_id: str
    unknown: list[str]
    want_observed: bool


def register(unit: WriteUnit, vault: Vault, provider_id: str, asked: Register, scene: Scene) -> Registered:
    """Begin a session. ForeignMachineError."""
    row = nodes.register(unit, provider_id, asked, scene)
    if asked.observed is not None:
        observe.take(unit, row, asked.observed, scene, up_to_date=False)
        row = nodes.find(unit, row.id)
    app = settings.current(unit)
    grace = app.erase_grace_period if row.erase_grace_s is None else row.erase_grace_s
    return Registered(
        node_id=row.id,
        session_id=row.session_id,
        epoch=row.epoch,
        lease_s=SILENT_US // SECOND,
        poll_wait_s=POLL_WAIT_S,
        settings=Settings(
            erase_grace_s=grace,
            erase_stray_grace_s=app.erase_stray_grace_period,
            readiness_timeout_s=app.vm_readiness_timeout,
            image_timeout_s=app.image_download_timeout,
        ),
        desired=specs.desired(unit, vault, row.id),
        desired_rev=row.desired_rev,
        server_time=scene.now,
    )


def poll(unit: WriteUnit, provider_id: str, told: Poll, scene: Scene) -> Taken:
    """Take what a node reports. StaleSessionError."""
    row = nodes.of_session(unit, provider_id, told.session_id, told.epoch)
    nodes.heard(unit, row, scene)
    if told.hibernated != row.hibernated:
        unit.execute(update(node).where(node.c.id == row.id).values(hibernated=told.hibernated))
    if told.inventory is not None:
        nodes.take_inventory(unit, row.id, told.inventory)
    _tell_renters(unit, row.id, nodes.keep_events(unit, row.id, told.events), scene)
    commands.settle(unit, row, told.command_results, scene)
    if leases.sync(unit, row.id, told.leases, scene.now, scene.random):
        nodes.touch(unit, row.id)
    unknown, want = _take_observed(unit, row, told, scene)
    return Taken(row.id, unknown, want)


def _tell_renters(unit: WriteUnit, node_id: str, fresh: list[Event], scene: Scene) -> None:
    """What happened to a machine is its renter's matter, too."""
    about = {one.instance_id: one for one in fresh if one.kind in TOLD and one.instance_id is not None}
    if not about:
        return
    wanted = select(*PUBLIC).where(instance.c.node_id == node_id, instance.c.id.in_(sorted(about)))
    for row in unit.select(wanted.order_by(instance.c.id)):
        one = about[row.id]
        told = {"message": one.message[:1000]}
        happened(unit, TOLD[one.kind], row.id, scene, owner_id=life.owner_of(row), detail=told)


def _take_observed(unit: WriteUnit, row: Any, told: Poll, scene: Scene) -> tuple[list[str], bool]:
    up_to_date = told.applied_rev == row.desired_rev
    if up_to_date:
        volumes.erased(unit, row.id, scene)
    if told.observed is not None:
        unknown = observe.take(unit, row, told.observed, scene, up_to_date=up_to_date)
        unit.execute(update(node).where(node.c.id == row.id).values(observed_digest=told.observed_digest))
        return unknown, False
    if not told.observed_digest:
        return [], False  # its machines could not be listed: nothing is known, nothing is gone
    if told.observed_digest != row.observed_digest:
        return [], True
    observe.again(unit, row, scene, up_to_date=up_to_date)
    return [], False


def answer(unit: ReadUnit, vault: Vault, provider_id: str, told: Poll, taken: Taken, now: int) -> Polled:
    """What is new for a node. StaleSessionError."""
    row = nodes.of_session(unit, provider_id, told.session_id, told.epoch)
    fresh = row.desired_rev != told.applied_rev
    return Polled(
        desired_rev=row.desired_rev,
        desired=specs.desired(unit, vault, row.id) if fresh else None,
        commands=commands.waiting(unit, row.id, told.commands),
        unknown=taken.unknown,
        want_observed=taken.want_observed,
        server_time=now,
    )


def news(answered: Polled) -> bool:
    """Whether an answer tells anything, or whether the node may rather wait."""
    return bool(answered.desired is not None or answered.commands or answered.unknown or answered.want_observed)


def relay(unit: ReadUnit, vault: Vault, provider_id: str, told: Relaying, now: int) -> RelayAnswer:
    """What a node may publish at its relay. StaleSessionError."""
    return RelayAnswer(
        granting.grant(unit, vault, nodes.of_session(unit, provider_id, told.session_id, told.epoch), now)
    )


def ready(unit: WriteUnit, provider_id: str, told: Ready, scene: Scene) -> None:
    """Take the word of an instance that it is ready: repeated, it changes nothing. UnknownInstanceError."""
    known = unit.select(
        select(instance.c.node_id, instance.c.readiness_digest).where(
            instance.c.id == told.instance_id, instance.c.provider_id == provider_id
        )
    ).one_or_none()
    said = hashlib.sha256(told.token.encode()).digest()
    if known is None or known.readiness_digest is None or not hmac.compare_digest(said, known.readiness_digest):
        raise UnknownInstanceError(told.instance_id)
    (row,) = life.lock(unit, {told.instance_id: known.node_id})
    if row.status == "Initializing":
        life.activate(unit, row, scene)


def leave(unit: WriteUnit, provider_id: str, session_id: str, scene: Scene) -> None:
    """The agent goes, in an orderly way. StaleSessionError."""
    nodes.leave(unit, nodes.of_session(unit, provider_id, session_id, None), scene)


def metrics(unit: WriteUnit, provider_id: str, told: Metrics, now: int) -> None:
    """Keep measurements: of GPUs for an hour, of instances and volumes the latest. StaleSessionError."""
    row = nodes.of_session(unit, provider_id, told.session_id, None)
    mine = set(
        unit.select(select(instance.c.id).where(instance.c.node_id == row.id, instance.c.ended_at.is_(None))).scalars()
    )
    for sample in told.samples[-200:]:
        _keep_gpus(unit, row.id, sample)
        if sample.instance_id in mine:
            _keep_instance(unit, row.id, sample)
    if told.volumes is not None:
        volumes.measured(unit, row.id, {one.id: one.used_bytes for one in told.volumes})
    unit.execute(delete(gpu_sample).where(gpu_sample.c.node_id == row.id, gpu_sample.c.at < now - SAMPLES_US))


def _keep_gpus(unit: WriteUnit, node_id: str, sample: Sample) -> None:
    rows = [
        {
            "node_id": node_id,
            "at": sample.at,
            "pci_slot": one.pci_slot,
            "uuid": one.uuid or "",
            "utilization": one.utilization,
            "temperature": one.temperature,
            "vram_used": one.vram_used_bytes,
            "vram_total": one.vram_total_bytes,
            "power": one.power_watts,
        }
        for one in sample.gpus
    ]
    unit.insert_missing(gpu_sample, rows)


def _keep_instance(unit: WriteUnit, node_id: str, sample: Sample) -> None:
    values = {
        "at": sample.at,
        "node_id": node_id,
        "cpu_us": None if sample.cpu_seconds is None else round(sample.cpu_seconds * SECOND),
        "memory": sample.memory_bytes,
    }
    unit.insert_missing(instance_sample, [{"instance_id": sample.instance_id, **values}])
    unit.execute(
        update(instance_sample)
        .where(instance_sample.c.instance_id == sample.instance_id, instance_sample.c.at < sample.at)
        .values(**values)
    )
    if sample.memory_bytes is not None:
        kilobytes = sample.memory_bytes // 1024
        unit.execute(update(instance).where(instance.c.id == sample.instance_id).values(memory_kb=kilobytes))
