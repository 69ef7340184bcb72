"""An instance as its renter reads it: the answer, and how it is made from rows, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import Field
from sqlalchemy import select

from marketplace.agent.inventory_wire import Inventory
from marketplace.http.wire import Cents, Instant, Wire
from marketplace.instances import secrets
from marketplace.instances.rules import state_of
from marketplace.instances.secrets import Secret
from marketplace.instances.specs import Config
from marketplace.instances.tables import instance_tag
from marketplace.instances.wire import Mask
from marketplace.ledger import rentals
from marketplace.ledger.rentals import Meter
from marketplace.networks import service as networks
from marketplace.networks.service import Joined, Published
from marketplace.nodes.tables import gpu, node
from marketplace.placement.tables import claim, gpu_slice_claim
from marketplace.providers.tables import provider
from marketplace.reservations.tables import reservation
from marketplace.store.db import ReadUnit
from marketplace.store.vault import Vault
from marketplace.users.tables import users
from marketplace.volumes import service as volumes
from marketplace.volumes.service import Mounted


class Duration(Wire):
    """A length of time."""

    secs: int
    nanos: int


class WithUsername(Wire):
    """A name to sign in with."""

    username: str


class WithPassword(Wire):
    """A name and a password to sign in with."""

    username: str
    password: str


class HiddenPassword(Wire):
    """There is a password, which is not shown."""

    of: WithUsername = Field(serialization_alias="HiddenPassword")


class Username(Wire):
    """Signing in takes an SSH key."""

    of: WithUsername = Field(serialization_alias="Username")


class UsernameAndPassword(Wire):
    """The password."""

    of: WithPassword = Field(serialization_alias="UsernameAndPassword")


class VirtualMachineAnswer(Wire):
    """The machine itself."""

    name: str
    state: str
    ready: bool
    memory_usage_kb: int | None
    login_info: HiddenPassword | Username | UsernameAndPassword


class ContainerAnswer(Wire):
    """The container itself."""

    name: str
    image: str
    state: str


class Failure(Wire):
    """Why it failed; the id is what support asks for."""

    id: str
    cause: str
    user_message: str
    occurred_at: Instant


class Cpu(Wire):
    """The processors of its node."""

    brand: str
    physical_core_count: int
    logical_core_count: int


class GpuAnswer(Wire):
    """A GPU that it has."""

    brand_short: str
    vram: int
    pci_slot: str
    gpuvendor_kernel_module_support: str


class MountAnswer(Wire):
    """A volume that it has."""

    volume_id: str
    name: str
    mount_path: str


class ReservationData(Wire):
    """The reservation that it runs on."""

    id: str
    created_at: Instant
    valid_till: Instant | None


class ResourceInfo(Wire):
    """Whose it is and what it costs."""

    provider_name: str
    instance_type: str | None
    cost_per_hour: Cents


class UsageInfo(Wire):
    """Who uses it, for how long, and how much of that is accounted for."""

    user_id: str | None
    user_email: str | None
    user_name: str | None
    usage: Duration
    accounted_usage: Duration


class InstanceAnswer(Wire):
    """An instance."""

    id: str
    instance_name: str
    status: str
    created_at: Instant
    user_id: str | None
    team_id: str | None
    cluster_name: str
    tags: list[str]
    ssh_key_auth: bool
    node_id: str
    node_status: str
    node_mode: str
    billing_exempt: bool
    host_address: str | None
    internal_host_address: str | None
    port_mappings: list[tuple[int, int]]
    virtual_machines: list[VirtualMachineAnswer]
    containers: list[ContainerAnswer]
    instructions: str | None
    failure: Failure | None
    cpu: Cpu | None
    cpu_limit: int
    cpu_mask: str | None
    dram: int
    dram_limit: int
    disk_limit: int
    gpu_limit: int
    gpu_mask: str | None
    mig_profile: str | None
    gpus: list[GpuAnswer]
    volume_mounts: list[MountAnswer]
    reservation_data: ReservationData | None
    resource_info: ResourceInfo
    usage_info: UsageInfo | None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a page of instances is told from, by instance."""

    mask: Mask
    now: int
    secrets: dict[str, Secret]
    tags: dict[str, list[str]]
    ports: dict[str, list[Published]]
    joined: dict[str, Joined]
    mounts: dict[str, list[Mounted]]
    gpus: dict[str, list[Any]]
    cpus: dict[str, list[int]]
    nodes: dict[str, Any]
    hardware: dict[str, Cpu]
    people: dict[str, Any]
    meters: dict[str, Meter]
    reservations: dict[str, Any]


