"""The agent: one session with the server after another, and beside it the care for the machines of this node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from marketplace.agent import disk_watch, readiness
from marketplace.agent.client import RefusedError, ServerClient, ServerError, StaleSessionError, UnreachableError
from marketplace.agent.disk_watch import DiskWatch
from marketplace.agent.drivers.base import Driver, DriverError, Kind
from marketplace.agent.gpu_care import GpuCare, GpuRounds
from marketplace.agent.inventory_wire import Inventory
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.reconcile import SECOND
from marketplace.agent.relayed import Relayed
from marketplace.agent.vfio import VfioError
from marketplace.agent.wire import (
    Capabilities,
    Command,
    CommandResult,
    DesiredImage,
    Event,
    GpuSample,
    Metrics,
    Observed,
    Poll,
    Polled,
    Ready,
    Register,
    Registered,
    Sample,
    Shutdown,
    VmSpec,
    VolumeUse,
    digest,
)
from marketplace.relay.access import RelayGrant, Relaying

_log = logging.getLogger(__name__)

GPU_CHECK_S = 3600.0
ROUND_S = 2.0
LOOK_S = 0.5
METRICS_S = 15.0
INVENTORY_S = 60.0
_RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_LOG_LINES = 200


class Surroundings(msgspec.Struct, kw_only=True):
    """What an agent needs of its machine."""

    machine_id: str
    boot_id: str
    inventory: Callable[[], Inventory]
    samples: Callable[[], list[GpuSample]] = list
    drivers: Mapping[Kind, Driver]
    now: Callable[[], int]
    gpus: GpuCare | None = None
    """looks after GPUs that nobody uses"""
    erase_volumes: Callable[[list[str]], None] = lambda ids: None
    """removes the files of volumes"""
    used_volumes: Callable[[], dict[str, int]] = dict
    """bytes that the files of volumes take"""
    keep_images: Callable[[list[DesiredImage]], Awaitable[list[str]]] | None = None
    """fetches images in advance, and says which cannot be had; None where nothing is kept"""


class Agent:
    """One node. Belongs to one event loop."""

    def __init__(self, client: ServerClient, keeper: Keeper, leases: LeaseBook, around: Surroundings) -> None:
        """Nothing happens before `run`."""
        self.keeper = keeper
        self.leases = leases
        self.gpus = GpuRounds(around.gpus, keeper, leases, around.drivers)
        self.disks = DiskWatch(keeper, around.drivers, around.used_volumes)
        self.relayed = Relayed(self._grant)
        self.registered = asyncio.Event()
        self._client = client
        self._around = around
        self._session: Registered | None = None
        self._heard_at = 0
        self._rev = 0
        self._observed: Observed | None = None
        self._observed_rev = -1
        self._told_digest = ""
        self._inventory: Inventory | None = None
        self._told_inventory = ""
        self._events: list[Event] = []
        self._results: list[CommandResult] = []
        self._commands: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._looked = asyncio.Condition()
        self._news = asyncio.Event()

    def poke(self) -> None:
        """Something changed: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Care for the node until cancelled. Machines keep running afterwards."""
        try:
            async with asyncio.TaskGroup() as group:
                for work in (
                    self._sessions,
                    self._rounds,
                    self._readiness,
                    self._measure,
                    self._keep_leases,
                    self._images,
                    self._look_after_gpus,
                    self._look_after_disks,
                    self.relayed.run,
                ):
                    group.create_task(work())
        finally:
            await self._leave()

    async def _sessions(self) -> None:
        failures = 0
        capabilities = await self._probe()
        while True:
            try:
                await self._register(capabilities)
                failures = 0
                while True:
                    await self._poll()
                    failures = 0
            except StaleSessionError:
                _log.info("the session is over; registering again")
            except UnreachableError as error:
                _log.warning("the server does not answer, machines keep running: %s", error)
            except RefusedError as error:
                _log.error("the server refuses this node: %s", error)
            failures += 1
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S)) - 1])

    async def _probe(self) -> Capabilities:
        """What all drivers together can do."""
        found = [await driver.probe() for driver in self._around.drivers.values()]
        for problem in (problem for one in found for problem in one.problems):
            _log.warning("%s", problem)
        return Capabilities(
            vm=any(one.vm for one in found),
            container=any(one.container for one in found),
            vm_mig=any(one.vm_mig for one in found),
            accelerator=next((one.accelerator for one in found if one.accelerator), None),
            container_engine=next((one.container_engine for one in found if one.container_engine), None),
            container_disk=next((one.container_disk for one in found if one.container_disk), None),
            problems=[problem for one in found for problem in one.problems],
        )

    async def _register(self, capabilities: Capabilities) -> None:
        self.keeper.desire(None)
        observed = await self.keeper.round()
        await self._look_at_hardware()
        if self._session is None:
            await self._check_gpus()  # whatever was found out about them is forgotten with the process before
        assert self._inventory is not None
        message = Register(
            machine_id=self._around.machine_id,
            boot_id=self._around.boot_id,
            agent_version=_version(),
            inventory=self._inventory,
            capabilities=capabilities,
            observed=observed,
        )
        session = await self._client.register(message)
        _log.info("registered as node %s, epoch %d", session.node_id, session.epoch)
        self._session, self._told_digest, self._told_inventory = session, "", self._inventory.digest()
        self._heard()
        self.keeper.begin_session(session.settings)
        self.keeper.desire(session.desired)
        self.leases.hear(session.desired.leases, self._around.now())
        self.relayed.hear(session.desired.relayed)
        self._rev = session.desired_rev
        self.registered.set()
        self.poke()

    async def _poll(self) -> None:
        """One report and its answer. What changes meanwhile is reported at once, in a poll of its own."""
        session = self._session
        assert session is not None
        await self._have_looked()
        self._news.clear()
        message, events, results = self._report(session)
        asking = asyncio.create_task(self._client.poll(message, wait_s=session.poll_wait_s))
        changing = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({asking, changing}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            answer = asking.result()
        finally:
            for one in (asking, changing):
                one.cancel()
            await asyncio.gather(asking, changing, return_exceptions=True)
        self._events = [event for event in self._events if event.id not in events]
        self._results = [result for result in self._results if result.id not in results]
        self._told_digest = "" if answer.want_observed else message.observed_digest
        if message.inventory is not None:
            self._told_inventory = message.inventory.digest()
        self._take(answer)

    def _report(self, session: Registered) -> tuple[Poll, set[str], set[str]]:
        named = "" if self._observed is None else digest(self._observed)
        inventory = self._inventory
        changed = inventory is not None and inventory.digest() != self._told_inventory
        message = Poll(
            session_id=session.session_id,
            epoch=session.epoch,
            applied_rev=self._observed_rev,
            observed=None if named == self._told_digest else self._observed,
            observed_digest=named,
            inventory=inventory if changed else None,
            events=self._events[:100],
            command_results=list(self._results),
            commands=list(self._commands),
            leases=self.leases.reports(),
        )
        return message, {one.id for one in message.events}, {one.id for one in message.command_results}

    def _take(self, answer: Polled) -> None:
        self._heard()
        if answer.desired is not None and answer.desired_rev != self._rev:
            self.keeper.desire(answer.desired)
            self.leases.hear(answer.desired.leases, self._around.now())
            self.relayed.hear(answer.desired.relayed)
            self._rev = answer.desired_rev
            self.poke()
        self.keeper.disown(answer.unknown)
        for command in answer.commands:
            known = command.id in self._commands or any(one.id == command.id for one in self._results)
            if not known:
                self._commands[command.id] = asyncio.create_task(self._obey(command))

    def _heard(self) -> None:
        self._heard_at = self._around.now()
        self.keeper.connected = True

    async def _have_looked(self) -> None:
        """Wait until the machines have been looked at under the newest wishes."""
        async with self._looked:
            await self._looked.wait_for(lambda: self._observed_rev == self._rev)

    async def _rounds(self) -> None:
        """Look and act whenever something changes, and every few seconds because things change by themselves."""
        while True:
            self._wake.clear()
            session = self._session
            if session is not None and self._around.now() - self._heard_at > session.lease_s * SECOND:
                self.keeper.connected = False
            if session is not None:
                try:
                    await self._round()
                except OSError as error:  # a full disk, say: machines are cared for again when it is over
                    _log.error("the machines cannot be looked after: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._wake.wait()

    async def _round(self) -> None:
        rev, before = self._rev, self._observed
        desired = self.keeper.desired
        if desired is not None and desired.erased_volumes:
            await asyncio.to_thread(self._around.erase_volumes, desired.erased_volumes)
        self.keeper.leased = self.leases.held() | self.gpus.resetting
        observed = await self.keeper.round()
        async with self._looked:
            self._observed, self._observed_rev = observed, rev
            self._looked.notify_all()
        if observed != before:
            self._news.set()

    async def _readiness(self) -> None:
        """Look whether machines are ready, and say so until the server has taken it."""
        while True:
            if readiness.waits(self.keeper):
                await readiness.look(self.keeper)
            for record in readiness.untold(self.keeper):
                assert isinstance(record.spec, VmSpec)
                assert record.ready_via is not None
                told = Ready(instance_id=record.id, token=record.spec.readiness_token, via=record.ready_via)
                try:
                    await self._client.ready(told)
                except RefusedError as error:
                    _log.warning("%s is ready, and the server does not want to know: %s", record.id, error)
                except ServerError as error:
                    _log.warning("%s is ready, told again in a moment: %s", record.id, error)
                    continue
                self.keeper.mark_told(record.id)
            await asyncio.sleep(LOOK_S)

    async def _measure(self) -> None:
        """Samples every few seconds, and the hardware once a minute."""
        passed = 0.0
        while True:
            await asyncio.sleep(METRICS_S)
            passed += METRICS_S
            if passed >= INVENTORY_S:
                passed = 0.0
                await self._look_at_hardware()
            if self._session is not None:
                with contextlib.suppress(ServerError):  # samples may be lost
                    used = self.disks.used
                    told = Metrics(
                        session_id=self._session.session_id,
                        samples=await self._taken(),
                        volumes=None if used is None else [VolumeUse(id, size) for id, size in used.items()],
                    )
                    await self._client.metrics(told)

    async def _taken(self) -> list[Sample]:
        now = self._around.now()
        samples = [Sample(at=now, gpus=await asyncio.to_thread(self._around.samples))]
        for record in self.keeper.records.all().values():
            driver = self.keeper.driver(record)
            if driver is None or record.stage != "Created":
                continue
            with contextlib.suppress(DriverError):  # on its way out, or its engine does not answer
                taken = await driver.metrics(record.id)
                if taken is not None:
                    samples.append(msgspec.structs.replace(taken, at=now, instance_id=record.id))
        return samples

    async def _look_at_hardware(self) -> None:
        inventory = await asyncio.to_thread(self._around.inventory)
        if self._inventory is None or inventory.digest() != self._inventory.digest():
            self._inventory = inventory
            self._news.set()
        self.keeper.slots = {gpu.uuid: gpu.pci_slot for gpu in inventory.gpus if gpu.uuid}
        self.leases.uuids = {slot: uuid for uuid, slot in self.keeper.slots.items()}
        self.gpus.inventory = inventory

    async def _look_after_gpus(self) -> None:
        while True:
            await asyncio.sleep(GPU_CHECK_S)
            await self._check_gpus()

    async def _look_after_disks(self) -> None:
        while True:
            for full in await self.disks.look():
                self._happened(disk_watch.KIND, full.message, full.instance_id)
            await asyncio.sleep(self.disks.pause_s)

    async def _check_gpus(self) -> None:
        for problem in await self.gpus.check():
            self._happened(problem.kind, problem.message, problem.instance_id)
        await self._look_at_hardware()

    async def _keep_leases(self) -> None:
        """End engines that outlived their leases, and report what engines ask for."""
        while True:
            for killed in self.leases.enforce(self._around.now()):
                self._happened("LeaseOutlived", f"an engine outlived its lease {killed} and was killed")
            if self.leases.changed():
                self.poke()
                self._news.set()
            await self.leases.wait(LOOK_S)

    async def _grant(self) -> RelayGrant | None:
        session = self._session
        assert session is not None  # only its answers say that there is a relay
        return await self._client.relay(Relaying(session_id=session.session_id, epoch=session.epoch))

    async def _obey(self, command: Command) -> None:
        try:
            output = await self._do(command)
            self._results.append(CommandResult(id=command.id, ok=True, output=output))
        except (DriverError, LookupError, OSError, ServerError, VfioError) as error:
            self._results.append(CommandResult(id=command.id, ok=False, output=str(error)))
        finally:
            del self._commands[command.id]
            self._news.set()

    async def _do(self, command: Command) -> str:
        if command.kind == "collect_logs":
            id = command.args["instance_id"]
            record = self.keeper.records.get(id)
            driver = None if record is None else self.keeper.driver(record)
            if driver is None:
                raise LookupError(f"there is no machine {id} on this node")
            return await driver.tail_log(id, _LOG_LINES)
        if command.kind == "sync_images":
            return await self._sync_images()
        if command.kind == "self_test":
            return msgspec.json.encode(await self._probe()).decode()
        if command.kind == "gpu_reset":
            try:
                return await self.gpus.reset(command.args["pci_slot"])
            finally:
                await self._look_at_hardware()
        raise LookupError(f"this version of the agent cannot do {command.kind}")

    async def _sync_images(self) -> str:
        """Fetch what the server wants to be ready here, as far as it is not."""
        desired = self.keeper.desired
        if self._around.keep_images is None or desired is None:
            return ""
        problems = await self._around.keep_images(desired.images)
        for problem in problems:
            self._happened("ImageNotReady", problem)
        return "\n".join(problems)

    async def _images(self) -> None:
        """Images in advance of their first rental, once after each change of what is wanted."""
        last: list[DesiredImage] = []
        while True:
            desired = self.keeper.desired
            if desired is not None and desired.images != last:
                last = desired.images
                await self._sync_images()
            await asyncio.sleep(ROUND_S)

    def _happened(self, kind: str, message: str, instance_id: str | None = None) -> None:
        _log.warning("%s", message)
        at = self._around.now()
        self._events.append(Event(id=str(uuid.uuid4()), at=at, kind=kind, message=message, instance_id=instance_id))
        self._news.set()

    async def _leave(self) -> None:
        """Say goodbye, if anybody listens."""
        for task in self._commands.values():
            task.cancel()
        await self.keeper.close()
        if self._session is not None:
            with contextlib.suppress(ServerError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._client.shutdown(Shutdown(session_id=self._session.session_id))


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"
