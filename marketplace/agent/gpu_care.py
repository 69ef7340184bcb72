"""The care for GPUs that nobody uses: between two users of one, every hour, and when the operator asks for a reset.

A GPU that is not well is reset; one that is not well after that is out of service, and the reason is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping

import msgspec

from marketplace.agent.drivers.base import Driver, DriverError, Kind
from marketplace.agent.inventory_wire import Inventory
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.mig import Mig, MigError
from marketplace.agent.mig_facts import parent, part
from marketplace.agent.nvml import Nvml
from marketplace.agent.vfio import Vfio, VfioError


class GpuCare:
    """The GPUs of this machine that are under their own driver. Blocking: it belongs in a thread."""

    def __init__(self, vfio: Vfio, nvml: Nvml, mig: Mig | None = None) -> None:
        """`vfio` keeps what is out of service; `nvml` knows who is well; `mig` takes parts of GPUs away."""
        self._vfio = vfio
        self._nvml = nvml
        self._mig = mig

    def given_back(self, names: list[str]) -> list[str]:
        """Look at the GPUs of a container that has ended, before anybody else gets them. Returns what is wrong.

        Parts of a GPU are taken away and not looked at: others may compute on its other parts.
        """
        wrong = self.release(names) if any(map(part, names)) else []
        slots = self._nvml.slots()
        return wrong + self._mend([slots[name] for name in names if name in slots])

    def made(self) -> frozenset[str]:
        """Parts of GPUs that were made for somebody, and GPUs that were split for them; none where nobody knows."""
        try:
            return frozenset() if self._mig is None else self._mig.made()
        except MigError:
            return frozenset()

    def release(self, names: Collection[str]) -> list[str]:
        """Take parts of GPUs away. Returns what is wrong."""
        try:
            if self._mig is not None:
                self._mig.release(names)
        except MigError as error:
            return [f"parts of GPUs stay: {error}"]
        return []

    def check(self, used: frozenset[str]) -> list[str]:
        """Look at every GPU but those that are used, and again at those out of service. Returns what is wrong.

        Nothing is concluded where the driver is not loaded.
        """
        slots = self._nvml.slots()
        return self._mend(sorted({*slots.values(), *self._vfio.problems} - used)) if slots else []

    def reset(self, slot: str) -> None:
        """Reset a GPU that nobody uses. VfioError where a process has it open, or it is not well afterwards."""
        self._vfio.reset(slot)

    def _mend(self, slots: list[str]) -> list[str]:
        found = []
        for slot in slots:
            problem = self._nvml.problem(slot)
            if problem is None:
                self._vfio.problems.pop(slot, None)
                continue
            try:
                self._vfio.reset(slot)
            except VfioError as error:
                self._vfio.problems[slot] = f"{problem}; {error}"
                found.append(f"the GPU {slot} is out of service: {problem}; {error}")
            else:
                found.append(f"the GPU {slot} was reset: {problem}")
        return found


class Problem(msgspec.Struct, frozen=True):
    """Something that the operator should know of a GPU."""

    kind: str
    message: str
    instance_id: str | None = None


class GpuRounds:
    """Looks after the GPUs of a node whose machines and engines come and go. For one event loop."""

    def __init__(self, care: GpuCare | None, keeper: Keeper, leases: LeaseBook, drivers: Mapping[Kind, Driver]) -> None:
        """Without `care`, only machines are asked."""
        self.inventory: Inventory | None = None
        self.resetting: set[str] = set()
        """PCI slots on which nothing may begin"""
        self._care = care
        self._keeper = keeper
        self._leases = leases
        self._drivers = drivers

    async def check(self) -> list[Problem]:
        """Look at the GPUs that nobody uses, and ask the machines that have some whether they still see them."""
        seen = self._keeper.last_seen
        if seen is None:
            return []  # the machines could not be listed: nothing is known of who uses what
        found = []
        if self._care is not None:
            wrong = await self._sweep(self._care)
            wrong += await asyncio.to_thread(self._care.check, self.used())
            found = [Problem("GpuUnhealthy", one) for one in wrong]
        for one in seen:
            driver = self._drivers.get(one.kind)
            if one.gpus and one.power == "Running" and driver is not None:
                with contextlib.suppress(DriverError):  # it is on its way out, or its engine does not answer
                    problem = await driver.gpu_problem(one.id)
                    if problem is not None:
                        found.append(Problem("GpuLost", f"{one.id}: {problem}", one.id))
        return found

    async def _sweep(self, care: GpuCare) -> list[str]:
        """Take parts away that nobody has: remains of machines that never came to be. Whose record is not there by now
        had not begun when they were listed."""
        made = await asyncio.to_thread(care.made)
        return await asyncio.to_thread(care.release, made - self._named()) if made else []

    async def reset(self, slot: str) -> str:
        """Reset a GPU, and let nobody begin on it meanwhile. LookupError where it is not there or in use; VfioError."""
        if self._care is None or self.inventory is None or slot not in {gpu.pci_slot for gpu in self.inventory.gpus}:
            raise LookupError(f"there is no GPU {slot} on this node")
        if slot in self.used():
            raise LookupError(f"the GPU {slot} is in use")
        self.resetting.add(slot)
        self._keeper.leased |= {slot}
        try:
            await asyncio.to_thread(self._care.reset, slot)
        finally:
            self.resetting.discard(slot)
        return f"the GPU {slot} was reset"

    def used(self) -> frozenset[str]:
        """PCI slots that engines or machines have, or are about to have."""
        named = self._named()
        gpus = [] if self.inventory is None else self.inventory.gpus
        whole = {part.uuid: gpu.pci_slot for gpu in gpus for part in gpu.mig_instances}
        slots = {whole.get(name) or self._keeper.slots.get(parent(name), parent(name)) for name in named}
        return self._leases.held() | self.resetting | slots

    def _named(self) -> set[str]:
        """What machines have, or are about to have, as they name it."""
        records = [one for one in self._keeper.records.all().values() if one.stage not in ("Ended", "Failed")]
        named = {name for one in records if one.spec is not None for name in one.spec.gpus}
        return named | {name for one in self._keeper.last_seen or () for name in one.gpus}
