"""Virtual machines: one QEMU process each, told what to do over its control socket. No daemon stands between.

A machine is a folder: `domain.json` says that it is defined and whose it is, the overlay `disk.qcow2` is its disk, and
a process whose command line carries its mark is its running. All of it outlives the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from marketplace.agent.disks import BASE, DISK
from marketplace.agent.drivers import accelerator, qemu_command
from marketplace.agent.drivers.base import STOP_TIMEOUT_S, DriverError, Kind, ListingFailedError, Progress, Seen
from marketplace.agent.drivers.qemu_command import CONTROL, ERRORS, PIDFILE, SEED, SERIAL, Host
from marketplace.agent.images import ImageStore
from marketplace.agent.ports import reachable
from marketplace.agent.processes import find, kill, running, usage, wait_gone
from marketplace.agent.qmp import Qmp, QmpError
from marketplace.agent.records import write_whole
from marketplace.agent.seed import iso, make_seed
from marketplace.agent.vfio import Vfio, VfioError
from marketplace.agent.wire import Capabilities, Ending, Port, Power, Sample, Spec, Via, VmSpec

_log = logging.getLogger(__name__)

_DOMAIN = "domain.json"
_CONSOLE_LIMIT = 1 << 20
_ASK_EVERY_S = 5.0
_KILL_S = 10.0
_LOOK_S = 0.05
_STATES: dict[str, Power] = {
    "running": "Running",
    "paused": "Paused",
    "suspended": "PMSuspended",
    "shutdown": "Shutdown",
    "prelaunch": "Blocked",
    "inmigrate": "Blocked",
    "internal-error": "Crashed",
    "io-error": "Blocked",
    "guest-panicked": "Crashed",
}
_FORWARD = re.compile(r"^\s*(TCP|UDP)\[HOST_FORWARD\]\s+\S+\s+(\S+)\s+(\d+)\s+\S+\s+(\d+)", re.MULTILINE)


class _Domain(msgspec.Struct, frozen=True):
    """What `domain.json` says."""

    label: str
    id: str
    spec: VmSpec


class QemuDriver:
    """Makes virtual machines below one folder."""

    kind: Kind = "VirtualMachine"

    def __init__(
        self,
        machines: Path,
        volumes: Path,
        images: ImageStore,
        *,
        label: str,
        host: Host | None = None,
        run_as: str | None = None,
        phone_home: Callable[[str, str], str] | None = None,
        vfio: Vfio | None = None,
    ) -> None:
        """`label` is the node's; `host` None finds an accelerator by trying, and its machines run as `run_as`;
        `phone_home` makes the address that a guest calls, from its id and token.
        """
        self._machines = machines
        self._volumes = volumes
        self._images = images
        self._label = label
        self._host = host
        self._run_as = run_as
        self._phone_home = phone_home
        self._vfio = vfio or Vfio()
        for folder in (machines, volumes):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def probe(self) -> Capabilities:
        """Boot something. Where nothing boots, say why."""
        missing = [tool for tool in ("qemu-system-x86_64", "qemu-img") if shutil.which(tool) is None]
        if missing:
            return Capabilities(problems=[f"{' and '.join(missing)}: not found; install QEMU"])
        if self._host is None:
            chosen = await accelerator.choose("qemu-system-x86_64")
            if chosen is None:
                return Capabilities(problems=["QEMU boots no guest here"])
            self._host = Host(accelerator=chosen, run_as=self._run_as)
        return Capabilities(vm=True, accelerator=self._host.accelerator)

    async def listing(self) -> list[Seen]:
        """Every defined machine with the label."""
        try:
            found = [self._domain(path.parent.name) for path in sorted(self._machines.glob(f"*/{_DOMAIN}"))]
        except (OSError, msgspec.MsgspecError) as error:
            raise ListingFailedError(str(error)) from error
        return [await self._seen(domain) for domain in found if domain is not None and domain.label == self._label]

    async def create(self, id: str, spec: Spec, folder: Path, progress: Progress) -> None:
        """Disk, seed, definition, process; what is there already is left as it is."""
        assert isinstance(spec, VmSpec), "the keeper asks the driver of the kind"
        if not (folder / DISK).exists():
            progress("Pulling")
            await self._make_disk(spec, folder)
        progress("Creating")
        for volume in spec.volumes:
            await self._make_volume(volume.id, volume.size_bytes)
        home = None if self._phone_home is None else self._phone_home(id, spec.readiness_token)
        write_whole(folder / SEED, iso(make_seed(id, spec, phone_home=home)), durable=True)
        domain = _Domain(self._label, id, spec)
        write_whole(folder / _DOMAIN, msgspec.json.encode(domain), durable=True)
        await self._launch(domain)

    async def start(self, id: str) -> None:
        """Run what is defined."""
        await self._launch(self._defined(id))

    async def stop(self, id: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Press the power button until the guest obeys; after `timeout_s` pull the plug."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while (pid := self._pid(id)) is not None and loop.time() < end:
            with contextlib.suppress(DriverError):  # one that does not answer is waited for, and ended like the others
                await self._command(id, "system_powerdown")
            await wait_gone(pid, self._mark(id), min(_ASK_EVERY_S, max(0.0, end - loop.time())))
        await self._end(id)

    async def pause(self, id: str) -> None:
        """Stop its processors."""
        await self._command(id, "stop")

    async def resume(self, id: str) -> None:
        """Let its processors go on."""
        await self._command(id, "cont")

    async def reset(self, id: str) -> None:
        """Press the reset button; what was paused runs."""
        if self._pid(id) is not None:
            await self._command(id, "system_reset")
            await self._command(id, "cont")

    async def destroy(self, id: str) -> None:
        """End the process, give its GPUs back, and undefine it."""
        domain = self._domain(id)
        await self._end(id)
        if domain is not None:
            await asyncio.to_thread(self._give_back, domain.spec.gpus)
        for name in (_DOMAIN, SEED, CONTROL, PIDFILE, SERIAL, ERRORS):
            (self._folder(id) / name).unlink(missing_ok=True)

    async def publish(self, id: str, ports: list[Port]) -> None:
        """Add forwards to the running machine."""
        for port in ports:
            line = f"hostfwd_add n0 {qemu_command.forward(port)}"
            said = await self._command(id, "human-monitor-command", command_line=line)
            if said:
                raise DriverError("PlatformError", f"Port {port.host} of the node cannot be published.", str(said))

    async def readiness(self, id: str, spec: Spec) -> Via | None:
        """An SSH banner on the published port of SSH."""
        port = next((one for one in spec.ports if one.guest == 22 and one.proto == "tcp"), None)
        if port is None or self._pid(id) is None:
            return None
        return "ssh" if await reachable(port, b"SSH-") else None

    async def metrics(self, id: str) -> Sample | None:
        """Use by the process."""
        pid = self._pid(id)
        used = None if pid is None else usage(pid)
        return None if used is None else Sample(at=0, instance_id=id, cpu_seconds=used[0], memory_bytes=used[1])

    async def disk_use(self, id: str) -> int | None:
        """Its disk is as large as it is: the guest cannot write beyond."""
        return None

    async def gpu_problem(self, id: str) -> str | None:
        """A device is passed on as a whole: whether the guest sees it is the guest's matter."""
        return None

    async def tail_log(self, id: str, lines: int) -> str:
        """The end of what the guest wrote on its console."""
        path = self._folder(id) / SERIAL
        text = path.read_bytes()[-65536:].decode("utf-8", "replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    async def ending(self, id: str, now: int) -> Ending | None:
        """A guest may power off, and is started again."""
        return None

    async def _make_disk(self, spec: VmSpec, folder: Path) -> None:
        source = spec.image_path or spec.image_url
        if source is None:
            raise DriverError("BadImage", "The rental names no image.")
        file, image = await self._images.get(source, sha256=spec.image_sha256, max_bytes=spec.disk_bytes)
        base, fresh = folder / BASE, folder / f"{DISK}.new"
        base.unlink(missing_ok=True)
        base.hardlink_to(file)
        fresh.unlink(missing_ok=True)
        await _tool(
            folder,
            *("qemu-img", "create", "-q", "-f", "qcow2", "-F", image.format, "-b", BASE, fresh.name),
            str(spec.disk_bytes),
        )
        fresh.replace(folder / DISK)

    async def _make_volume(self, id: str, size: int) -> None:
        path = self._volumes / f"{id}.qcow2"
        if not path.exists():
            fresh = path.with_suffix(".new")
            await _tool(self._volumes, "qemu-img", "create", "-q", "-f", "qcow2", fresh.name, str(size))
            fresh.replace(path)

    async def _launch(self, domain: _Domain) -> None:
        """Start the process; it has left for the background when this returns."""
        id, spec, folder = domain.id, domain.spec, self._folder(domain.id)
        if self._pid(id) is not None:
            return
        if self._host is None:
            await self.probe()
        (folder / CONTROL).unlink(missing_ok=True)
        functions = await asyncio.to_thread(self._take, spec.gpus)
        volumes = [self._volumes / f"{volume.id}.qcow2" for volume in spec.volumes]
        words = qemu_command.command(self._host or Host(), self._label, id, spec, volumes=volumes, functions=functions)
        await self._detach(words, folder)
        if not await self._answers(id):
            errors = folder / ERRORS
            raise _not_started(errors.read_text("utf-8", "replace") if errors.exists() else "")
        await self._pin(domain)

    async def _detach(self, words: list[str], folder: Path) -> None:
        """Start a process that is nobody's child: it lives on when the agent ends."""
        with (folder / ERRORS).open("wb") as errors:
            quiet = asyncio.subprocess.DEVNULL
            starter = await asyncio.create_subprocess_exec(
                "setsid", "--fork", *words, cwd=folder, stdin=quiet, stdout=quiet, stderr=errors
            )
            await starter.wait()

    async def _answers(self, id: str) -> bool:
        """Wait until the new process listens to commands; False where it ends instead."""
        while find(self._mark(id)) is not None:
            try:
                async with Qmp(self._folder(id) / CONTROL):
                    return True
            except QmpError:
                await asyncio.sleep(_LOOK_S)
        return False

    async def _pin(self, domain: _Domain) -> None:
        """Bind each virtual CPU to a thread of its own, or all of them to the shared ones."""
        cpus = [cpu for one in domain.spec.numa or () for cpu in one.cpus]
        if not cpus:
            return
        answer = await self._command(domain.id, "query-cpus-fast")
        threads = sorted(answer or [], key=lambda one: int(one["cpu-index"]))
        for number, thread in enumerate(threads):
            own = {cpus[number]} if len(cpus) >= len(threads) else set(cpus)
            os.sched_setaffinity(int(thread["thread-id"]), own)

    def _take(self, gpus: list[str]) -> dict[str, list[str]]:
        try:
            return {slot: self._vfio.take(slot) for slot in gpus}
        except VfioError as error:
            raise DriverError("PlatformError", "A GPU of the node cannot be passed on now.", str(error)) from error

    def _give_back(self, gpus: list[str]) -> None:
        for slot in gpus:
            if not self._vfio.give_back(slot):
                _log.error("%s is out of service: %s", slot, self._vfio.problems[slot])

    async def _seen(self, domain: _Domain) -> Seen:
        power, ports = await self._state(domain.id)
        console = self._folder(domain.id) / SERIAL
        if console.exists() and console.stat().st_size > _CONSOLE_LIMIT:
            os.truncate(console, 0)  # it is appended to: the guest's next line begins the file anew
        ips = [domain.spec.network.ip] if domain.spec.network is not None and domain.spec.network.ip else []
        gpus = domain.spec.gpus
        return Seen(id=domain.id, kind=self.kind, power=power, ports=ports, ips=ips, gpus=gpus)

    async def _state(self, id: str) -> tuple[Power, list[Port]]:
        """Power and published ports. A process that does not answer is there, and nothing more is known of it."""
        if self._pid(id) is None:
            return "Shutoff", []
        try:
            async with Qmp(self._folder(id) / CONTROL) as qmp:
                status = await qmp.execute("query-status")
                said = await qmp.execute("human-monitor-command", command_line="info usernet")
        except QmpError:
            return ("Shutoff" if self._pid(id) is None else "NoState"), []
        ports = [
            Port(int(guest), int(host), "tcp" if proto == "TCP" else "udp", address.replace("*", "0.0.0.0"))
            for proto, address, host, guest in _FORWARD.findall(said)
        ]
        return _STATES.get(status["status"], "NoState"), ports

    async def _command(self, id: str, command: str, **arguments: str) -> Any:
        """One command, for a machine that runs."""
        try:
            async with Qmp(self._folder(id) / CONTROL) as qmp:
                return await qmp.execute(command, **arguments)
        except QmpError as error:
            if self._pid(id) is None:
                return None
            raise DriverError("PlatformError", "The virtual machine does not answer.", str(error)) from error

    async def _end(self, id: str) -> None:
        pid = self._pid(id)
        if pid is not None:
            kill(pid)
            if not await wait_gone(pid, self._mark(id), _KILL_S):
                raise DriverError("PlatformError", "The virtual machine does not end.", f"process {pid}")

    def _pid(self, id: str) -> int | None:
        """The machine's process, if it runs."""
        try:
            pid = int((self._folder(id) / PIDFILE).read_text())
        except (OSError, ValueError):
            return None
        return pid if running(pid, self._mark(id)) else None

    def _mark(self, id: str) -> bytes:
        return qemu_command.mark(self._label, id).encode()

    def _folder(self, id: str) -> Path:
        return self._machines / id

    def _domain(self, id: str) -> _Domain | None:
        path = self._folder(id) / _DOMAIN
        return msgspec.json.decode(path.read_bytes(), type=_Domain) if path.exists() else None

    def _defined(self, id: str) -> _Domain:
        domain = self._domain(id)
        if domain is None:
            raise DriverError("PlatformError", "The virtual machine is not on the node.")
        return domain


async def _tool(folder: Path, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    if process.returncode != 0:
        raise DriverError("PlatformError", "The node could not make a disk.", said.decode("utf-8", "replace"))


def _not_started(said: str) -> DriverError:
    """Why QEMU did not start, for the renter where the renter can do something about it."""
    if "host forwarding rule" in said:
        return DriverError("PlatformError", "A port of the node that was to be published is taken.", said)
    if "Cannot allocate memory" in said or "cannot set up guest memory" in said:
        return DriverError("PlatformError", "The node has no memory left for the virtual machine.", said)
    return DriverError("VmBootFailed", "The virtual machine could not be started.", said)
