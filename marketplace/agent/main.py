"""`headrace node`: the agent from its first line to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import msgspec

from marketplace.agent import cdi, credentials, volumes
from marketplace.agent.client import ServerClient
from marketplace.agent.credentials import CredentialError, Credentials
from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.base import Driver, Kind
from marketplace.agent.drivers.podman import PodmanDriver
from marketplace.agent.drivers.qemu import QemuDriver
from marketplace.agent.drivers.qemu_command import Accelerator, Host
from marketplace.agent.gpu_care import GpuCare
from marketplace.agent.images import ImageStore
from marketplace.agent.inventory import Machine
from marketplace.agent.keeper import Keeper
from marketplace.agent.lease_door import lease_app
from marketplace.agent.leases import LeaseBook
from marketplace.agent.mig import Mig
from marketplace.agent.node import Agent, Surroundings
from marketplace.agent.nvml import Nvml
from marketplace.agent.options import NodeSettings
from marketplace.agent.readiness import guest_app, phone_home_url
from marketplace.agent.records import RecordError, Records, write_whole
from marketplace.agent.serving import served, tcp_listener, unix_listener
from marketplace.agent.vfio import Vfio
from marketplace.agent.wire import Spec, VmSpec

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class _Own(msgspec.Struct, frozen=True):
    """What the node remembers of itself."""

    machine_id: str
    guest_port: int


class NodeError(Exception):
    """The agent cannot start. The message says why, in one line."""


def run(settings: NodeSettings) -> int:
    """Run the agent until SIGTERM or SIGINT; return the exit status."""
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for chatty in ("httpx2", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        _check(settings)
        file = settings.credentials or settings.data / credentials.FILE
        credential = credentials.load(os.environ, file)
        credentials.protect(file)
        with _alone(settings.data):
            return asyncio.run(_run(settings, credential))
    except (CredentialError, NodeError, RecordError, OSError) as error:
        print(f"headrace node: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Hold the folder: two agents on one folder would undo each other's work."""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise NodeError(f"the folder {data} cannot be used: {error.strerror}") from error
    with (data / "agent.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NodeError(f"another agent runs on {data}") from error
        yield


async def _run(settings: NodeSettings, credential: Credentials) -> int:
    data = settings.data.resolve()
    kinds = _kinds(settings, Records(data / "instances"))
    own, remembered = _own(data)
    nvml = Nvml()
    vfio = Vfio(healthy=nvml.healthy)
    guests = tcp_listener(_LOOPBACK, own.guest_port)
    port = guests.getsockname()[1]
    if not remembered or port != own.guest_port:
        own = _Own(own.machine_id, port)
        write_whole(data / "node.json", msgspec.json.encode(own), durable=True)
    local = tuple(path.resolve() for path in settings.image_folders)
    images = ImageStore(data / "images", now=_now, local=local, private=settings.private_images)
    mig = Mig(data / "mig.json", reset=vfio.reset, listed=cdi.list_devices)
    care = GpuCare(vfio, nvml, mig)
    drivers = _drivers(kinds, settings, data, own, images, vfio, care, mig)
    agent, keeper, leases = _agent(settings, credential, data, own, drivers, images, vfio, nvml, care)
    engines = unix_listener(data / "leases.sock")
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with served(guest_app(keeper), guests), served(lease_app(leases, _now), engines):
            running = asyncio.create_task(agent.run())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            leases.close()
    finally:
        for driver in drivers.values():
            if isinstance(driver, PodmanDriver):
                await driver.close()
    return 0


def _drivers(
    kinds: list[Kind],
    settings: NodeSettings,
    data: Path,
    own: _Own,
    images: ImageStore,
    vfio: Vfio,
    care: GpuCare,
    mig: Mig,
) -> dict[Kind, Driver]:
    """The drivers of these kinds."""
    drivers: dict[Kind, Driver] = {}
    if "VirtualMachine" in kinds:
        accelerator: Accelerator | None = None if settings.accelerator == "auto" else settings.accelerator
        drivers["VirtualMachine"] = QemuDriver(
            data / "instances",
            data / "volumes",
            images,
            label=own.machine_id,
            host=None if accelerator is None else Host(accelerator=accelerator, run_as=settings.run_as),
            run_as=settings.run_as,
            phone_home=lambda id, token: phone_home_url(own.guest_port, id, token),
            vfio=vfio,
        )
    if "Container" in kinds:
        drivers["Container"] = PodmanDriver(
            data / "containers",
            data / "volumes",
            label=own.machine_id,
            socket=settings.container_socket,
            insecure=settings.insecure_registries,
            devices=mig.make,
            returned=partial(_look_at, care),
        )
    return drivers


def _check(settings: NodeSettings) -> None:
    try:
        server = httpx2.URL(settings.server)
    except httpx2.InvalidURL:
        server = httpx2.URL()
    if server.scheme not in ("http", "https") or not server.host:
        raise NodeError(f"--server is not like https://headrace.example.com: {settings.server}")


def _kinds(settings: NodeSettings, records: Records) -> list[Kind]:
    """The kinds of machines that can be made here. NodeError where what was asked for, or everything, is missing.

    A kind of which there are machines stays, whatever is missing now: nothing may be concluded about them.
    """
    tools: dict[Kind, tuple[str, ...]] = {"VirtualMachine": ("qemu-system-x86_64", "qemu-img")}
    tools["Container"] = () if settings.container_socket is not None else ("podman",)
    only: dict[str, Kind] = {"qemu": "VirtualMachine", "podman": "Container"}
    asked = [only[settings.driver]] if settings.driver in only else list(tools)
    missing = {kind: [tool for tool in tools[kind] if shutil.which(tool) is None] for kind in asked}
    there = [one.spec for one in records.all().values() if one.stage != "Ended"]
    found = [kind for kind in asked if not missing[kind] or any(_may_be(spec, kind) for spec in there)]
    said = [f"{' and '.join(names)} not found" for names in missing.values() if names]
    if not found:
        raise NodeError(f"nothing can be run here: {', '.join(said)}; install QEMU or podman")
    for problem in said:
        _log.warning("%s: this node runs less than it could", problem)
    return found


def _may_be(spec: Spec | None, kind: Kind) -> bool:
    return spec is None or (kind == "VirtualMachine") == isinstance(spec, VmSpec)


def _agent(
    settings: NodeSettings,
    credential: Credentials,
    data: Path,
    own: _Own,
    drivers: dict[Kind, Driver],
    images: ImageStore,
    vfio: Vfio,
    nvml: Nvml,
    care: GpuCare,
) -> tuple[Agent, Keeper, LeaseBook]:
    machine = Machine(data, nvml=nvml)
    pokes: list[Agent] = []
    keeper = Keeper(
        records=Records(data / "instances"),
        disks=RetainedDisks(data / "retained"),
        drivers=drivers,
        now=_now,
        changed=lambda: pokes[0].poke() if pokes else None,
    )
    leases = LeaseBook(data / "leases.json")
    around = Surroundings(
        machine_id=own.machine_id,
        boot_id=machine.boot_id(),
        inventory=lambda: machine.inventory(ip=settings.address, problems=vfio.problems),
        samples=nvml.samples,
        drivers=drivers,
        now=_now,
        gpus=care,
        keep_images=images.keep_ready if "VirtualMachine" in drivers else None,
        erase_volumes=partial(volumes.erase, data / "volumes"),
        used_volumes=partial(volumes.used, data / "volumes"),
    )
    agent = Agent(ServerClient(settings.server, credential), keeper, leases, around)
    pokes.append(agent)
    return agent, keeper, leases


def _look_at(care: GpuCare, names: list[str]) -> None:
    for problem in care.given_back(names):
        _log.error("%s", problem)


def _own(data: Path) -> tuple[_Own, bool]:
    """What the node remembers of itself, or a fresh identity."""
    try:
        return msgspec.json.decode((data / "node.json").read_bytes(), type=_Own), True
    except FileNotFoundError:
        return _Own(str(uuid.uuid4()), 0), False
    except msgspec.MsgspecError as error:
        raise NodeError(f"{data / 'node.json'}: {error}") from error


def _now() -> int:
    return time.time_ns() // 1000
