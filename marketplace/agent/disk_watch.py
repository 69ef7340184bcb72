"""Holds containers to their disks where nothing else does: who has written more than was rented is stopped.

A volume of a container is a folder, and its own disk a layer of the engine's storage: both are measured, every few
seconds and never for longer than a small part of the time. Volumes keep what was written; the container is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec

from marketplace.agent.drivers.base import Driver, DriverError, Kind
from marketplace.agent.keeper import Keeper
from marketplace.agent.records import Record
from marketplace.agent.wire import ContainerSpec, Ending, Volume

KIND = "DiskFull"
LOOK_S = 10.0
_SHARE = 20
"""A look may take a twentieth of the time."""


class Full(msgspec.Struct, frozen=True):
    """A container that was stopped, and why, in words for its renter."""

    instance_id: str
    message: str


class DiskWatch:
    """Looks at the disks of one node. For one event loop."""

    def __init__(
        self, keeper: Keeper, drivers: Mapping[Kind, Driver], volumes: Callable[[], dict[str, int]] = dict
    ) -> None:
        """`volumes` measures all volumes, in a thread."""
        self.used: dict[str, int] | None = None
        """bytes of each volume, as measured last; None before that"""
        self.pause_s = LOOK_S
        """how long to wait before the next look"""
        self._before: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._keeper = keeper
        self._drivers = drivers
        self._volumes = volumes

    async def look(self) -> list[Full]:
        """Measure, and stop who is beyond what they have."""
        began = time.monotonic()
        self._before, self._now = self._now, await asyncio.to_thread(self._volumes)
        self.used = self._now
        found = [full for record in self._keeper.records.all().values() if (full := await self._check(record))]
        self.pause_s = max(LOOK_S, _SHARE * (time.monotonic() - began))
        return found

    async def _check(self, record: Record) -> Full | None:
        driver, spec = self._drivers.get("Container"), record.spec
        if driver is None or record.stage != "Created" or not isinstance(spec, ContainerSpec):
            return None
        with contextlib.suppress(DriverError):  # on its way out, or its engine does not answer: looked at again soon
            why = await self._beyond(driver, record.id, spec)
            if why is not None:
                return await self._stop(driver, record.id, f"The container was stopped: {why}.")
        return None

    async def _stop(self, driver: Driver, id: str, message: str) -> Full:
        """Whoever looks at what is stopped finds out why; a container that is stopped is over."""
        self._keeper.mark_ended(id, Ending(at=self._keeper.now(), cause="BadCommand", message=message))
        try:
            await driver.stop(id, 0)
        except DriverError:
            self._keeper.mark_ended(id, None)
            raise
        return Full(id, message)

    async def _beyond(self, driver: Driver, id: str, spec: ContainerSpec) -> str | None:
        running = any(one.id == id and one.power == "Running" for one in self._keeper.last_seen or ())
        over = next((one for one in spec.volumes if running and self._grows_beyond(one)), None)
        if over is not None:
            return f"its volume at {over.mount_path} grew to {self._now[over.id]} bytes, and has {over.size_bytes}"
        used = await driver.disk_use(id) if spec.disk_bytes else None
        if used is None or used <= spec.disk_bytes:
            return None
        return f"it has written {used} bytes, and its disk has {spec.disk_bytes}"

    def _grows_beyond(self, volume: Volume) -> bool:
        """Who only deletes on a volume that is too full goes on."""
        used = self._now.get(volume.id, 0)
        return used > max(volume.size_bytes, self._before.get(volume.id, used))
