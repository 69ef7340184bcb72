"""Any order of wishes, faults, deaths and silence: nothing of others is touched, nothing is done twice or lost."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor, KilledError, Machine
from marketplace.agent.keeper import Keeper
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import Records
from marketplace.agent.wire import Desired, DesiredInstance, Observed, Settings, VmSpec

IDS = ["a", "b", "c"]
GPUS = ["0000:01:00.0", "0000:02:00.0"]
ids = st.sampled_from(IDS)


class AgentMachine(RuleBasedStateMachine):
    """A server's wishes, a hypervisor, and an agent that may die at any line that has an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.temporary = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.folder = Path(self.temporary.name)
        self.hypervisor = Hypervisor()
        self.foreign = Machine(id="foreign", label=None, power="Running", gpus=[], ports=[])
        self.hypervisor.machines["foreign"] = self.foreign
        self.wishes: dict[str, DesiredInstance] = {}
        self.ended: set[str] = set()
        self.lost: set[str] = set()
        self.now = 1_000 * SECOND
        self.checked = 0

    def teardown(self) -> None:
        self.heal()
        self.loop.close()
        self.temporary.cleanup()

    @initialize()
    def begin(self) -> None:
        self.restart()

    @rule()
    def restart(self) -> None:
        """The process dies and another one begins on the same folder."""
        records = Records(self.folder / "instances", durable=False)
        disks = RetainedDisks(self.folder / "retained")
        drivers = {"VirtualMachine": FakeDriver(self.hypervisor)}
        self.keeper = Keeper(records=records, disks=disks, drivers=drivers, now=lambda: self.now)  # type: ignore[arg-type]
        self.keeper.connected = True

    @rule(id=ids, gpu=st.none() | st.sampled_from(GPUS))
    def rent(self, id: str, gpu: str | None) -> None:
        if id in self.wishes or id in self.ended:
            return
        spec = VmSpec(name=id, vcpu=1, dram_bytes=1 << 30, disk_bytes=1 << 30, gpus=[gpu] if gpu else [])
        self.wishes[id] = DesiredInstance(id=id, gen=1, want="Running", spec=spec)

    @rule(id=ids, want=st.sampled_from(["Running", "Stopped", "Paused", "Absent"]))
    def change(self, id: str, want: Any) -> None:
        wish = self.wishes.get(id)
        if wish is not None and wish.want != "Absent":
            self.wishes[id] = msgspec.structs.replace(wish, want=want, gen=wish.gen + 1)

    @rule(id=ids)
    def reset(self, id: str) -> None:
        wish = self.wishes.get(id)
        if wish is not None:
            self.wishes[id] = msgspec.structs.replace(wish, reset_seq=wish.reset_seq + 1)

    @rule(id=ids)
    def lose(self, id: str) -> None:
        """The server is restored from an old copy: it knows nothing of the instance."""
        if self.wishes.pop(id, None) is not None:
            self.lost.add(id)
            self.ended.add(id)

    @rule(id=ids)
    def guest_shuts_down(self, id: str) -> None:
        machine = self.hypervisor.machines.get(id)
        if machine is not None:
            machine.power = "Shutoff"

    @rule(failing=st.booleans())
    def listing(self, failing: bool) -> None:
        self.hypervisor.listing_fails = failing

    @rule(
        method=st.sampled_from(["create", "start", "stop", "pause", "resume", "reset", "destroy"]),
        fault=st.sampled_from(["error", "killed-before", "killed-after"]),
    )
    def script(self, method: str, fault: Any) -> None:
        self.hypervisor.faults.clear()
        self.hypervisor.script([(method, fault)])

    @rule(seconds=st.sampled_from([1, 70, 700]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @rule(connected=st.booleans())
    def line(self, connected: bool) -> None:
        self.keeper.connected = connected

    @rule()
    def new_epoch(self) -> None:
        self.keeper.begin_session(Settings())

    @rule(times=st.integers(1, 3))
    def rounds(self, times: int) -> None:
        """Desired state arrives, as often as you like; the agent looks and acts; the server reads the report."""
        try:
            for _ in range(times):
                self.loop.run_until_complete(self.once())
        except KilledError:
            self.check_destroyed()
            self.restart()

    @precondition(lambda self: not self.hypervisor.faults and not self.hypervisor.listing_fails)
    @rule()
    def repetition_changes_nothing(self) -> None:
        """When everything has been done, the same message once more has no effect."""
        self.quiet()
        done, records = list(self.hypervisor.done), self.keeper.records.all()
        told = self.loop.run_until_complete(self.once())
        assert self.hypervisor.done == done
        assert self.keeper.records.all() == records
        assert told == self.loop.run_until_complete(self.once())

    async def once(self) -> Observed | None:
        self.keeper.desire(Desired(instances=list(self.wishes.values())))
        told = await self.keeper.round()
        try:
            await self.keeper.settle()
        finally:
            self.check_destroyed()
        if told is not None and self.keeper.connected:
            self.keeper.disown([one.id for one in told.instances if one.id not in self.wishes])
            for one in told.instances:
                self.hear(one.id, one.phase)
        return told

    def hear(self, id: str, phase: str) -> None:
        """The server ends what failed, and drops what is absent."""
        wish = self.wishes.get(id)
        if wish is not None and phase == "Failed" and wish.want != "Absent":
            self.wishes[id] = msgspec.structs.replace(wish, want="Absent", gen=wish.gen + 1)
        if wish is not None and wish.want == "Absent" and phase == "Absent":
            del self.wishes[id]
            self.ended.add(id)

    def check_destroyed(self) -> None:
        """Every end of a machine had a reason: the wish, a failed creation, or the rules for strays."""
        for method, id in self.hypervisor.done[self.checked :]:
            if method == "destroy":
                wish, record = self.wishes.get(id), self.keeper.records.get(id)
                assert record is not None
                failed = record.error is not None
                stray = id in self.lost and self.now - record.created_at > 600 * SECOND
                assert failed or stray or (wish is not None and wish.want == "Absent"), id
        self.checked = len(self.hypervisor.done)

    def quiet(self) -> None:
        for _ in range(12):
            self.now += 61 * SECOND
            self.loop.run_until_complete(self.once())

    def heal(self) -> None:
        """In the end every fault is over: what was to go is gone, and what was to be is as it was wished."""
        self.hypervisor.faults.clear()
        self.hypervisor.listing_fails = False
        self.keeper.connected = True
        self.now += 700 * SECOND
        self.quiet()
        for id, wish in self.wishes.items():
            record, machine = self.keeper.records.get(id), self.hypervisor.machines.get(id)
            assert wish.want != "Absent", "the end of a machine is always told"
            if machine is None:
                holder = [one for one in self.hypervisor.machines.values() if set(one.gpus) & set(wish.spec.gpus)]
                assert record is None, "only what waits for a GPU is not there"
                assert holder
            else:
                assert record is not None
                assert record.gen_applied == wish.gen
        assert set(self.hypervisor.machines) <= {"foreign", *self.wishes}, "strays are gone when their grace is over"

    @invariant()
    def machines_of_others_are_untouched(self) -> None:
        assert self.hypervisor.machines.get("foreign") == Machine(
            id="foreign", label=None, power="Running", gpus=[], ports=[]
        )

    @invariant()
    def no_gpu_has_two_machines(self) -> None:
        held = [gpu for one in self.hypervisor.machines.values() for gpu in one.gpus]
        assert len(held) == len(set(held))

    @invariant()
    def everything_with_the_label_has_a_record(self) -> None:
        mine = {one.id for one in self.hypervisor.machines.values() if one.label == "node"}
        assert mine <= set(Records(self.folder / "instances").all())

    @invariant()
    def nothing_is_made_or_reset_twice(self) -> None:
        for id, machine in self.hypervisor.machines.items():
            wish = self.wishes.get(id)
            if wish is not None:
                assert machine.resets <= wish.reset_seq
        made = [
            id for id in IDS if sum(1 for method, one in self.hypervisor.done if (method, one) == ("create", id)) > 2
        ]
        assert made == [], "at most the first time, and the one that was cut off"


TestAgent = AgentMachine.TestCase
TestAgent.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


class TestAgentLong(AgentMachine.TestCase):  # type: ignore[name-defined,misc]
    """The same, for ten thousand steps."""

    pytestmark = pytest.mark.slow
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