def answers(unit: ReadUnit, vault: Vault, rows: Sequence[Any], mask: Mask, now: int) -> list[InstanceAnswer]:
    """Tell of instances. Secrets are read only where credentials are asked for."""
    if not rows:
        return []
    page = _page(unit, vault, rows, mask, now)
    return [_answer(page, row) for row in rows]


def _page(unit: ReadUnit, vault: Vault, rows: Sequence[Any], mask: Mask, now: int) -> Page:
    ids = sorted(row.id for row in rows)
    places = sorted({row.node_id for row in rows})
    people = sorted({row.user_id for row in rows if row.user_id is not None})
    where = (
        select(node.c.id, node.c.status, node.c.ip_address, provider.c.name.label("provider_name"))
        .join(provider, provider.c.id == node.c.provider_id)
        .where(node.c.id.in_(places))
    )
    who = select(users.c.id, users.c.email, users.c.name).where(users.c.id.in_(people))
    bound = select(reservation).where(reservation.c.instance_id.in_(ids))
    return Page(
        mask=mask,
        now=now,
        secrets=secrets.read(unit, vault, ids) if mask.with_credentials else {},
        tags=_tags(unit, ids),
        ports=networks.ports_of(unit, ids) if mask.with_connection_info else {},
        joined=networks.joined(unit, ids) if mask.with_connection_info else {},
        mounts=volumes.of_instances(unit, ids),
        gpus=_gpus(unit, ids) if mask.with_hardware_info else {},
        cpus=_cpus(unit, ids) if mask.with_hardware_info else {},
        nodes={row.id: row for row in unit.select(where)},
        hardware=_hardware(unit, places) if mask.with_hardware_info else {},
        people={row.id: row for row in unit.select(who)} if mask.with_usage_info else {},
        meters=rentals.of_resources(unit, ids) if mask.with_usage_info else {},
        reservations={row.instance_id: row for row in unit.select(bound)},
    )


