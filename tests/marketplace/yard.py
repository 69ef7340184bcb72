"""Nodes and what runs on them, written by hand: for tests of what stands beside renting."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from marketplace.agent.inventory_wire import Cpu, Disk, Gpu, Inventory, NumaNode, Thread
from marketplace.agent.wire import Capabilities, Register
from marketplace.catalog.tables import instance_type, instance_variant
from marketplace.events.transitions import SYSTEM, Scene, begun, transition
from marketplace.instances.rules import MACHINE
from marketplace.instances.tables import instance
from marketplace.ledger import rentals
from marketplace.ledger.money import NANO
from marketplace.ledger.rentals import Meter
from marketplace.nodes import service as nodes
from marketplace.nodes.tables import node
from marketplace.placement import claims
from marketplace.placement.capacity import GIB
from marketplace.placement.choose import Placement, Wanted
from marketplace.placement.place import place
from marketplace.providers import service as providers
from marketplace.store.db import WriteUnit
from marketplace.store.ids import new_id
from tests.marketplace.office import Caller, Office

GPUS, THREADS, MEMORY, DISK = 8, 32, 256 * GIB, 4096 * GIB
COST = 360 * NANO
"""Nano-units an hour: a tenth of a unit each second."""
SHARE = 8000


def inventory(name: str, gpus: int = GPUS, *, disk: int = DISK) -> Inventory:
    """Hardware without pages, so that memory is counted in bytes."""
    return Inventory(
        hostname=name,
        ip="198.51.100.7",
        cpu=Cpu(
            brand="EPYC 9654",
            architecture="x86_64",
            threads=[Thread(cpu, cpu // 2, 0, 0) for cpu in range(THREADS)],
        ),
        memory_bytes=MEMORY,
        numa=[NumaNode(node=0, memory_bytes=MEMORY)],
        gpus=[
            Gpu(
                pci_slot=f"0000:{number:02x}:00.0",
                vendor_id=0x10DE,
                device_id=0x2335,
                uuid=f"GPU-{name}-{number}",
                brand="H200",
                architecture="Hopper",
                vram_bytes=141 * GIB,
            )
            for number in range(1, gpus + 1)
        ],
        disk=Disk(path="/var/lib/headrace", total_bytes=disk, free_bytes=disk),
    )


class Yard:
    """Nodes of one provider in an office, and what runs on them."""

    def __init__(self, office: Office) -> None:
        self.office = office
        with office.database.write() as unit:
            found = providers.find_by_name(unit, "acme")
            self.provider = found or providers.create(unit, name="acme", now=office.clock(), random=office.random)

    def scene(self) -> Scene:
        """The platform, now."""
        return Scene(SYSTEM, self.office.clock(), self.office.random)

    def operator(self) -> Caller:
        """Somebody who acts for the provider."""
        who = self.office.person("provider")
        with self.office.database.write() as unit:
            providers.add_member(unit, self.provider.id, who.id, is_root=False, now=self.office.clock())
        return who

    def node(self, name: str = "g07", gpus: int = GPUS, *, disk: int = DISK, provider_id: str | None = None) -> str:
        """A node that has just registered; returns its id."""
        asked = Register(
            machine_id=name,
            boot_id="b",
            agent_version="1",
            inventory=inventory(name, gpus, disk=disk),
            capabilities=Capabilities(vm=True, container=True),
        )
        with self.office.database.write() as unit:
            row = nodes.register(unit, provider_id or self.provider.id, asked, self.scene())
        return str(row.id)

    def hear(self, node_id: str) -> None:
        """Let a node have given a sign of life now."""
        with self.office.database.write() as unit:
            unit.execute(update(node).where(node.c.id == node_id).values(last_seen=self.office.clock(), status="Ready"))

    def variant(self, name: str = "h200.1") -> str:
        """A variant with one GPU in the catalog."""
        kind = {
            "name": "h200",
            "brand_short": "H200",
            "manufacturer": "gpuvendor",
            "cost_per_hour": COST,
            "kernel_modules": "OpenOrProprietary",
            "vcpu_weight": 0,
            "ram_weight": 0,
            "disk_weight": 0,
            "gpu_weight": 1_000_000,
            "created_at": 1,
            "removed_at": None,
        }
        shape = {
            "name": name,
            "type_name": "h200",
            "gpu_count": 1,
            "mig_profile": None,
            "vcpu": 4,
            "dram": 16 * GIB,
            "disk": 100 * GIB,
            "vram": 141 * GIB,
            "cpu_policy": "Dedicated",
            "overcommit": False,
            "services": '["vm","container"]',
            "cost_per_hour": COST,
            "created_at": 1,
            "removed_at": None,
        }
        with self.office.database.write() as unit:
            unit.insert_missing(instance_type, [kind])
            unit.insert_missing(instance_variant, [shape])
        return name

    def place(self, unit: WriteUnit, who: Caller, node_id: str, gpus: int = 1) -> Placement | Any:
        """Where something of somebody's would go on a node, or why not."""
        wanted = Wanted(
            kind="Container",
            gpus=gpus,
            vcpu=2 * gpus,
            dram=16 * GIB * gpus,
            disk=100 * GIB * gpus,
            node_id=node_id,
            accounts=frozenset({who.account_id}),
        )
        return place(unit, wanted, self.office.now)

    def instance(
        self,
        who: Caller,
        node_id: str,
        gpus: int = 1,
        *,
        status: str = "Active",
        variant: str | None = None,
        team: bool = False,
        name: str = "trainer",
    ) -> str:
        """Something that runs for somebody, with its claims and, once active, its meter; returns its id."""
        office, now = self.office, self.office.clock()
        instance_id = new_id(now, office.random)
        with office.database.write() as unit:
            placed = self.place(unit, who, node_id, gpus)
            assert isinstance(placed, Placement), placed
            unit.execute(
                insert(instance).values(
                    id=instance_id,
                    name=name,
                    account_id=who.account_id,
                    user_id=None if team else who.id,
                    team_id=who.id if team else None,
                    cluster_name="default",
                    node_id=node_id,
                    provider_id=self.provider.id,
                    kind="VirtualMachine",
                    instance_type=None,
                    variant=variant,
                    gpu_count=gpus,
                    vcpu=2 * gpus,
                    dram=16 * GIB * gpus,
                    disk=100 * GIB * gpus,
                    cpu_policy="Dedicated",
                    config="{}",
                    username="root",
                    has_password=False,
                    ssh_key_auth=True,
                    status="Initializing",
                    failing=False,
                    want="Running",
                    gen=1,
                    reset_seq=0,
                    gen_applied=0,
                    reset_applied=0,
                    phase="",
                    power="",
                    missing_rounds=0,
                    addresses="[]",
                    created_at=now,
                    cost_per_hour=COST,
                    provider_share=SHARE,
                    billing_exempt=False,
                    quota_id=placed.quota_id,
                )
            )
            claims.take(unit, instance_id, placed, now, cpu_policy="Dedicated")
            begun(unit, MACHINE, instance_id, "Initializing", "rent", self.scene(), owner_id=who.id)
        if status == "Active":
            self.activate(instance_id)
        return instance_id

    def activate(self, instance_id: str, free_until: int | None = None) -> int:
        """Let it be ready; returns when it was."""
        office, scene = self.office, self.scene()
        with office.database.write() as unit:
            row = unit.select(select(instance).where(instance.c.id == instance_id)).one()
            transition(
                unit,
                MACHINE,
                row.id,
                "Initializing",
                "ready",
                scene,
                owner_id=row.team_id or row.user_id,
                values={"ready_at": scene.now},
            )
            rentals.start(
                unit,
                resource_type="Compute",
                resource_id=row.id,
                resource_name=row.name,
                account_id=row.account_id,
                provider_id=row.provider_id,
                share=SHARE,
                rate=COST,
                free_until=free_until,
                now=scene.now,
                random=office.random,
            )
        return scene.now

    def end(self, instance_id: str) -> None:
        """Let it be over, and its claims with it."""
        scene = self.scene()
        with self.office.database.write() as unit:
            row = unit.select(select(instance).where(instance.c.id == instance_id)).one()
            rentals.stop(unit, instance_id, scene.now, random=scene.random)
            claims.release(unit, instance_id, scene.now)
            if row.status == "Initializing":
                values = {"ended_at": scene.now, "failure_id": "f", "failed_at": scene.now}
                moves = [("Initializing", "fail", values)]
            else:
                moves = [("Active", "terminate", {}), ("Deactivating", "gone", {"ended_at": scene.now})]
            for state, trigger, values in moves:
                owner = row.team_id or row.user_id
                transition(unit, MACHINE, instance_id, state, trigger, scene, owner_id=owner, values=values)

    def meter(self, resource_id: str) -> Meter:
        """The latest meter of something."""
        with self.office.database.read() as unit:
            return rentals.of_resources(unit, [resource_id])[resource_id]

    def tick(self, resource_id: str) -> int:
        """Charge what runs up to now; returns how much."""
        with self.office.database.write() as unit:
            running = rentals.running(unit, resource_id)
            assert running is not None
            return rentals.tick(unit, running, self.office.clock(), random=self.office.random)
