"""A node's machines through failures, deaths of the agent and silence of the server, on a scripted hypervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from marketplace.agent.disks import BASE, DISK, RetainedDisks
from marketplace.agent.drivers.base import Kind
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor, KilledError, Machine
from marketplace.agent.keeper import Keeper
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import RecordError, Records
from marketplace.agent.wire import ContainerSpec, Desired, DesiredInstance, Ending, ObservedInstance, Settings, VmSpec


class Node:
    """An agent over a folder and a hypervisor, driven round by round."""

    def __init__(self, folder: Path, kind: Kind = "VirtualMachine") -> None:
        self.folder = folder
        self.kind = kind
        self.hypervisor = Hypervisor()
        self.now = 1_000 * SECOND
        self.restart()

    def restart(self) -> None:
        """A new process on the same folder, in a session of its own."""
        records = Records(self.folder / "instances", durable=False)
        disks = RetainedDisks(self.folder / "retained")
        drivers = {self.kind: FakeDriver(self.hypervisor, kind=self.kind)}
        self.keeper = Keeper(records=records, disks=disks, drivers=drivers, now=lambda: self.now)
        self.keeper.connected = True

    def rounds(self, *wanted: DesiredInstance, count: int = 2) -> dict[str, ObservedInstance]:
        """Deliver, look and act, and say what is told in the end."""

        async def run() -> dict[str, ObservedInstance]:
            for _ in range(count):
                self.keeper.desire(Desired(instances=list(wanted)))
                await self.keeper.round()
                await self.keeper.settle()
            told = await self.keeper.round()
            await self.keeper.settle()
            return {} if told is None else {one.id: one for one in told.instances}

        return asyncio.run(run())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def wish(id: str = "a", want: Any = "Running", gen: int = 1, spec: Any = None, **fields: Any) -> DesiredInstance:
    made = spec or VmSpec(name="m", vcpu=1, dram_bytes=1 << 30, disk_bytes=5 << 30)
    return DesiredInstance(id=id, want=want, gen=gen, spec=made, **fields)


def test_a_machine_lives_and_ends(node: Node) -> None:
    told = node.rounds(wish())["a"]
    assert (told.phase, told.power, told.gen_applied, told.started_at) == ("Running", "Running", 1, node.now)
    assert node.rounds(wish(want="Paused", gen=2))["a"].power == "Paused"
    assert node.rounds(wish(want="Stopped", gen=3), count=4)["a"].power == "Shutoff"
    assert node.rounds(wish(gen=4), count=4)["a"].power == "Running"
    assert node.rounds(wish(want="Absent", gen=5))["a"].phase == "Absent"
    assert node.hypervisor.machines == {}
    assert node.rounds() == {}
    assert not (node.folder / "instances" / "a").exists()


def test_how_a_container_ended_is_told_with_the_next_look(tmp_path: Path) -> None:
    node = Node(tmp_path, kind="Container")
    box = wish(spec=ContainerSpec(name="c", image="i"))
    assert node.rounds(box)["a"].ended is None
    node.hypervisor.machines["a"].power, node.hypervisor.machines["a"].status = "Exited", 3
    node.hypervisor.script([("ending", "error")])
    assert node.rounds(box)["a"].ended is None, "nobody knows yet"
    node.now += SECOND
    seen = node.now
    told = node.rounds(box, count=1)["a"]
    assert (told.power, told.ended) == (
        "Exited",
        Ending(at=seen, cause="BadCommand", message="It ended with status 3."),
    )
    node.now += SECOND
    node.restart()
    assert node.rounds(box)["a"] == told, "and is remembered"
    gone = node.rounds(msgspec.structs.replace(box, want="Absent", gen=2))["a"]
    assert (gone.phase, gone.ended, node.hypervisor.machines) == ("Absent", None, {})


def test_a_failed_creation_is_cleaned_up_and_told(node: Node) -> None:
    node.hypervisor.script([("create", "error")])
    told = node.rounds(wish())["a"]
    assert told.phase == "Failed"
    assert told.error is not None
    assert told.error.message == "create went wrong as scripted"
    assert ("destroy", "a") in node.hypervisor.done


def test_a_clean_up_that_fails_is_tried_again_after_a_rest(node: Node) -> None:
    node.hypervisor.script([("create", "error"), ("destroy", "error")])
    assert node.rounds(wish())["a"].phase == "Creating"
    node.now += 2 * SECOND
    assert node.rounds(wish())["a"].phase == "Failed"


@pytest.mark.parametrize("fault", ["killed-before", "killed-after"])
def test_an_agent_killed_while_it_creates_finishes_when_it_is_back(node: Node, fault: Any) -> None:
    node.hypervisor.script([("create", fault)])
    with pytest.raises(KilledError):
        node.rounds(wish())
    node.restart()
    assert node.rounds(wish())["a"].phase == "Running"
    assert node.hypervisor.machines["a"].starts == 1


@pytest.mark.parametrize(("fault", "resets"), [("killed-before", 0), ("killed-after", 1)])
def test_a_reset_is_never_repeated(node: Node, fault: Any, resets: int) -> None:
    node.rounds(wish())
    node.hypervisor.script([("reset", fault)])
    with pytest.raises(KilledError):
        node.rounds(wish(reset_seq=1))
    node.restart()
    assert node.rounds(wish(reset_seq=1))["a"].reset_applied == 1
    assert node.hypervisor.machines["a"].resets == resets


def test_machines_keep_running_when_the_server_is_gone(node: Node) -> None:
    node.rounds(wish())
    node.restart()
    node.keeper.connected = False

    async def alone() -> Any:
        told = await node.keeper.round()
        await node.keeper.settle()
        return told

    told = asyncio.run(alone())
    assert told.instances[0].phase == "Running"
    assert node.hypervisor.done == [("create", "a")]


def test_a_listing_that_fails_hides_nothing_and_loses_nothing(node: Node) -> None:
    node.rounds(wish())
    node.hypervisor.listing_fails = True
    assert node.rounds(wish(want="Absent", gen=2)) == {}
    assert "a" in node.hypervisor.machines
    node.hypervisor.listing_fails = False
    assert node.rounds(wish(want="Absent", gen=2))["a"].phase == "Absent"


def test_the_machine_of_somebody_else_is_invisible(node: Node) -> None:
    for label in (None, "another node"):
        id = f"of-{label}".replace(" ", "-")
        node.hypervisor.machines[id] = Machine(id=id, label=label, power="Running", gpus=[], ports=[])
    node.keeper.disown(list(node.hypervisor.machines))
    node.now += 10_000 * SECOND
    assert node.rounds(count=5) == {}
    assert len(node.hypervisor.machines) == 2


def test_a_verdict_of_an_older_epoch_does_not_count(node: Node) -> None:
    node.rounds(wish())
    node.now += 10_000 * SECOND
    node.keeper.disown(["a"])
    node.keeper.desire(Desired())
    node.keeper.begin_session(Settings())
    assert node.rounds(count=5)["a"].phase == "Running"
    node.keeper.disown(["a"])
    assert node.rounds(count=5) == {}
    assert node.hypervisor.machines == {}


def put_disk(node: Node, id: str) -> None:
    folder = node.folder / "instances" / id
    (folder / DISK).write_text(f"disk of {id}")
    (folder / BASE).write_text("base")


def test_a_disk_is_kept_for_its_grace_and_serves_the_next_rental(node: Node) -> None:
    node.rounds(wish())
    put_disk(node, "a")
    node.rounds(wish(want="Absent", gen=2, erase_after_s=60))
    disks = RetainedDisks(node.folder / "retained")
    (kept,) = disks.all()
    assert (kept.instance_id, kept.expires_at, kept.disk_bytes) == ("a", node.now + 60 * SECOND, 5 << 30)
    again = VmSpec(name="m", vcpu=1, dram_bytes=1 << 30, disk_bytes=5 << 30, reuse_environment_id="a")
    assert node.rounds(wish("b", spec=again))["b"].phase == "Running"
    assert (node.folder / "instances" / "b" / DISK).read_text() == "disk of a"
    assert disks.all() == []


def test_a_disk_that_is_nobody_s_any_more_goes_before_its_time(node: Node) -> None:
    node.rounds(wish())
    put_disk(node, "a")
    node.rounds(wish(want="Absent", gen=2, erase_after_s=60))

    async def told(*ids: str) -> list[str]:
        node.keeper.desire(Desired(erased_disks=list(ids)))
        observed = await node.keeper.round()
        assert observed is not None
        return [disk.instance_id for disk in observed.environments]

    for _ in range(2):
        assert asyncio.run(told("b", "../instances", "")) == ["a"]
    for _ in range(2):
        assert asyncio.run(told("a")) == [] and list((node.folder / "retained").iterdir()) == []


def test_a_disk_claimed_by_a_rental_that_fails_is_kept_as_before(node: Node) -> None:
    node.rounds(wish())
    put_disk(node, "a")
    node.rounds(wish(want="Absent", gen=2, erase_after_s=60))
    disks = RetainedDisks(node.folder / "retained")
    before = disks.all()
    node.hypervisor.script([("create", "error")])
    again = VmSpec(name="m", vcpu=1, dram_bytes=1 << 30, disk_bytes=5 << 30, reuse_environment_id="a")
    assert node.rounds(wish("b", spec=again))["b"].phase == "Failed"
    assert disks.all() == before


def test_a_rental_of_a_disk_that_is_gone_fails_with_a_reason(node: Node) -> None:
    again = VmSpec(name="m", vcpu=1, dram_bytes=1 << 30, disk_bytes=5 << 30, reuse_environment_id="../../etc")
    error = node.rounds(wish("b", spec=again))["b"].error
    assert error is not None
    assert error.message == "The saved environment is no longer on the node."


def test_a_disk_is_erased_when_its_grace_is_over(node: Node) -> None:
    node.rounds(wish())
    put_disk(node, "a")
    node.rounds(wish(want="Absent", gen=2, erase_after_s=60))
    node.now += 61 * SECOND
    node.rounds(wish(want="Absent", gen=2, erase_after_s=60))
    assert list((node.folder / "retained").iterdir()) == []


def test_a_grace_of_zero_keeps_no_disk(node: Node) -> None:
    node.rounds(wish())
    put_disk(node, "a")
    node.rounds(wish(want="Absent", gen=2, erase_after_s=0))
    assert RetainedDisks(node.folder / "retained").all() == []
    assert not (node.folder / "instances" / "a" / DISK).exists()


def test_a_kind_that_the_node_does_not_run_fails_with_a_reason(node: Node) -> None:
    from marketplace.agent.wire import ContainerSpec

    error = node.rounds(wish(spec=ContainerSpec(name="c", image="i")))["a"].error
    assert error is not None
    assert "does not run machines of the kind Container" in error.message


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "record.json").write_text("{")
    with pytest.raises(RecordError, match=r"a/record\.json"):
        Records(tmp_path)
