"""GPUs between two users, at the hourly look, and at an operator's reset: a bus and a driver's library of scripts."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest

from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor, Machine
from marketplace.agent.drivers.podman import PodmanDriver
from marketplace.agent.gpu_care import GpuCare, GpuRounds, Problem
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook, Wanted
from marketplace.agent.nvml import Nvml
from marketplace.agent.records import Records
from marketplace.agent.vfio import Vfio, VfioError
from marketplace.agent.wire import LeaseGrant
from tests.marketplace.agent.test_inventory import NVMLError, fake_pynvml, no_driver
from tests.marketplace.agent.test_vfio import GPU, SOUND, Kernel
from tests.marketplace.rack import inventory

UUID = "GPU-1"


class Hardware:
    """One GPU under its own driver; `wrong` says what the library tells of it."""

    def __init__(self, root: Path) -> None:
        self.kernel = Kernel(root)
        self.facts: dict[str, Any] = {}
        self.mended = True
        nvml = self
        self.vfio = Vfio(
            sys=self.kernel.sys, proc=self.kernel.proc, write=self.write, healthy=lambda slot: nvml.nvml().healthy(slot)
        )

    def nvml(self) -> Nvml:
        return Nvml(fake_pynvml(**self.facts))

    def write(self, path: Path, text: str) -> None:
        """As the bus does; a reset mends what can be mended."""
        self.kernel.write(path, text)
        if path.name == "reset" and self.mended:
            self.facts.clear()

    @property
    def resets(self) -> int:
        return self.kernel.written.count(("reset", "1"))

    def care(self) -> GpuCare:
        care = GpuCare(self.vfio, Nvml())
        care._nvml = SimpleNamespace(  # type: ignore[assignment]  # the library as it is now, at each look
            slots=lambda: self.nvml().slots(), problem=lambda slot: self.nvml().problem(slot)
        )
        return care


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    return Hardware(tmp_path)


def rows(pending: int, failed: int) -> Any:
    return {"nvmlDeviceGetRemappedRows": lambda handle: (0, 0, pending, failed)}


def asked(action: int, status: int = 0) -> Any:
    answer = SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=action))
    return {
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 1,
        "NVML_GPU_RECOVERY_ACTION_NONE": 0,
        "nvmlDeviceGetFieldValues": lambda handle, fields: [answer],
    }


def parted() -> Any:
    def refuses(handle: Any) -> Any:
        raise NVMLError("not in MIG mode")

    return {"nvmlDeviceGetMigMode": lambda handle: (1, 1), "nvmlDeviceGetComputeRunningProcesses": refuses}


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, None),
        (rows(0, 0), None),
        (asked(0), None),
        (asked(1, status=3), None),
        (parted(), None),
        ({"nvmlInit": no_driver}, None),
        (rows(1, 0), "rows of its memory wait to be replaced"),
        (rows(0, 1), "rows of its memory cannot be replaced"),
        (asked(1), "its driver asks for its recovery (1)"),
        (
            {"nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=77)]},
            "the processes 77 compute on it, and nobody gave it to them",
        ),
    ],
)
def test_what_is_wrong_with_a_gpu_that_nobody_uses(facts: dict[str, Any], problem: str | None) -> None:
    assert Nvml(fake_pynvml(**facts)).problem(GPU) == problem


def test_a_gpu_that_comes_back_well_is_left_alone_and_one_that_does_not_is_reset(hardware: Hardware) -> None:
    care = hardware.care()
    assert care.given_back([UUID, "MIG-5"]) == [] and hardware.resets == 0
    hardware.facts = rows(1, 0)
    assert care.given_back([UUID]) == [f"the GPU {GPU} was reset: rows of its memory wait to be replaced"]
    assert hardware.resets == 1 and hardware.vfio.problems == {}
    assert (hardware.kernel.driver(GPU), hardware.kernel.driver(SOUND)) == ("nvidia", "snd_hda_intel")


def test_what_a_reset_does_not_mend_is_out_of_service_until_it_is_well(hardware: Hardware) -> None:
    care = hardware.care()
    hardware.facts, hardware.mended = rows(0, 1), False
    (told,) = care.given_back([UUID])
    assert told.startswith(f"the GPU {GPU} is out of service: rows of its memory cannot be replaced")
    assert "not healthy after its reset" in hardware.vfio.problems[GPU]
    (again,) = care.check(frozenset())
    assert again.startswith(f"the GPU {GPU} is out of service")
    hardware.facts = {}
    assert care.check(frozenset()) == [] and hardware.vfio.problems == {}


def test_the_hourly_look_leaves_alone_what_is_used_and_concludes_nothing_without_a_driver(hardware: Hardware) -> None:
    care = hardware.care()
    hardware.facts = rows(1, 0)
    assert care.check(frozenset({GPU})) == [] and hardware.resets == 0
    hardware.facts = {"nvmlInit": no_driver}
    hardware.vfio.problems[GPU] = "was bad"
    assert care.check(frozenset()) == [] and hardware.vfio.problems == {GPU: "was bad"}


def test_a_gpu_that_a_process_has_open_is_not_reset(hardware: Hardware) -> None:
    about = hardware.kernel.proc / "driver/nvidia/gpus" / GPU
    about.mkdir(parents=True)
    (about / "information").write_text("Device Minor: \t 0\n")
    (hardware.kernel.proc / "4711/fd").mkdir(parents=True)
    (hardware.kernel.proc / "4711/fd/3").symlink_to("/dev/nvidia0")
    with pytest.raises(VfioError, match=f"{GPU} is in use by the processes 4711"):
        hardware.care().reset(GPU)
    assert hardware.kernel.written == [] and hardware.vfio.problems == {}


class Care:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.used: list[frozenset[str]] = []
        self.done: list[str] = []

    def made(self) -> frozenset[str]:
        return frozenset()

    def check(self, used: frozenset[str]) -> list[str]:
        self.used.append(used)
        return ["one is ill"]

    def reset(self, slot: str) -> None:
        self.done.append(slot)


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for an engine."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_rounds_spare_engines_and_machines_and_hear_what_machines_lost(
    tmp_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    found = inventory("g01", gpus=4)
    slots = [gpu.pci_slot for gpu in found.gpus]
    containers, care, book = Hypervisor(), Care(), LeaseBook()
    containers.machines["a"] = Machine(id="a", label="n", power="Running", gpus=[found.gpus[0].uuid], ports=[])
    driver = FakeDriver(containers, kind="Container", label="n")
    keeper = Keeper(
        records=Records(tmp_path / "instances", durable=False),
        disks=RetainedDisks(tmp_path / "retained"),
        drivers={"Container": driver},
        now=lambda: 0,
    )
    keeper.slots = {gpu.uuid: gpu.pci_slot for gpu in found.gpus}
    lease = book.request(Wanted(holder="e", pid=engine.pid, count=1), 0)
    book.hear([LeaseGrant(id=lease.id, fence=1, gpus=[slots[1]])], 0)
    rounds = GpuRounds(care, keeper, book, {"Container": driver})  # type: ignore[arg-type]
    rounds.inventory = found

    async def main() -> None:
        assert await rounds.check() == [], "before the machines were listed nobody knows who uses what"
        await keeper.round()
        assert await rounds.check() == [Problem("GpuUnhealthy", "one is ill")]
        assert care.used == [frozenset(slots[:2])]
        containers.machines["a"].gpu_problem = "they are gone"
        assert (await rounds.check())[1:] == [Problem("GpuLost", "a: they are gone", "a")]
        for slot, why in ((slots[0], "in use"), (slots[1], "in use"), ("0000:99:00.0", "there is no GPU")):
            with pytest.raises(LookupError, match=why):
                await rounds.reset(slot)
        assert await rounds.reset(slots[2]) == f"the GPU {slots[2]} was reset"

    asyncio.run(main())
    assert care.done == [slots[2]] and rounds.resetting == set()
    assert slots[2] in keeper.leased, "until the next round nothing begins there"


class Podman:
    """A container engine with one container that has a GPU."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[str] = []

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.partition("/containers/")[2] or request.url.path.rpartition("/exec/")[2]
        self.calls.append(f"{request.method} {path}")
        if path.endswith("/json") and request.url.path.count("/exec/"):
            return httpx2.Response(200, json={"ExitCode": self.status})
        if path.endswith("/start"):
            text = b"Failed to initialize NVML: Unknown Error\n"
            return httpx2.Response(200, content=b"\1\0\0\0" + len(text).to_bytes(4, "big") + text)
        if path.endswith("/exec"):
            assert msgspec.json.decode(request.content)["Cmd"] == ["nvidia-smi", "-L"]
            return httpx2.Response(201, json={"Id": "e1"})
        if path.endswith("/json"):
            return httpx2.Response(200, json={"Config": {"Labels": {"headrace.gpus": f"{UUID},GPU-2"}}})
        return httpx2.Response(204)


def test_containers_are_asked_for_their_gpus_and_give_them_back_before_they_count_as_gone(tmp_path: Path) -> None:
    podman, returned = Podman(), []

    def look(uuids: list[str]) -> None:
        assert any(call.startswith("DELETE") for call in podman.calls), "the container is gone by then"
        returned.append(uuids)

    async def main() -> None:
        driver = PodmanDriver(tmp_path, tmp_path, label="n", socket=tmp_path / "s", returned=look)
        driver._held = httpx2.AsyncClient(transport=httpx2.MockTransport(podman), base_url="http://engine/v1")
        for status, problem in (
            (0, None),
            (127, None),
            (255, "its GPUs cannot be seen inside any more: Failed to initialize NVML: Unknown Error"),
        ):
            podman.status = status
            assert await driver.gpu_problem("a") == problem
        await driver.destroy("a")
        await driver.close()

    asyncio.run(main())
    assert returned == [[UUID, "GPU-2"]]
