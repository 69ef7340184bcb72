"""Which accelerator works here, found out by booting something: a device file that exists proves nothing.

There are hosts whose `/dev/kvm` answers every question and on which no guest gets beyond its first instructions.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from marketplace.agent.drivers.qemu_command import Accelerator

_PORT = 0xF4
_SAYS = 0x10
_STATUS = (_SAYS << 1) | 1  # isa-debug-exit ends QEMU with this
_DEADLINE_S = 10.0


def boot_sector() -> bytes:
    """512 bytes that a BIOS runs: enter 32-bit protected mode, then end QEMU with a status."""
    code = bytes.fromhex(
        "fa"  # cli
        "31c0 8ed8"  # xor ax, ax; mov ds, ax
        "0f0116 2e7c"  # lgdt [0x7c2e]
        "0f20c0 6683c801 0f22c0"  # mov eax, cr0; or eax, 1; mov cr0, eax
        "ea 1c7c 0800"  # jmp 8:0x7c1c
    )
    code = code.ljust(0x1C, b"\x90")
    code += bytes([0xB8, _SAYS, 0, 0, 0, 0xBA, _PORT, 0, 0, 0, 0xEF, 0xF4, 0xEB, 0xFD])  # out dx, eax; hlt; jmp
    code = code.ljust(0x2E, b"\0")
    code += (15).to_bytes(2, "little") + (0x7C34).to_bytes(4, "little")  # two descriptors, at 0x7c34
    code += bytes(8) + bytes.fromhex("ffff0000009acf00")  # none; flat 32-bit code
    return code.ljust(510, b"\0") + b"\x55\xaa"


async def works(accelerator: Accelerator, binary: str, *, deadline_s: float = _DEADLINE_S) -> bool:
    """Whether a guest boots with the accelerator within the deadline."""
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as folder:
        disk = Path(folder) / "probe.img"
        disk.write_bytes(boot_sector().ljust(64 * 512, b"\0"))
        words = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-m", "32M"]
        words += ["-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max", "-no-reboot"]
        words += ["-device", f"isa-debug-exit,iobase={_PORT:#x},iosize=0x4"]
        words += ["-drive", f"file={disk},format=raw,if=ide,readonly=off"]
        try:
            quiet = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(*words, stdin=quiet, stdout=quiet, stderr=quiet)
        except OSError:
            return False
        try:
            async with asyncio.timeout(deadline_s):
                return await process.wait() == _STATUS
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def choose(binary: str) -> Accelerator | None:
    """The best accelerator that boots a guest; None where there is none."""
    best_first: tuple[Accelerator, ...] = ("kvm", "tcg")
    for accelerator in best_first:
        if await works(accelerator, binary):
            return accelerator
    return None
