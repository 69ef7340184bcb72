"""A provider with machines, for tests: nodes whose agents are scripts that speak the real protocol over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.routing import Router

from marketplace.agent.inventory_wire import Cpu, Disk, Gpu, Inventory, NumaNode, RetainedDisk, Thread
from marketplace.agent.wire import (
    Accepted,
    Capabilities,
    Desired,
    Failure,
    LeaseReport,
    Metrics,
    Observed,
    ObservedInstance,
    Poll,
    Polled,
    Ready,
    Register,
    Registered,
    Shutdown,
    VmSpec,
    digest,
)
from marketplace.catalog import service as catalog
from marketplace.catalog.service import InstanceType, Variant
from marketplace.keys import service as keys
from marketplace.ledger.audit import AuditReport, audit
from marketplace.ledger.money import NANO
from marketplace.nodes.agent_api import AgentDoor
from marketplace.nodes.tables import node
from marketplace.providers import service as providers
from tests.marketplace.office import Answer, Caller, Office

GIB = 1 << 30
T = TypeVar("T")


class HttpError(Exception):
    """An answer of the server other than 200."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


def inventory(name: str = "g01", *, gpus: int = 2, threads: int = 16, numas: int = 2, hugepages: int = 0) -> Inventory:
    """A machine: two threads a core, spread over its NUMA nodes."""
    cores = threads // 2
    return Inventory(
        hostname=name,
        ip="203.0.113.7",
        cpu=Cpu(
            brand="EPYC",
            architecture="x86_64",
            threads=[
                Thread(cpu=core + half * cores, core=core, package=0, numa=core * numas // cores)
                for core in range(cores)
                for half in (0, 1)
            ],
        ),
        memory_bytes=256 * GIB,
        numa=[NumaNode(node=n, memory_bytes=128 * GIB, hugepages_1g=hugepages) for n in range(numas)],
        gpus=[
            Gpu(
                pci_slot=f"0000:{n + 1:02x}:00.0",
                vendor_id=0x10DE,
                device_id=1,
                numa=n * numas // max(1, gpus),
                uuid=f"GPU-{name}-{n}",
                brand="H200",
                architecture="Hopper",
                vram_bytes=141 * GIB,
            )
            for n in range(gpus)
        ],
        disk=Disk(path="/var/lib/headrace", total_bytes=1 << 42, free_bytes=1 << 42),
    )


class Rack:
    """A provider, a type of machine with variants, and as many nodes as a test wants."""

    COST = 7 * NANO + 3
    """nano-units an hour of the variant with one GPU"""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.door = AgentDoor(office.context, look_s=0.005)
        self._app = Router([*self.door.routes()], redirect_slashes=False)
        with office.database.write() as unit:
            made = providers.create(unit, name="acme", now=office.clock(), random=office.random)
            self.provider_id = made.id
            row, secret = keys.create(
                unit,
                kind="node",
                owner_id=made.id,
                account_id=None,
                name="nodes",
                pepper=office.context.pepper,
                now=office.clock(),
                random=office.random,
                provider=made.id,
            )
            self.key, self.key_id = secret.text, row.id
            catalog.add_type(
                unit,
                InstanceType(
                    name="h200", brand_short="H200", cost_per_hour=self.COST, kernel_modules="OpenOrProprietary"
                ),
                office.clock(),
            )
        for count in (0, 1, 2, 4):
            self.variant(f"h200.{count}", gpu_count=count)

    def variant(self, name: str, *, gpu_count: int = 0, **more: Any) -> str:
        """Offer a shape of the type, and return its name."""
        base: dict[str, Any] = {"vcpu": 2, "dram": 8 * GIB, "disk": 10 * GIB, "cost_per_hour": self.COST}
        base["cost_per_hour"] *= max(1, gpu_count)
        made = Variant(**{"name": name, "type_name": "h200", "gpu_count": gpu_count, **base, **more})
        with self.office.database.write() as unit:
            catalog.add_variant(unit, made, self.office.clock())
        return name

    def operator(self) -> Caller:
        """Somebody of the provider."""
        who = self.office.person("provider")
        with self.office.database.write() as unit:
            providers.add_member(unit, self.provider_id, who.id, is_root=True, now=self.office.clock())
        return who

    def node(self, name: str = "g01", **more: Any) -> Agent:
        """A node that has registered, and is of the type."""
        agent = Agent(self, name, inventory(name, **more))
        agent.register()
        with self.office.database.write() as unit:
            unit.execute(node.update().where(node.c.id == agent.node_id).values(instance_type="h200"))
        return agent

    def rent(self, who: Caller, variant: str = "h200.1", *, container: bool = False, **more: Any) -> Answer:
        """Rent one."""
        config: dict[str, Any] = {"VirtualMachine": {"image_url": "https://images.example/ubuntu.qcow2"}}
        if container:
            config = {"Docker": {"image": "busybox", "env": [["SECRET", "canary-env"]]}}
        body = {
            "selector": {"ByInstanceTypeAndLocation": {"instance_type": variant, "datacenters": None}},
            "config": config,
        }
        self.office.wait(10)
        return self.office.ask("instances.rent", {**body, **more}, who)

    def rented(self, who: Caller, *args: Any, **more: Any) -> str:
        """Rent one and return its id."""
        answer = self.rent(who, *args, **more)
        assert answer.status == 201, answer.body
        return str(answer.body["instance_ids"][0])

    def show(self, who: Caller, instance_id: str, **mask: bool) -> dict[str, Any]:
        """One instance as its renter sees it."""
        self.office.wait(1)
        answer = self.office.ask("instances.list", {"selector": {"ById": [instance_id]}, "mask": mask}, who)
        assert answer.status == 200, answer.body
        (shown,) = answer.body["instances"]
        return dict(shown)

    def terminate(self, who: Caller, *ids: str) -> Answer:
        """End instances."""
        self.office.wait(1)
        return self.office.ask("instances.terminate", {"selector": {"ById": list(ids)}}, who)

    def audit(self) -> AuditReport:
        """Every invariant."""
        with self.office.database.read() as unit:
            return audit(unit, now=self.office.now)

    def send(self, name: str, message: Any, kind: type[T], *, key: str | None = None) -> T:
        """One message of a node, over ASGI. HttpError."""
        body = msgspec.json.encode(message)
        status, answer = asyncio.run(self.call(name, body, self.key if key is None else key))
        if status != 200:
            raise HttpError(status, msgspec.json.decode(answer)["error"]["code"])
        return msgspec.json.decode(answer, type=kind)

    async def call(self, name: str, body: bytes, key: str) -> tuple[int, bytes]:
        """Send bytes to a door and return what it answered."""
        sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/agent/v1/{name}",
            "headers": [(b"x-api-key", key.encode())] if key else [],
            "client": ("198.51.100.9", 1),
            "query_string": b"",
            "root_path": "",
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


class Agent:
    """The agent of one machine: it does what the test says, and tells the server."""

    def __init__(self, rack: Rack, name: str, machine: Inventory) -> None:
        self.rack = rack
        self.name = name
        self.inventory = machine
        self.boot_id = f"boot-{name}"
        self.capabilities = Capabilities(vm=True, container=True)
        self.session: Registered
        self.desired = Desired()
        self.rev = 0
        self.seen: dict[str, ObservedInstance] = {}
        self.disks: list[RetainedDisk] = []
        self.leases: list[LeaseReport] = []
        self.unknown: list[str] = []

    @property
    def node_id(self) -> str:
        """The node's id."""
        return self.session.node_id

    def register(self, *, observed: bool = True) -> Registered:
        """Begin a session."""
        asked = Register(
            machine_id=f"machine-{self.name}",
            boot_id=self.boot_id,
            agent_version="1",
            inventory=self.inventory,
            capabilities=self.capabilities,
            observed=self.observed if observed else None,
        )
        self.session = self.rack.send("register", asked, Registered)
        self.desired, self.rev = self.session.desired, self.session.desired_rev
        return self.session

    @property
    def observed(self) -> Observed:
        """What there is on the machine."""
        return Observed(instances=list(self.seen.values()), environments=self.disks)

    def poll(self, *, full: bool = True, **more: Any) -> Polled:
        """One poll without waiting."""
        self.rack.office.wait(1)
        told = Poll(
            session_id=self.session.session_id,
            epoch=self.session.epoch,
            applied_rev=self.rev,
            wait_s=0,
            observed=self.observed if full else None,
            observed_digest=digest(self.observed),
            leases=self.leases,
        )
        answer = self.rack.send("poll", msgspec.structs.replace(told, **more), Polled)
        if answer.desired is not None:
            self.desired, self.rev = answer.desired, answer.desired_rev
        self.unknown = answer.unknown
        return answer

    def sees(self, instance_id: str, phase: str, **more: Any) -> None:
        """Something is so on the machine from now on."""
        gens = {one.id: one.gen for one in self.desired.instances}
        before = self.seen.get(instance_id)
        gen = gens.get(instance_id, 0 if before is None else before.gen_applied)
        told: dict[str, Any] = {"gen_applied": gen, "power": "Running" if phase == "Running" else None, **more}
        self.seen[instance_id] = ObservedInstance(id=instance_id, phase=phase, **told)  # type: ignore[arg-type]

    def run(self, instance_id: str, **more: Any) -> None:
        """Start what is wanted, and tell."""
        self.poll()
        assert instance_id in {one.id for one in self.desired.instances}, self.desired
        self.sees(instance_id, "Running", started_at=self.rack.office.now, **more)
        self.poll()

    def ready(self, instance_id: str, token: str | None = None) -> Accepted:
        """Forward the word of a machine that it is ready."""
        if token is None:
            (spec,) = [one.spec for one in self.desired.instances if one.id == instance_id]
            assert isinstance(spec, VmSpec)
            token = spec.readiness_token
        return self.rack.send("ready", Ready(instance_id=instance_id, token=token, via="ssh"), Accepted)

    def fails(self, instance_id: str, cause: str, message: str) -> None:
        """It cannot be made, and is cleaned away."""
        self.poll()
        self.sees(instance_id, "Failed", power=None, error=Failure(cause=cause, message=message))  # type: ignore[arg-type]
        self.poll()

    def clean(self) -> None:
        """Take down all that should not be, and tell."""
        self.poll()
        wants = {one.id: one.want for one in self.desired.instances}
        for instance_id in {*self.seen, *wants}:
            if wants.get(instance_id, "Absent") == "Absent":
                self.sees(instance_id, "Absent")
        self.poll()
        self.seen = {name: one for name, one in self.seen.items() if one.phase != "Absent"}
        self.poll()

    def bring_up(self, instance_id: str) -> int:
        """Run it and make it ready; returns when."""
        self.run(instance_id)
        self.ready(instance_id)
        return self.rack.office.now

    def leave(self) -> Accepted:
        """Say that the agent goes."""
        return self.rack.send("shutdown", Shutdown(session_id=self.session.session_id), Accepted)

    def measure(self, told: Metrics) -> Accepted:
        """Tell of measurements."""
        return self.rack.send("metrics", told, Accepted)
