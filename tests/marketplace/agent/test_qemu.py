"""A real virtual machine under software emulation, from its image to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.qemu import QemuDriver
from marketplace.agent.drivers.qemu_command import Host
from marketplace.agent.images import ImageStore
from marketplace.agent.keeper import Keeper
from marketplace.agent.readiness import guest_app, phone_home_url
from marketplace.agent.records import Records
from marketplace.agent.serving import served, tcp_listener
from marketplace.agent.wire import Desired, DesiredInstance, ObservedInstance, Port, VmSpec

ID = "6f1ed002-ab56-4bb0-9c6b-0a6e1d3c5a10"
USER_DATA = "#!/bin/sh\necho from the renter > /run/of-the-renter\n"
MIB = 1 << 20


def wall_us() -> int:
    return time.time_ns() // 1000


async def until(true: Callable[[], object], *, within_s: float = 150) -> None:
    """Wait for a condition that another process brings about."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"not within {within_s} s"
        await asyncio.sleep(0.05)


class VmNode:
    """A keeper over real QEMU."""

    def __init__(self, folder: Path, images: Path, phone_port: int) -> None:
        store = ImageStore(folder / "images", now=wall_us, local=(images,))
        self.records = Records(folder / "instances", durable=False)
        self.driver = QemuDriver(
            folder / "instances",
            folder / "volumes",
            store,
            label="test",
            host=Host(accelerator="tcg"),
            phone_home=lambda id, token: phone_home_url(phone_port, id, token),
        )
        self.keeper = Keeper(
            records=self.records,
            disks=RetainedDisks(folder / "retained"),
            drivers={"VirtualMachine": self.driver},
            now=wall_us,
        )
        self.keeper.connected = True

    async def want(self, wish: DesiredInstance, done: Callable[[ObservedInstance], Any]) -> ObservedInstance:
        """Act until what is told of the instance is as it should be."""
        end = time.monotonic() + 150
        while True:
            self.keeper.desire(Desired(instances=[wish]))
            told = await self.keeper.round()
            if told is not None and told.instances and done(told.instances[0]):
                return told.instances[0]
            await self.keeper.settle()
            assert time.monotonic() < end, f"{told} {await self.driver.tail_log(wish.id, 20)}"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def node(folder: Path, images: Path) -> AsyncIterator[VmNode]:
    listener = tcp_listener("127.0.0.1", 0)
    made = VmNode(folder, images, listener.getsockname()[1])
    async with served(guest_app(made.keeper), listener):
        try:
            yield made
        finally:
            await made.keeper.close()
            for one in await made.driver.listing():
                await made.driver.destroy(one.id)


def wish(disk: Path, renter: Any, port: int, want: Any = "Running", gen: int = 1, **rest: Any) -> DesiredInstance:
    spec = VmSpec(
        name="Box one",
        vcpu=1,
        dram_bytes=256 * MIB,
        disk_bytes=64 * MIB,
        image_path=str(disk),
        user_data=USER_DATA,
        ssh_keys=[renter.public],
        ports=[Port(22, port, "tcp", "127.0.0.1")],
        readiness_token="once-and-only-here",
    )
    return DesiredInstance(id=ID, gen=gen, want=want, spec=spec, **rest)


@pytest.mark.slow
def test_a_virtual_machine_boots_is_reached_paused_stopped_and_ended(
    guest_disk: Path, renter: Any, port: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with node(tmp_path, guest_disk.parent) as vm:

            def ask(want: Any, gen: int, **rest: Any) -> DesiredInstance:
                return wish(guest_disk, renter, port, want, gen, **rest)

            told = await vm.want(ask("Running", 1), lambda one: one.ready_via)
            assert (told.phase, told.power, told.ready_via) == ("Running", "Running", "phone_home")
            assert told.ports == [Port(22, port, "tcp", "127.0.0.1")]
            assert await vm.driver.readiness(ID, ask("Running", 1).spec) == "ssh"
            said = await renter.ssh(port, "hostname; cat /run/of-the-renter")
            assert said.splitlines() == ["box-one", "from the renter"]
            used = await vm.driver.metrics(ID)
            assert used is not None
            assert used.cpu_seconds is not None
            assert used.cpu_seconds > 1

            assert (await vm.want(ask("Paused", 2), lambda one: one.gen_applied == 2)).power == "Paused"
            assert await vm.driver.readiness(ID, ask("Paused", 2).spec) is None, "a paused guest answers nobody"
            assert (await vm.want(ask("Running", 3), lambda one: one.gen_applied == 3)).power == "Running"
            assert await renter.ssh(port, "echo back") == "back"
            assert (await vm.want(ask("Stopped", 4), lambda one: one.gen_applied == 4)).power == "Shutoff"
            assert "GUEST UP iid=" + ID in await vm.driver.tail_log(ID, 40)
            assert (await vm.want(ask("Running", 5), lambda one: one.gen_applied == 5)).power == "Running"

            gone = await vm.want(ask("Absent", 6, erase_after_s=60), lambda one: one.phase == "Absent")
            assert gone.power is None
            assert await vm.driver.listing() == []
            assert (tmp_path / "retained" / ID / "disk.qcow2").exists()

    asyncio.run(run())


@pytest.mark.slow
def test_a_virtual_machine_is_reset_started_again_and_lends_its_disk(
    guest_disk: Path, renter: Any, port: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with node(tmp_path, guest_disk.parent) as vm:

            def ask(want: Any, gen: int, **rest: Any) -> DesiredInstance:
                return wish(guest_disk, renter, port, want, gen, **rest)

            async def boots(count: int) -> None:
                await until(
                    lambda: (
                        (tmp_path / "instances" / ID / "serial.log").read_text(errors="replace").count("GUEST UP")
                        >= count
                    )
                )

            await vm.want(ask("Running", 1), lambda one: one.ready_via)
            mark = "printf of-the-disk | dd of=/dev/vda bs=1M seek=48 conv=fsync 2>/dev/null"
            await renter.ssh(port, mark)
            await vm.want(ask("Running", 1, reset_seq=1), lambda one: one.reset_applied == 1)
            await boots(2)
            await vm.want(ask("Stopped", 2, reset_seq=1), lambda one: one.power == "Shutoff")
            await vm.want(ask("Running", 3, reset_seq=1), lambda one: one.gen_applied == 3)
            await boots(3)
            await vm.driver.publish(ID, [])
            assert (
                await renter.ssh(port, "dd if=/dev/vda bs=1M skip=48 count=1 2>/dev/null | head -c 11") == "of-the-disk"
            )

    asyncio.run(run())


def test_a_process_that_cannot_start_is_explained(guest_disk: Path, renter: Any, port: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path, guest_disk.parent) as vm:
            with contextlib.closing(tcp_listener("127.0.0.1", port)) as taken:
                taken.listen()
                told = await vm.want(wish(guest_disk, renter, port), lambda one: one.phase == "Failed")
            assert told.error is not None
            assert told.error.message == "A port of the node that was to be published is taken."
            assert await vm.driver.listing() == []

    asyncio.run(run())
