"""A part of a GPU is rented: the server says where it is, its node makes it, the container gets it, and it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pynvml
import pytest

from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.podman import PodmanDriver
from marketplace.agent.gpu_care import GpuCare
from marketplace.agent.keeper import Keeper
from marketplace.agent.mig import Mig
from marketplace.agent.nvml import Nvml
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import Records
from marketplace.agent.vfio import Vfio
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.ledger.money import NANO
from marketplace.nodes.tables import node as node_table
from tests.marketplace.agent.nvml_library import Library
from tests.marketplace.rack import GIB, Agent, Rack, inventory

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office


class Engine:
    """A container engine in memory; `broken` refuses to make anything."""

    def __init__(self) -> None:
        self.boxes: dict[str, dict[str, Any]] = {}
        self.broken = False

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        _, _, rest = request.url.path.partition("/containers/")
        name, _, verb = rest.partition("/")
        if request.url.path.endswith("/images/localhost/i/json"):
            return httpx2.Response(200, json={})
        if name == "create":
            if self.broken:
                return httpx2.Response(500, json={"message": "unresolvable CDI devices"})
            self.boxes[request.url.params["name"]] = msgspec.json.decode(request.content)
            return httpx2.Response(201, json={})
        if verb == "" and name == "json":
            return httpx2.Response(200, json=[self._listed(one) for one in self.boxes.values()])
        if name not in self.boxes:
            return httpx2.Response(404, json={"message": "no such container"})
        if request.method == "DELETE":
            del self.boxes[name]
        about = {"Config": {"Labels": self.boxes.get(name, {}).get("Labels")}, "State": {"Status": "running"}}
        return httpx2.Response(200, json=about)

    def _listed(self, box: dict[str, Any]) -> dict[str, Any]:
        return {"Labels": box["Labels"], "State": "running"}

    def devices(self) -> list[list[str]]:
        """What each container was given."""
        return [box["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] for box in self.boxes.values()]


class House:
    """A provider's node with one GPU that is whole, as its driver shows it."""

    def __init__(self, office: Office, library: Library, folder: Path) -> None:
        self.rack, self.gpu, self.engine, self.now = Rack(office), library.gpus[0], Engine(), 0
        mig = Mig(folder / "mig.json", reset=lambda slot: None)
        care = GpuCare(Vfio(sys=folder, proc=folder), Nvml(pynvml), mig)
        self.driver = PodmanDriver(
            folder, folder, label="n", socket=folder / "s", settle_s=0, devices=mig.make, returned=care.given_back
        )
        self.driver._held = httpx2.AsyncClient(transport=httpx2.MockTransport(self.engine), base_url="http://engine/v1")
        self.keeper = Keeper(
            records=Records(folder / "instances", durable=False),
            disks=RetainedDisks(folder / "retained"),
            drivers={"Container": self.driver},
            now=lambda: self.now,
        )
        self.keeper.connected = True
        self.node = Agent(self.rack, "g01", self.hardware())
        self.node.register()
        with office.database.write() as unit:
            unit.execute(node_table.update().values(instance_type="h200"))
            half = Variant(
                name="h200.half",
                type_name="h200",
                gpu_count=1,
                mig_profile="3g.71gb",
                vcpu=1,
                dram=GIB,
                disk=GIB,
                services=("container",),
                cost_per_hour=3600 * NANO,
            )
            catalog.add_variant(unit, half, office.clock())

    def hardware(self) -> Any:
        known = inventory("g01", gpus=1)
        told = [msgspec.structs.replace(known.gpus[0], pci_slot=self.gpu.slot, uuid=None)]
        return msgspec.structs.replace(known, gpus=Nvml(pynvml).decorate(told)[0])

    async def work(self) -> None:
        """The node does what it should, and tells; its hardware, too."""
        for _ in range(2):
            await asyncio.to_thread(self.node.poll, inventory=self.hardware())
            self.keeper.desire(self.node.desired)
            self.now += 100 * SECOND
            observed = await self.keeper.round()
            await self.keeper.settle()
            observed = await self.keeper.round()
            assert observed is not None
            self.node.seen = {one.id: one for one in observed.instances}
            await asyncio.to_thread(self.node.poll)

    def rent(self, who: Caller, variant: str = "h200.half") -> Any:
        return self.rack.rent(who, variant, config={"Docker": {"image": "localhost/i"}})


@pytest.fixture
def house(office: Office, library: Library, tmp_path: Path) -> House:
    return House(office, library, tmp_path)


def scenario(work: Callable[[House, Caller], Any], house: House, office: Office) -> None:
    who = office.person(balance=100_000 * NANO)

    async def main() -> None:
        await work(house, who)
        await house.driver.close()

    asyncio.run(main())
    assert house.rack.audit().clean


def test_parts_of_a_gpu_are_made_for_their_renters_and_go_with_them(house: House, office: Office) -> None:
    async def work(house: House, who: Caller) -> None:
        rent = house.rent
        ids = [str((await asyncio.to_thread(rent, who)).body["instance_ids"][0]) for _ in range(2)]
        refused = await asyncio.to_thread(rent, who)
        assert (refused.status, refused.code) == (409, "InsufficientCapacity")
        await house.work()
        assert house.gpu.shown == [("3g.71gb", 0), ("3g.71gb", 4)]
        assert sorted(house.engine.devices()) == [["nvidia.com/gpu=MIG-GPU-0-1"], ["nvidia.com/gpu=MIG-GPU-0-2"]]
        for one in ids:
            assert (await asyncio.to_thread(house.rack.show, who, one))["status"] == "Active"
        whole = await asyncio.to_thread(rent, who, "h200.1")
        assert whole.status == 409, "nobody has all of it while others have parts"
        await asyncio.to_thread(house.rack.terminate, who, ids[0])
        await house.work()
        assert len(house.gpu.shown) == 1 and house.gpu.split
        await asyncio.to_thread(house.rack.terminate, who, ids[1])
        await house.work()
        assert house.gpu.shown == [] and not house.gpu.split and house.engine.boxes == {}
        whole = await asyncio.to_thread(rent, who, "h200.1")
        assert whole.status == 201, whole.body
        await house.work()
        assert house.engine.devices() == [["nvidia.com/gpu=GPU-0"]] and not house.gpu.split

    scenario(work, house, office)


@pytest.mark.parametrize("fresh_database", ["sqlite"], indirect=True)
def test_a_part_that_cannot_be_made_costs_nothing_and_leaves_nothing(house: House, office: Office) -> None:
    async def work(house: House, who: Caller) -> None:
        for break_it in (lambda: house.gpu.processes.update({0: [77]}), lambda: setattr(house.engine, "broken", True)):
            break_it()
            (failed,) = (await asyncio.to_thread(house.rent, who)).body["instance_ids"]
            await house.work()
            shown = await asyncio.to_thread(house.rack.show, who, failed)
            assert (shown["status"], shown["failure"]["cause"]) == ("Failed", "PlatformError")
            assert house.gpu.shown == [] and not house.gpu.split
            house.gpu.processes.clear()
        spent = await asyncio.to_thread(house.rack.office.ask, "account.info", {}, who)
        assert spent.body["balance"] == 100_000 * 100

    scenario(work, house, office)
