"""Parts of GPUs: made for whoever rented them, kept while somebody has them, and never taken from the operator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pynvml
import pytest

from marketplace.agent.gpu_care import GpuCare
from marketplace.agent.inventory_wire import Gpu as GpuFacts
from marketplace.agent.inventory_wire import MigProfile
from marketplace.agent.mig import Mig, MigError
from marketplace.agent.mig_facts import Part, parent, part
from marketplace.agent.nvml import Nvml
from marketplace.agent.vfio import Vfio, VfioError
from tests.marketplace.agent.nvml_library import Library

HALF, OTHER, SMALL = "GPU-0/0/3g.71gb", "GPU-0/4/3g.71gb", "GPU-0/2/1g.18gb"


class Bench:
    """One GPU and what makes parts of it."""

    def __init__(self, folder: Path, library: Library) -> None:
        self.folder, self.gpu, self.listed, self.resets = folder, library.gpus[0], 0, 0
        self.refused = ""
        self.mig = self.again()

    def again(self) -> Mig:
        """The same, in a process that began anew."""
        return Mig(self.folder / "mig.json", reset=self.reset, listed=self.list)

    def list(self) -> None:
        self.listed += 1

    def reset(self, slot: str) -> None:
        assert slot == self.gpu.slot
        if self.refused:
            raise VfioError(self.refused)
        self.resets += 1
        self.gpu.reset()


@pytest.fixture
def bench(tmp_path: Path, library: Library) -> Bench:
    return Bench(tmp_path, library)


def test_names_of_parts_are_read_as_they_are_written() -> None:
    assert part(HALF) == Part("GPU-0", 0, "3g.71gb") and str(part(HALF)) == HALF
    assert [part(name) for name in ("GPU-0", "0000:65:00.0", "MIG-5", "GPU-0/x/1g", "GPU-0/3")] == [None] * 5
    assert [parent(name) for name in (HALF, "GPU-0")] == ["GPU-0"] * 2


def test_parts_are_made_once_and_the_gpu_is_whole_again_after_its_last(bench: Bench) -> None:
    assert bench.mig.make(["GPU-0"]) == ["GPU-0"] and not bench.gpu.split and bench.listed == 0
    first = bench.mig.make([HALF])
    assert bench.gpu.split and bench.gpu.shown == [("3g.71gb", 0)]
    assert bench.mig.make([HALF]) == bench.again().make([HALF]) == first and len(bench.gpu.parts) == 1
    second, third = bench.again().make([OTHER, "GPU-9"])
    assert second not in first and third == "GPU-9" and bench.listed == 4
    bench.mig.release([HALF, "GPU-0", SMALL])
    assert bench.gpu.shown == [("3g.71gb", 4)] and bench.gpu.split
    bench.again().release([OTHER])
    assert bench.gpu.shown == [] and not bench.gpu.split and bench.mig.made() == frozenset()
    assert bench.resets == 0


def test_what_the_operator_made_is_used_and_stays(bench: Bench) -> None:
    bench.gpu.split = bench.gpu.pending = True
    number = bench.gpu.make("3g.71gb", 4)
    assert bench.mig.make([OTHER]) == [f"MIG-GPU-0-{number}"]
    bench.mig.make([SMALL])
    bench.mig.release([OTHER, SMALL])
    assert bench.gpu.shown == [("3g.71gb", 4)] and bench.gpu.split
    with pytest.raises(MigError, match="the GPUs' driver refuses"):
        bench.mig.make(["GPU-0/4/2g.35gb"])
    assert bench.gpu.shown == [("3g.71gb", 4)]
    bench.mig.release(bench.mig.made())
    assert bench.mig.made() == frozenset() and bench.gpu.shown == [("3g.71gb", 4)]


def test_an_instance_that_computes_nothing_yet_is_given_what_it_computes_with(bench: Bench) -> None:
    """An agent was killed between the two."""
    (uuid,) = bench.mig.make([HALF])
    bench.gpu.computes[1].clear()
    assert bench.again().make([HALF]) == [uuid] and bench.gpu.computes == {1: [2]}


def test_a_part_that_somebody_computes_on_stays_until_they_are_gone(bench: Bench) -> None:
    bench.mig.make([HALF])
    bench.gpu.processes[1] = [77]
    bench.mig.release([HALF])
    assert bench.gpu.shown == [("3g.71gb", 0)] and bench.mig.made() == {HALF, "GPU-0"}
    bench.gpu.processes.clear()
    bench.mig.release([HALF])
    assert not bench.gpu.split


def test_older_gpus_are_reset_to_be_split_and_to_be_joined(bench: Bench) -> None:
    bench.gpu.older = True
    bench.mig.make([HALF])
    assert (bench.gpu.split, bench.resets) == (True, 1)
    bench.refused = "in use by the processes 5"
    bench.mig.release([HALF])
    assert bench.gpu.shown == [] and bench.gpu.split and bench.mig.made() == {"GPU-0"}, "tried again later"
    bench.refused = ""
    bench.mig.release([])
    assert (bench.gpu.split, bench.resets, bench.mig.made()) == (False, 2, frozenset())
    bench.refused = "in use by the processes 5"
    with pytest.raises(MigError, match="in use by the processes 5"):
        bench.mig.make([HALF])


def test_a_gpu_on_which_somebody_computes_is_not_split(bench: Bench) -> None:
    bench.gpu.processes[0] = [77]
    with pytest.raises(MigError, match="GPU-0 cannot be split: somebody computes on it"):
        bench.mig.make([HALF])
    for name, why in (("GPU-7/0/3g.71gb", "driver refuses"), ("GPU-0/1/3g.71gb", "no 3g.71gb at slice 1")):
        bench.gpu.processes.clear()
        with pytest.raises(MigError, match=why):
            bench.mig.make([name])
    assert bench.gpu.shown == []


def test_what_a_machine_that_began_anew_lost_is_forgotten(bench: Bench) -> None:
    bench.mig.make([HALF])
    bench.gpu.pending = False
    bench.gpu.reset()
    bench.again().release([HALF])
    assert bench.mig.made() == frozenset() and not bench.gpu.split


def test_a_list_of_parts_that_cannot_be_read_is_told_and_nothing_is_taken_away(bench: Bench) -> None:
    bench.mig.make([HALF])
    (bench.folder / "mig.json").write_text("{")
    care = GpuCare(Vfio(), Nvml(pynvml), bench.mig)
    assert care.made() == frozenset()
    (told,) = care.given_back([HALF])
    assert told.startswith("parts of GPUs stay") and bench.gpu.shown == [("3g.71gb", 0)]


def test_the_inventory_tells_of_parts_whether_the_gpu_is_split_or_not(bench: Bench) -> None:
    facts = GpuFacts(pci_slot=bench.gpu.slot, vendor_id=0x10DE, device_id=1)
    ((before,), version) = Nvml(pynvml).decorate([facts])
    assert (before.uuid, before.mig_enabled, before.mig_instances, version) == ("GPU-0", False, [], "570.1")
    assert MigProfile(profile="3g.71gb", size=4, placements=[0, 4]) in before.mig_profiles
    bench.mig.make([OTHER])
    ((after,), _) = Nvml(pynvml).decorate([facts])
    assert after.mig_enabled and after.mig_profiles == before.mig_profiles
    (shown,) = after.mig_instances
    assert (shown.profile, shown.start, shown.size) == ("3g.71gb", 4, 4)
    assert msgspec.json.decode(msgspec.json.encode(after), type=GpuFacts) == after
