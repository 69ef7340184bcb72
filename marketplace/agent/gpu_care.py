"""The care for GPUs that nobody uses: between two users of one, every hour, and when the operator asks for a reset.

A GPU that is not well is reset; one that is not well after that is out of service, and the reason is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec

from marketplace.agent.drivers.base import Driver, DriverError, Kind
from marketplace.agent.inventory_wire import Inventory
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.nvml import Nvml
from marketplace.agent.vfio import Vfio, VfioError


class GpuCare:
    """The GPUs of this machine that are under their own driver. Blocking: it belongs in a thread."""

    def __init__(self, vfio: Vfio, nvml: Nvml) -> None:
        """`vfio` keeps what is out of service; `nvml` knows who is well."""
        self._vfio = vfio
        self._nvml = nvml

    def given_back(self, uuids: list[str]) -> list[str]:
        """Look at the GPUs of a container that has ended, before anybody else gets them. Returns what is wrong.

        Parts of a GPU are not looked at: others may compute on its other parts.
        """
        slots = self._nvml.slots()
        return self._mend([slots[uuid] for uuid in uuids if uuid in slots])

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
            wrong = await asyncio.to_thread(self._care.check, self.used())
            found = [Problem("GpuUnhealthy", one) for one in wrong]
        for one in seen:
            driver = self._drivers.get(one.kind)
            if one.gpus and one.power == "Running" and driver is not None:
                with contextlib.suppress(DriverError):  # it is on its way out, or its engine does not answer
                    problem = await driver.gpu_problem(one.id)
                    if problem is not None:
                        found.append(Problem("GpuLost", f"{one.id}: {problem}", one.id))
        return found

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
        records = [one for one in self._keeper.records.all().values() if one.stage not in ("Ended", "Failed")]
        named = {name for one in records if one.spec is not None for name in one.spec.gpus}
        named |= {name for one in self._keeper.last_seen or () for name in one.gpus}
        gpus = [] if self.inventory is None else self.inventory.gpus
        whole = {part.uuid: gpu.pci_slot for gpu in gpus for part in gpu.mig_instances}
        slots = {whole.get(name) or self._keeper.slots.get(name, name) for name in named}
        return self._leases.held() | self.resetting | slots
