"""What a node is told to make: the desired state of all its instances, from their rows."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import or_, select

from marketplace.agent.wire import (
    ContainerSpec,
    Desired,
    DesiredInstance,
    Network,
    NumaSlice,
    Port,
    RegistryAuth,
    Spec,
    VmSpec,
    Volume,
)
from marketplace.environments import service as environments
from marketplace.instances import secrets
from marketplace.instances.life import PUBLIC
from marketplace.instances.secrets import Secret
from marketplace.instances.tables import instance
from marketplace.networks import service as networks
from marketplace.networks.service import Joined, Published
from marketplace.nodes.tables import gpu
from marketplace.placement import leases
from marketplace.placement.tables import claim, gpu_slice_claim
from marketplace.recipes import service as recipes
from marketplace.relay import granting
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit
from marketplace.store.vault import Vault
from marketplace.volumes import service as volumes
from marketplace.volumes.service import Mounted

GB = 10**9
_EVERYWHERE = "0.0.0.0"
_LOOPBACK = "127.0.0.1"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance was asked to be, without anything secret: its column `config`."""

    image: str = ""
    image_path: str | None = None
    ssh_keys: list[str] = []
    recipe: str | None = None
    erase_after_s: int | None = None


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one instance that its specification is made from."""

    row: Any
    config: Config
    secret: Secret
    gpus: list[str]
    numa: list[NumaSlice]
    ports: list[Published]
    relays: frozenset[str]
    """addresses at which relays publish ports"""
    network: Joined | None
    volumes: list[Mounted]


def desired(unit: ReadUnit, vault: Vault, node_id: str) -> Desired:
    """Return all that a node should do. What still waits for an engine to leave its GPUs is not begun."""
    live = instance.c.ended_at.is_(None)
    zombie = instance.c.id.in_(
        select(claim.c.instance_id).where(claim.c.node_id == node_id, claim.c.zombie, claim.c.released_at.is_(None))
    )
    wanted = select(*PUBLIC).where(instance.c.node_id == node_id, or_(live, zombie)).order_by(instance.c.created_at)
    rows = unit.select(wanted).all()
    leaving = leases.being_left(unit, node_id)
    parts = _parts(unit, vault, rows)
    held = _slices(unit, node_id)
    disabled = select(gpu.c.pci_slot).where(gpu.c.node_id == node_id, gpu.c.enabled.is_(False)).order_by(gpu.c.pci_slot)
    return Desired(
        instances=[
            _desired(one)
            for one in parts
            if not (leaving & held.get(one.row.id, set()) and one.row.gen_applied == 0 and one.row.want != "Absent")
        ],
        images=recipes.images_for(unit, node_id, by_tag=settings.current(unit).filter_vm_images_by_tag),
        disabled_gpus=list(unit.select(disabled).scalars()),
        leases=leases.grants(unit, node_id),
        erased_volumes=volumes.erasing(unit, node_id),
        erased_disks=environments.erasing(unit, node_id),
        relayed=granting.home_of(unit, node_id) is not None,
    )


def _desired(parts: Parts) -> DesiredInstance:
    row = parts.row
    return DesiredInstance(
        id=row.id,
        gen=row.gen,
        want=row.want,
        reset_seq=row.reset_seq,
        spec=spec(parts),
        erase_after_s=row.erase_after_s,
    )


def spec(parts: Parts) -> Spec:
    """What the node needs to make it."""
    row, config, secret = parts.row, parts.config, parts.secret
    ports = [_port(one, parts.relays) for one in parts.ports]
    disks = [Volume(id=one.id, size_bytes=one.size_gb * GB, mount_path=one.mount_path) for one in parts.volumes]
    if row.kind == "Container":
        login = secret.registry_username
        return ContainerSpec(
            name=row.name,
            image=config.image,
            command=secret.command,
            env=secret.env,
            ports=ports,
            vcpu=row.vcpu,
            dram_bytes=row.dram,
            disk_bytes=row.disk,
            gpus=parts.gpus,
            cpus=sorted(thread for one in parts.numa for thread in one.cpus) or None,
            registry_auth=None if login is None else RegistryAuth(login, secret.registry_password or ""),
            volumes=disks,
        )
    return VmSpec(
        name=row.name,
        vcpu=row.vcpu,
        dram_bytes=row.dram,
        disk_bytes=row.disk,
        image_url=config.image or None,
        image_path=config.image_path,
        user_data=secret.user_data,
        ssh_keys=config.ssh_keys,
        username=row.username,
        password=secret.password,
        ports=ports,
        gpus=parts.gpus,
        numa=parts.numa or None,
        network=None if parts.network is None else _network(parts.network),
        volumes=disks,
        readiness_token=secret.token,
        reuse_environment_id=row.reuse_environment_id,
    )


def _port(one: Published, relays: frozenset[str]) -> Port:
    """Where the node publishes a port: for a relay on its own loopback address, else on all of its addresses."""
    at = _LOOPBACK if one.gateway_ip in relays else _EVERYWHERE
    return Port(one.guest, one.host, "udp" if one.proto == "udp" else "tcp", at)


def _network(joined: Joined) -> Network:
    proxy = joined.proxy
    return Network(
        ip=joined.ip,
        netmask=str(joined.netmask),
        gateway=joined.gateway,
        interface=joined.iface,
        http_proxy=None if proxy is None else proxy.http_proxy,
        https_proxy=None if proxy is None else proxy.https_proxy,
        no_proxy=[] if proxy is None else [*proxy.no_proxy, *proxy.docker_no_proxy, *proxy.curl_no_proxy],
    )


def _parts(unit: ReadUnit, vault: Vault, rows: Any) -> list[Parts]:
    ids = [row.id for row in rows]
    if not ids:
        return []
    sealed = secrets.read(unit, vault, ids)
    ports = networks.ports_of(unit, ids)
    relays = granting.hosts(unit)
    joined = networks.joined(unit, ids)
    mounted = volumes.of_instances(unit, ids)
    gpus = _gpus(unit, ids)
    numa = _numa(unit, ids)
    return [
        Parts(
            row=row,
            config=msgspec.json.decode(row.config, type=Config),
            secret=sealed.get(row.id, Secret()),
            gpus=[name[0 if row.kind == "VirtualMachine" else 1] for name in gpus.get(row.id, [])],
            numa=numa.get(row.id, []),
            ports=ports.get(row.id, []),
            relays=relays,
            network=joined.get(row.id),
            volumes=mounted.get(row.id, []),
        )
        for row in rows
    ]


def _gpus(unit: ReadUnit, ids: list[str]) -> dict[str, list[tuple[str, str]]]:
    """PCI slots and UUIDs of what instances have, by instance; a MIG instance is named by its GPU, where it
    begins and its profile: its node makes it, and knows what it is called."""
    wanted = (
        select(
            gpu_slice_claim.c.instance_id,
            gpu.c.pci_slot,
            gpu.c.uuid,
            gpu_slice_claim.c.mig_start,
            instance.c.mig_profile,
        )
        .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
        .join(instance, instance.c.id == gpu_slice_claim.c.instance_id)
        .where(gpu_slice_claim.c.owner_id.in_(ids))
        .distinct()
        .order_by(gpu.c.pci_slot, gpu_slice_claim.c.mig_start)
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for instance_id, slot, uuid, start, profile in unit.select(wanted):
        whole = uuid or slot
        found.setdefault(instance_id, []).append((slot, whole if start is None else f"{whole}/{start}/{profile}"))
    return found


def _numa(unit: ReadUnit, ids: list[str]) -> dict[str, list[NumaSlice]]:
    wanted = select(claim.c.instance_id, claim.c.cpus, claim.c.hugepages).where(claim.c.instance_id.in_(ids))
    found = {}
    for instance_id, cpus_text, pages_text in unit.select(wanted):
        cpus = msgspec.json.decode(cpus_text, type=dict[int, list[int]])
        pages = msgspec.json.decode(pages_text, type=dict[int, int])
        found[instance_id] = [
            NumaSlice(numa, cpus.get(numa, []), pages.get(numa, 0)) for numa in sorted({*cpus, *pages})
        ]
    return found


def _slices(unit: ReadUnit, node_id: str) -> dict[str, set[str]]:
    wanted = (
        select(gpu_slice_claim.c.instance_id, gpu_slice_claim.c.gpu_id)
        .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
        .where(
            gpu.c.node_id == node_id,
            gpu_slice_claim.c.instance_id.is_not(None),
            gpu_slice_claim.c.released_at.is_(None),
        )
    )
    found: dict[str, set[str]] = {}
    for instance_id, gpu_id in unit.select(wanted.distinct()):
        found.setdefault(instance_id, set()).add(gpu_id)
    return found
