"""Taking GPUs from the host and giving them back, on a tree that behaves like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from marketplace.agent.vfio import Vfio, VfioError

GPU, SOUND, BRIDGE, OTHER = "0000:65:00.0", "0000:65:00.1", "0000:64:00.0", "0000:66:00.0"


class Kernel:
    """A PCI bus below a folder: writing to its files has the effects that it has on Linux."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.written: list[tuple[str, str]] = []
        self.refuses_vfio = False
        self.broken_reset = False
        for driver in ("nvidia", "snd_hda_intel", "vfio-pci"):
            (self.sys / "bus/pci/drivers" / driver).mkdir(parents=True)
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        self.proc.mkdir()
        self.usual = {GPU: "nvidia", SOUND: "snd_hda_intel", OTHER: "nvidia"}
        self.add(BRIDGE, "0x060400", group=7)
        for slot, kind in ((GPU, "0x030200"), (SOUND, "0x040300")):
            self.add(slot, kind, group=7, parent=BRIDGE)
            self.bind(slot, self.usual[slot])

    def device(self, slot: str) -> Path:
        return self.sys / "bus/pci/devices" / slot

    def add(self, slot: str, kind: str, *, group: int | None, parent: str | None = None) -> None:
        real = self.sys / "devices" / (f"{parent}/{slot}" if parent else slot)
        real.mkdir(parents=True)
        self.device(slot).symlink_to(real)
        (real / "class").write_text(kind + "\n")
        (real / "config").write_bytes(b"\xde\x10" + b"\0" * 62)
        (real / "driver_override").write_text("(null)\n")
        (real / "reset").write_text("")
        if group is not None:
            devices = self.sys / f"kernel/iommu_groups/{group}/devices"
            devices.mkdir(parents=True, exist_ok=True)
            (devices / slot).symlink_to(real)
            (real / "iommu_group").symlink_to(devices.parent)

    def bind(self, slot: str, driver: str) -> None:
        (self.device(slot) / "driver").symlink_to(self.sys / "bus/pci/drivers" / driver)

    def driver(self, slot: str) -> str | None:
        path = self.device(slot) / "driver"
        return path.resolve().name if path.exists() else None

    def write(self, path: Path, text: str) -> None:
        self.written.append((path.name, text.strip()))
        if path.name == "unbind":
            (self.device(text) / "driver").unlink()
        elif path.name == "drivers_probe":
            override = (self.device(text) / "driver_override").read_text().strip()
            wanted = override if override not in ("", "(null)") else self.usual[text]
            if not (wanted == "vfio-pci" and self.refuses_vfio):
                self.bind(text, wanted)
        elif path.name == "reset" and self.broken_reset:
            raise OSError("reset failed")
        else:
            path.write_text(text)

    def vfio(self, healthy: bool = True) -> Vfio:
        return Vfio(sys=self.sys, proc=self.proc, write=self.write, healthy=lambda slot: healthy)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_all_functions_of_a_slot_go_and_come_back_together(kernel: Kernel) -> None:
    vfio = kernel.vfio()
    assert vfio.take(GPU) == [GPU, SOUND]
    assert (kernel.driver(GPU), kernel.driver(SOUND)) == ("vfio-pci", "vfio-pci")
    before = len(kernel.written)
    assert vfio.take(GPU) == [GPU, SOUND]
    assert len(kernel.written) == before, "what is done already stays done"
    assert vfio.give_back(GPU)
    assert (kernel.driver(GPU), kernel.driver(SOUND)) == ("nvidia", "snd_hda_intel")
    assert ("reset", "1") in kernel.written


def test_no_override_is_left_behind(kernel: Kernel) -> None:
    vfio = kernel.vfio()
    vfio.take(GPU)
    vfio.give_back(GPU)
    for slot in (GPU, SOUND):
        assert (kernel.device(slot) / "driver_override").read_text().strip() == ""


def test_a_shared_iommu_group_is_refused_and_bridges_do_not_count(kernel: Kernel) -> None:
    kernel.add(OTHER, "0x030200", group=7)
    with pytest.raises(VfioError, match=f"shares its IOMMU group with {OTHER}"):
        kernel.vfio().take(GPU)
    assert kernel.written == []


def test_without_an_iommu_nothing_is_passed_on(kernel: Kernel) -> None:
    (kernel.device(GPU) / "iommu_group").unlink()
    with pytest.raises(VfioError, match="no IOMMU group"):
        kernel.vfio().take(GPU)


def test_a_gpu_that_a_process_has_open_is_refused_before_the_unbind_would_hang(kernel: Kernel) -> None:
    about = kernel.proc / "driver/nvidia/gpus" / GPU / "information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t H200\nDevice Minor: \t 3\n")
    descriptors = kernel.proc / "4711/fd"
    descriptors.mkdir(parents=True)
    (descriptors / "9").symlink_to("/dev/nvidia3")
    with pytest.raises(VfioError, match="in use by the processes 4711"):
        kernel.vfio().take(GPU)
    (descriptors / "9").unlink()
    (descriptors / "9").symlink_to("/dev/nvidia4")
    assert kernel.vfio().take(GPU)


def test_a_device_that_does_not_answer_is_refused(kernel: Kernel) -> None:
    (kernel.device(GPU) / "config").write_bytes(b"\xff" * 64)
    with pytest.raises(VfioError, match="does not answer"):
        kernel.vfio().take(GPU)


def test_a_binding_that_fails_leaves_no_override(kernel: Kernel) -> None:
    kernel.refuses_vfio = True
    with pytest.raises(VfioError, match="bound to nothing, not to vfio-pci"):
        kernel.vfio().take(GPU)
    assert (kernel.device(GPU) / "driver_override").read_text().strip() == ""


def test_a_gpu_that_is_not_healthy_after_its_reset_is_out_of_service(kernel: Kernel) -> None:
    vfio = kernel.vfio(healthy=False)
    vfio.take(GPU)
    assert not vfio.give_back(GPU)
    assert vfio.problems == {GPU: f"{GPU} is not healthy after its reset"}


def test_a_reset_that_fails_is_tried_on_the_bus_above_and_then_given_up(kernel: Kernel) -> None:
    vfio = kernel.vfio()
    vfio.take(GPU)
    kernel.broken_reset = True
    assert not vfio.give_back(GPU)
    assert vfio.problems == {GPU: f"{GPU} cannot be reset"}
    (kernel.device(GPU).resolve().parent / "reset_subordinate").write_text("")
    assert vfio.give_back(GPU)
    assert (kernel.driver(GPU), vfio.problems) == ("nvidia", {})


def test_a_slot_that_is_not_there_is_named(kernel: Kernel) -> None:
    with pytest.raises(VfioError, match=r"0000:01:00\.0 is not there"):
        kernel.vfio().take("0000:01:00.0")