def _tags(unit: ReadUnit, ids: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in unit.select(
        select(instance_tag).where(instance_tag.c.instance_id.in_(ids)).order_by(instance_tag.c.tag)
    ):
        found.setdefault(row.instance_id, []).append(row.tag)
    return found


def _gpus(unit: ReadUnit, ids: Sequence[str]) -> dict[str, list[Any]]:
    wanted = (
        select(
            gpu_slice_claim.c.instance_id,
            gpu.c.number,
            gpu.c.brand,
            gpu.c.vram,
            gpu.c.pci_slot,
            gpu.c.kernel_modules,
        )
        .join(gpu, gpu.c.id == gpu_slice_claim.c.gpu_id)
        .where(gpu_slice_claim.c.owner_id.in_(ids))
        .distinct()
        .order_by(gpu.c.number)
    )
    found: dict[str, list[Any]] = {}
    for row in unit.select(wanted):
        found.setdefault(row.instance_id, []).append(row)
    return found


def _cpus(unit: ReadUnit, ids: Sequence[str]) -> dict[str, list[int]]:
    found = {}
    for instance_id, text in unit.select(select(claim.c.instance_id, claim.c.cpus).where(claim.c.instance_id.in_(ids))):
        cpus = msgspec.json.decode(text, type=dict[int, list[int]])
        found[instance_id] = [thread for threads in cpus.values() for thread in threads]
    return found


def _hardware(unit: ReadUnit, places: Sequence[str]) -> dict[str, Cpu]:
    found = {}
    for node_id, text in unit.select(select(node.c.id, node.c.inventory).where(node.c.id.in_(places))):
        found[node_id] = cpu_answer(msgspec.json.decode(text, type=Inventory))
    return found


def cpu_answer(inventory: Inventory) -> Cpu:
    """The processors of a node."""
    threads = inventory.cpu.threads
    return Cpu(
        brand=inventory.cpu.brand,
        physical_core_count=len({(one.package, one.core) for one in threads}),
        logical_core_count=len(threads),
    )


def mask_of(numbers: Sequence[int]) -> str:
    """A set of numbers as a hexadecimal mask."""
    return f"{sum(1 << number for number in set(numbers)):x}"


def _answer(page: Page, row: Any) -> InstanceAnswer:
    place, mask = page.nodes[row.node_id], page.mask
    bound = page.reservations.get(row.id)
    gpus, cpus = page.gpus.get(row.id, []), page.cpus.get(row.id, [])
    host, inner, ports = _connection(page, row, place)
    return InstanceAnswer(
        id=row.id,
        instance_name=row.name,
        status=row.status,
        created_at=row.created_at,
        user_id=row.user_id,
        team_id=row.team_id,
        cluster_name=row.cluster_name,
        tags=page.tags.get(row.id, []),
        ssh_key_auth=row.ssh_key_auth,
        node_id=row.node_id,
        node_status=place.status,
        node_mode=row.kind,
        billing_exempt=row.billing_exempt,
        host_address=host,
        internal_host_address=inner,
        port_mappings=ports,
        virtual_machines=[_machine(page, row)] if row.kind == "VirtualMachine" else [],
        containers=[_container(row)] if row.kind == "Container" else [],
        instructions=_instructions(page, row, host, ports),
        failure=_failure(row),
        cpu=page.hardware.get(row.node_id),
        cpu_limit=row.vcpu,
        cpu_mask=mask_of(cpus) if mask.with_hardware_info else None,
        dram=row.dram,
        dram_limit=row.dram,
        disk_limit=row.disk,
        gpu_limit=row.gpu_count,
        gpu_mask=mask_of([one.number for one in gpus]) if mask.with_hardware_info else None,
        mig_profile=row.mig_profile,
        gpus=[
            GpuAnswer(
                brand_short=one.brand,
                vram=one.vram,
                pci_slot=one.pci_slot,
                gpuvendor_kernel_module_support=one.kernel_modules,
            )
            for one in gpus
        ],
        volume_mounts=[
            MountAnswer(volume_id=one.id, name=one.name, mount_path=one.mount_path)
            for one in page.mounts.get(row.id, [])
        ],
        reservation_data=None
        if bound is None
        else ReservationData(id=bound.id, created_at=bound.created_at, valid_till=bound.valid_till),
        resource_info=ResourceInfo(
            provider_name=place.provider_name, instance_type=row.variant, cost_per_hour=row.cost_per_hour
        ),
        usage_info=_usage(page, row) if mask.with_usage_info else None,
    )


def _connection(page: Page, row: Any, place: Any) -> tuple[str | None, str | None, list[tuple[int, int]]]:
    if not page.mask.with_connection_info:
        return None, None, []
    ports, joined = page.ports.get(row.id, []), page.joined.get(row.id)
    inside = [str(one) for one in msgspec.json.decode(row.addresses)]
    host = place.ip_address or None
    if ports:
        host = ports[0].gateway_ip
    elif joined is not None:
        host = joined.external_ip or joined.ip
    inner = joined.ip if joined is not None else (inside[0] if inside else None)
    return host, inner, [(one.guest, one.host) for one in ports]


def _machine(page: Page, row: Any) -> VirtualMachineAnswer:
    settled = row.gen_applied == row.gen
    state = state_of(row.power, row.want, settled=settled) if row.power else "NoState"
    return VirtualMachineAnswer(
        name=f"i-{row.id[:8]}",
        state=state,
        ready=row.ready_at is not None,
        memory_usage_kb=row.memory_kb,
        login_info=_login(page, row),
    )


def _login(page: Page, row: Any) -> HiddenPassword | Username | UsernameAndPassword:
    if not row.has_password:
        return Username(of=WithUsername(username=row.username))
    secret = page.secrets.get(row.id)
    if secret is None or secret.password is None:
        return HiddenPassword(of=WithUsername(username=row.username))
    return UsernameAndPassword(of=WithPassword(username=row.username, password=secret.password))


def _container(row: Any) -> ContainerAnswer:
    config = msgspec.json.decode(row.config, type=Config)
    return ContainerAnswer(name=f"i-{row.id[:8]}", image=config.image, state=row.power or "Created")


def _instructions(page: Page, row: Any, host: str | None, ports: list[tuple[int, int]]) -> str | None:
    """How to get in. It holds the password, so it is there only where credentials are asked for."""
    outside = dict(ports).get(22)
    if not page.mask.with_credentials or row.kind != "VirtualMachine" or host is None or outside is None:
        return None
    secret = page.secrets.get(row.id)
    text = f"ssh -p {outside} {row.username}@{host}"
    return text if secret is None or secret.password is None else f"{text}\nPassword: {secret.password}"


def _failure(row: Any) -> Failure | None:
    if row.failure_id is None:
        return None
    return Failure(
        id=row.failure_id, cause=row.failure_cause, user_message=row.failure_message, occurred_at=row.failed_at
    )


def _usage(page: Page, row: Any) -> UsageInfo:
    meter, who = page.meters.get(row.id), page.people.get(row.user_id)
    used = accounted = 0
    if meter is not None:
        accounted = meter.metered_to - meter.started_at
        used = accounted if meter.stopped_at is not None else max(accounted, page.now - meter.started_at)
    return UsageInfo(
        user_id=row.user_id,
        user_email=None if who is None else who.email,
        user_name=None if who is None else who.name,
        usage=duration(used),
        accounted_usage=duration(accounted),
    )


def duration(microseconds: int) -> Duration:
    """A length of time on the wire."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return Duration(secs=seconds, nanos=rest * 1000)
