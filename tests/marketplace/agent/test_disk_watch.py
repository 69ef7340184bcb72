"""Disks of containers: what of them is measured, who is stopped, and where a file system does it instead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import msgspec
import pytest

from marketplace.agent.disk_watch import DiskWatch
from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers import disk_quota
from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor, Machine
from marketplace.agent.drivers.podman import PodmanDriver
from marketplace.agent.keeper import Keeper
from marketplace.agent.records import Record, Records
from marketplace.agent.wire import ContainerSpec, VmSpec, Volume

MIB = 1 << 20


class Bench:
    """A node with one container, whose disk and volume are as the test says."""

    def __init__(self, folder: Path) -> None:
        self.hypervisor, self.volumes = Hypervisor(), {"v": 0}
        driver = FakeDriver(self.hypervisor, kind="Container", label="n")
        self.keeper = Keeper(
            records=Records(folder / "instances", durable=False),
            disks=RetainedDisks(folder / "retained"),
            drivers={"Container": driver},
            now=lambda: 0,
        )
        disk = Volume(id="v", size_bytes=2 * MIB, mount_path="/data")
        spec = ContainerSpec(name="a", image="i", disk_bytes=MIB, volumes=[disk])
        self.keeper.records.put(Record(id="a", spec=spec, stage="Created", created_at=0))
        self.box = self.hypervisor.machines["a"] = Machine(id="a", label="n", power="Running", gpus=[], ports=[])
        self.watch = DiskWatch(self.keeper, {"Container": driver}, lambda: dict(self.volumes))

    def look(self) -> list[str]:
        async def main() -> list[str]:
            await self.keeper.round()
            return [f"{one.instance_id}: {one.message}" for one in await self.watch.look()]

        return asyncio.run(main())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_who_has_written_more_than_its_disk_is_stopped_once_and_the_reason_told(bench: Bench) -> None:
    for used in (None, 0, MIB):
        bench.box.disk_use = used
        assert bench.look() == [] and bench.box.power == "Running"
    bench.box.disk_use = MIB + 1
    assert bench.look() == [f"a: The container was stopped: it has written {MIB + 1} bytes, and its disk has {MIB}."]
    assert bench.box.power == "Exited" and bench.look() == []
    ending = bench.keeper.records.all()["a"].ended
    assert ending is not None and ending.cause == "BadCommand"
    assert ending.message == f"The container was stopped: it has written {MIB + 1} bytes, and its disk has {MIB}."


def test_who_fills_a_volume_is_stopped_and_who_empties_it_goes_on(bench: Bench) -> None:
    bench.volumes["v"] = 4 * MIB
    assert bench.look() == [], "it was too full before anybody looked"
    bench.volumes["v"] = 3 * MIB
    assert bench.look() == [] and bench.watch.used == {"v": 3 * MIB}
    bench.volumes["v"] = 3 * MIB + 1
    (told,) = bench.look()
    assert "its volume at /data grew to" in told and bench.box.power == "Exited"
    bench.volumes["v"] = 5 * MIB
    assert bench.look() == []


def test_virtual_machines_and_what_is_being_made_are_left_alone(bench: Bench) -> None:
    bench.box.disk_use = 9 * MIB
    spec = bench.keeper.records.all()["a"].spec
    bench.keeper.records.put(Record(id="a", spec=spec, stage="Creating", created_at=0))
    assert asyncio.run(bench.watch.look()) == []
    vm = VmSpec(name="a", vcpu=1, dram_bytes=1, disk_bytes=1)
    bench.keeper.records.put(Record(id="a", spec=vm, stage="Created", created_at=0))
    assert asyncio.run(bench.watch.look()) == []
    bench.hypervisor.script([("stop", "error")])
    bench.keeper.records.put(Record(id="a", spec=spec, stage="Created", created_at=0))
    assert bench.look() == [] and bench.keeper.records.all()["a"].ended is None
    assert len(bench.look()) == 1, "what cannot be stopped now is stopped at the next look"


ROOT = "26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"
COUNTED = "99 26 7:1 / /var/lib/head\\040race rw - xfs /dev/loop1 rw,attr2,prjquota"
XFS = "98 26 7:2 / /srv rw - xfs /dev/loop2 rw,attr2,noquota"


@pytest.mark.parametrize(
    ("driver", "folder", "holds"),
    [
        ("overlay", "/var/lib/head race/storage", True),
        ("overlay2", "/var/lib/head race", True),
        ("vfs", "/var/lib/head race/storage", False),
        ("overlay", "/var/lib/head", False),
        ("overlay", "/srv/storage", False),
        ("overlay", "/home", False),
    ],
)
def test_only_overlay_on_a_file_system_that_counts_by_project_holds_containers(
    tmp_path: Path, driver: str, folder: str, holds: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("\n".join((ROOT, COUNTED, XFS)) + "\n")
    assert disk_quota.held(driver, Path(folder), mounts) is holds


class Engine:
    """A container engine with one container, on a file system that counts by project or not."""

    def __init__(self) -> None:
        self.status, self.made = "running", msgspec.Raw()

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path.endswith("/info"):
            return httpx2.Response(200, json={"Driver": "overlay", "DockerRootDir": "/srv"})
        if path.endswith("/create"):
            self.made = msgspec.Raw(request.content)
            return httpx2.Response(409, json={"message": "enough seen"})
        if path.endswith("/containers/headrace-a/json"):
            sized = {"SizeRw": 4096} if request.url.query == b"size=true" else {}
            return httpx2.Response(200, json={"State": {"Status": self.status}, **sized})
        known = path.endswith(("/version", "/images/localhost/i/json"))
        return httpx2.Response(200 if known else 404, json={"message": "no such thing"})


@pytest.mark.parametrize("quota", [False, True])
def test_an_engine_is_asked_for_what_was_written_or_given_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: bool
) -> None:
    monkeypatch.setattr(
        disk_quota, "held", lambda driver, folder: quota and (driver, folder) == ("overlay", Path("/srv"))
    )
    engine = Engine()

    async def main() -> None:
        driver = PodmanDriver(tmp_path, tmp_path, label="n", socket=tmp_path / "s")
        driver._held = httpx2.AsyncClient(transport=httpx2.MockTransport(engine), base_url="http://engine/v1")
        assert (await driver.probe()).container_disk == ("quota" if quota else "watched")
        assert await driver.disk_use("a") == (None if quota else 4096)
        engine.status = "exited"
        assert await driver.disk_use("a") is None and await driver.disk_use("gone") is None
        with pytest.raises(DriverError, match="refused"):
            await driver.create("b", ContainerSpec(name="b", image="localhost/i", disk_bytes=MIB), tmp_path, print)
        await driver.close()

    asyncio.run(main())
    made = msgspec.json.decode(engine.made)["HostConfig"]
    assert made.get("StorageOpt") == ({"size": str(MIB)} if quota else None)
