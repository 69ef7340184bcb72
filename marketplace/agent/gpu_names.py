"""GPUs without asking their driver: architectures by PCI device id, and the kernel modules that drive them."""

from __future__ import annotations

from marketplace.agent.inventory_wire import Architecture, KernelModules

_RANGES: tuple[tuple[int, int, Architecture], ...] = (
    # NVIDIA's device ids are given out in blocks, one or a few for each generation of chips.
    (0x0FC0, 0x103F, "Kepler"),
    (0x1180, 0x12BF, "Kepler"),
    (0x1340, 0x13FF, "Maxwell"),
    (0x1400, 0x147F, "Maxwell"),
    (0x15F0, 0x15FF, "Pascal"),
    (0x1B00, 0x1D7F, "Pascal"),
    (0x1D80, 0x1DFF, "Volta"),
    (0x1E00, 0x1FFF, "Turing"),
    (0x2080, 0x20FF, "Ampere"),
    (0x2180, 0x21FF, "Turing"),
    (0x2200, 0x22FF, "Ampere"),
    (0x2300, 0x233F, "Hopper"),
    (0x2340, 0x235F, "GraceHopper"),
    (0x2400, 0x25FF, "Ampere"),
    (0x2600, 0x28FF, "Ada"),
    (0x2900, 0x31FF, "Blackwell"),
)
_NVML: dict[int, Architecture] = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
_MODULES: dict[str, KernelModules] = {
    "Kepler": "ProprietaryOnly",
    "Maxwell": "ProprietaryOnly",
    "Pascal": "ProprietaryOnly",
    "Volta": "ProprietaryOnly",
    "Turing": "OpenOrProprietary",
    "Ampere": "OpenOrProprietary",
    "Ada": "OpenOrProprietary",
    "Hopper": "OpenOrProprietary",
    "GraceHopper": "OpenOnly",
    "Blackwell": "OpenOnly",
    "Rubin": "OpenOnly",
    "Unknown": "Unknown",
}


def by_device_id(device: int) -> Architecture:
    """The architecture of a PCI device id."""
    return next((name for first, last, name in _RANGES if first <= device <= last), "Unknown")


def by_nvml(number: int) -> Architecture:
    """The architecture as the driver numbers it."""
    return _NVML.get(number, "Unknown")


def kernel_modules(architecture: Architecture | str) -> KernelModules:
    """Which of the vendor's kernel modules drive the architecture: the node says it, and the server by itself, too."""
    return _MODULES.get(architecture, "Unknown")
