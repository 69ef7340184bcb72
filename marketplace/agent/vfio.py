"""Passing GPUs to virtual machines: taking them from the host's driver and giving them back, one check at a time.

Everything is read from and written to sysfs. A step that could hang or harm is refused before it is begun: an unbind
blocks for as long as a process has the device open, and a device that does not come back clean is not handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

_BRIDGE = "0x06"
_VFIO = "vfio-pci"


class VfioError(Exception):
    """A GPU cannot be passed on, or does not come back. The message says which and why."""


def _write(path: Path, text: str) -> None:
    path.write_text(text)


class Vfio:
    """The GPUs of this machine as PCI devices."""

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        write: Callable[[Path, str], None] = _write,
        healthy: Callable[[str], bool] = lambda slot: True,
    ) -> None:
        """`write` writes to a control file; `healthy` looks at a GPU that came back."""
        self._devices = sys / "bus/pci/devices"
        self._drivers = sys / "bus/pci/drivers"
        self._probe = sys / "bus/pci/drivers_probe"
        self._proc = proc
        self._write = write
        self._healthy = healthy
        self.problems: dict[str, str] = {}
        """GPUs that did not come back, and why: they are out of service"""

    def functions(self, slot: str) -> list[str]:
        """All functions of a slot that are no bridges, the lowest first: graphics, sound, USB go together."""
        stem = slot.rpartition(".")[0]
        found = [path.name for path in self._devices.glob(f"{stem}.*") if not self._class(path).startswith(_BRIDGE)]
        if slot not in found:
            raise VfioError(f"{slot} is not there")
        return sorted(found)

    def take(self, slot: str) -> list[str]:
        """Bind all functions of a slot to vfio-pci and return them; nothing is changed where that cannot be done."""
        functions = self.functions(slot)
        if all(self._driver(function) == _VFIO for function in functions):
            return functions
        self._check_readable(slot)
        self._check_group(slot, functions)
        users = sorted(set(self._users(functions)))
        if users:
            raise VfioError(f"{slot} is in use by the processes {', '.join(map(str, users))}")
        for function in functions:
            self._rebind(function, _VFIO)
        return functions

    def give_back(self, slot: str) -> bool:
        """Reset all functions of a slot and bind them to their own driver again.

        False where that fails or the GPU is not healthy then: it is among the problems, and so out of service.
        """
        try:
            self._return(slot)
        except (VfioError, OSError) as error:
            self.problems[slot] = str(error)
            return False
        self.problems.pop(slot, None)
        return True

    def reset(self, slot: str) -> None:
        """Reset a GPU that no machine has, and let its own driver look at it. VfioError: nothing was done where a
        process has it open; it is among the problems where it is not well afterwards.
        """
        functions = self.functions(slot)
        users = sorted(set(self._users(functions)))
        if users:
            raise VfioError(f"{slot} is in use by the processes {', '.join(map(str, users))}")
        try:
            self._renew(slot, functions)
        except (VfioError, OSError) as error:
            self.problems[slot] = str(error)
            raise VfioError(str(error)) from error
        self.problems.pop(slot, None)

    def _return(self, slot: str) -> None:
        functions = self.functions(slot)
        if all(self._driver(function) not in (None, _VFIO) for function in functions):
            self._clear(functions)
            return
        self._renew(slot, functions)

    def _renew(self, slot: str, functions: list[str]) -> None:
        for function in functions:
            self._unbind(function)
        self._clear(functions)
        self._reset(slot)
        for function in functions:
            self._write(self._probe, function)
        self._check_readable(slot)
        if not self._healthy(slot):
            raise VfioError(f"{slot} is not healthy after its reset")

    def _rebind(self, function: str, driver: str) -> None:
        self._write(self._devices / function / "driver_override", driver)
        self._unbind(function)
        self._write(self._probe, function)
        if self._driver(function) != driver:
            found = self._driver(function)
            self._write(self._devices / function / "driver_override", "\n")
            raise VfioError(f"{function} is bound to {found or 'nothing'}, not to {driver}")

    def _unbind(self, function: str) -> None:
        driver = self._driver(function)
        if driver is not None:
            self._write(self._drivers / driver / "unbind", function)

    def _clear(self, functions: list[str]) -> None:
        """Let the kernel choose drivers again: a forgotten override keeps a GPU from its driver for ever."""
        for function in functions:
            path = self._devices / function / "driver_override"
            if path.exists() and path.read_text().strip() not in ("", "(null)"):
                self._write(path, "\n")

    def _reset(self, slot: str) -> None:
        """Reset the function; where that cannot be done or fails, the bus above it."""
        device = self._devices / slot
        bridge = device.resolve().parent
        for path in (device / "reset", bridge / "reset_subordinate", bridge / "reset"):
            if path.exists():
                try:
                    self._write(path, "1")
                except OSError:
                    continue
                if self._config(slot)[:2] != b"\xff\xff":
                    return
        raise VfioError(f"{slot} cannot be reset")

    def _check_readable(self, slot: str) -> None:
        if self._config(slot)[:2] in (b"", b"\xff\xff"):
            raise VfioError(f"{slot} does not answer: its configuration space cannot be read")

    def _check_group(self, slot: str, functions: list[str]) -> None:
        """The group is what the hardware can isolate: nothing else may be in it, except bridges."""
        group = self._devices / slot / "iommu_group" / "devices"
        if not group.is_dir():
            raise VfioError(f"{slot} has no IOMMU group: switch the IOMMU on in the firmware and in the kernel")
        others = [
            path.name
            for path in sorted(group.iterdir())
            if path.name not in functions and not self._class(self._devices / path.name).startswith(_BRIDGE)
        ]
        if others:
            raise VfioError(f"{slot} shares its IOMMU group with {', '.join(others)}")

    def _users(self, functions: list[str]) -> Iterator[int]:
        """Processes that have a device file of the vendor's driver open, or the group's."""
        nodes = {f"/dev/nvidia{self._minor(function)}" for function in functions if self._minor(function) is not None}
        groups = {(self._devices / function / "iommu_group").resolve().name for function in functions}
        nodes |= {f"/dev/vfio/{group}" for group in groups}
        for process in self._proc.iterdir():
            if process.name.isdigit():
                try:
                    opened = {str(path.readlink()) for path in (process / "fd").iterdir()}
                except OSError:
                    continue  # it has ended, or is not ours to look at
                if opened & nodes:
                    yield int(process.name)

    def _minor(self, function: str) -> str | None:
        """The number of a GPU's device file."""
        path = self._proc / "driver/nvidia/gpus" / function / "information"
        if not path.exists():
            return None
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return lines.get("Device Minor", "").strip() or None

    def _driver(self, function: str) -> str | None:
        path = self._devices / function / "driver"
        return path.resolve().name if path.exists() else None

    def _class(self, device: Path) -> str:
        path = device / "class"
        return path.read_text().strip() if path.exists() else ""

    def _config(self, slot: str) -> bytes:
        path = self._devices / slot / "config"
        return path.read_bytes()[:64] if path.exists() else b""
