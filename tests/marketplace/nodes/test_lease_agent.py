"""Leases from an engine's request at the agent's socket to the server's claims, and back: beside rentals."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor
from marketplace.agent.keeper import Keeper
from marketplace.agent.lease_door import LeaseClient, lease_app
from marketplace.agent.leases import Lease, LeaseBook, LeaseError, Wanted
from marketplace.agent.node import Agent, Surroundings
from marketplace.agent.records import Records
from marketplace.agent.serving import served, unix_listener
from marketplace.agent.wire import Capabilities, Poll, Polled, Register, Registered
from marketplace.nodes.tables import node
from marketplace.placement.tables import gpu_slice_claim
from tests.marketplace.rack import Rack, inventory

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

T = TypeVar("T")


class Line:
    """What the agent takes for its server: the door itself."""

    def __init__(self, rack: Rack) -> None:
        self._rack = rack

    async def register(self, message: Register) -> Registered:
        return await self._send("register", message, Registered)

    async def poll(self, message: Poll, *, wait_s: float) -> Polled:
        return await self._send("poll", msgspec.structs.replace(message, wait_s=0), Polled)

    async def _send(self, name: str, message: Any, kind: type[T]) -> T:
        status, body = await self._rack.call(name, msgspec.json.encode(message), self._rack.key)
        assert status == 200, body
        return msgspec.json.decode(body, type=kind)


class Machine:
    """A machine with two GPUs: the real agent, its socket, and containers in memory."""

    def __init__(self, rack: Rack, folder: Path) -> None:
        self.containers = Hypervisor()
        self.office = rack.office
        self.keeper = Keeper(
            records=Records(folder / "instances", durable=False),
            disks=RetainedDisks(folder / "retained"),
            drivers={"Container": FakeDriver(self.containers, kind="Container")},
            now=self.office.clock,
        )
        self.book = LeaseBook(folder / "leases.json")
        self.socket = folder / "leases.sock"
        around = Surroundings(
            machine_id="machine-g01",
            boot_id="boot",
            inventory=lambda: inventory("g01"),
            drivers=self.keeper._drivers,
            now=self.office.clock,
        )
        self.agent = Agent(Line(rack), self.keeper, self.book, around)  # type: ignore[arg-type]

    async def register(self) -> None:
        await self.agent._register(Capabilities(container=True))
        with self.office.database.write() as unit:
            unit.execute(node.update().values(instance_type="h200"))

    async def tick(self) -> None:
        """What the agent does in a few seconds."""
        self.book.enforce(self.office.clock())
        await self.agent._round()
        await self.keeper.settle()
        await self.agent._round()
        await self.agent._poll()

    async def during(self, work: Awaitable[T]) -> T:
        """Wait for something that needs the agent."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.tick()
            await asyncio.sleep(0)
        return task.result()


@pytest.fixture
def engines() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that stand for engines."""
    made = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield made
    for one in made:
        one.kill()
        one.wait()


def test_leases_and_rentals_exclude_one_another_from_the_engine_to_the_claims(
    rack: Rack, ada: Caller, office: Office, tmp_path: Path, engines: list[subprocess.Popen[bytes]]
) -> None:
    async def main() -> None:
        machine = Machine(rack, tmp_path)
        await machine.register()
        async with served(lease_app(machine.book, office.clock), unix_listener(machine.socket)):
            client = LeaseClient(machine.socket)

            async def acquire(engine: subprocess.Popen[bytes], **more: Any) -> Lease:
                asked = Wanted(holder="tiny", pid=engine.pid, count=1, **more)
                return await machine.during(client.acquire(asked))

            kept = await acquire(engines[0], preemptible=False)
            lent = await acquire(engines[1], notice_s=20)
            assert kept.gpus != lent.gpus and kept.fence < lent.fence
            assert lent.uuids == [machine.book.uuids[lent.gpus[0]]]
            with pytest.raises(LeaseError, match="1 GPUs asked for, 0 are free"):
                await acquire(engines[0])

            rented = await asyncio.to_thread(rack.rented, ada, container=True)
            assert (await asyncio.to_thread(rack.rent, ada, container=True)).code == "InsufficientCapacity"
            watched = await machine.during(client.watch(lent))
            assert watched.revoke_at is not None and watched.revoke_at > office.now
            assert (await client.renew(kept)).revoke_at is None
            await machine.tick()
            assert machine.containers.machines == {}, "its GPU is still the engine's"
            with pytest.raises(IntegrityError), office.database.write() as unit:
                mine = gpu_slice_claim.c.instance_id == rented
                claimed = unit.select(select(gpu_slice_claim).where(mine)).first()
                assert claimed is not None
                twice = {**claimed._mapping, "owner_id": "other", "instance_id": None, "lease_id": "other"}
                unit.execute(insert(gpu_slice_claim).values(**twice))

            engines[1].kill()
            engines[1].wait()
            await client.release(lent)
            with pytest.raises(LeaseError, match="has ended"):
                await client.renew(lent)
            while rented not in machine.containers.machines:
                await machine.tick()
            assert machine.containers.machines[rented].gpus == lent.uuids
            with pytest.raises(LeaseError, match="0 are free"):
                await acquire(engines[0])

            await asyncio.to_thread(rack.terminate, ada, rented)
            while rented in machine.containers.machines:
                await machine.tick()
            await machine.tick()
            again = await acquire(engines[0])
            assert again.gpus == lent.gpus and again.fence > lent.fence
            await client.close()

    asyncio.run(main())
    assert rack.audit().clean
