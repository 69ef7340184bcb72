"""Keeps this node's machines as the server wants them: looks, decides, acts, and tells what it saw.

Every action runs as a task of its own, one for a machine at a time. An action writes the machine's record around what
it does, so that it can be cut off at any line and finished, or done again, by the next process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import msgspec

from marketplace.agent import reconcile
from marketplace.agent.disks import GoneError, RetainedDisks
from marketplace.agent.drivers.base import Driver, DriverError, Kind, ListingFailedError, Seen
from marketplace.agent.reconcile import SECOND, Action, View
from marketplace.agent.records import Record, Records
from marketplace.agent.wire import Desired, DesiredInstance, Ending, Failure, Observed, Settings, Via, VmSpec

_log = logging.getLogger(__name__)
_LISTINGS = 5
_REST_S = 60


class Keeper:
    """The machines of one node. For one event loop."""

    def __init__(
        self,
        *,
        records: Records,
        disks: RetainedDisks,
        drivers: Mapping[Kind, Driver],
        now: Callable[[], int],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when something happened that the server may want to know."""
        self.records = records
        self.settings = Settings()
        self.connected = False
        self.leased: frozenset[str] = frozenset()
        self.slots: dict[str, str] = {}
        self.last_seen: list[Seen] | None = None
        self._desired: Desired | None = None
        self._unknown: set[str] = set()
        self._disks = disks
        self._drivers = drivers
        self.now = now
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._phases: dict[str, Literal["Pulling", "Creating"]] = {}
        self._finished = 0
        self._failed: dict[str, tuple[int, int]] = {}

    def begin_session(self, settings: Settings) -> None:
        """A new epoch: what the server said in an older one no longer counts."""
        self.settings = settings
        self._desired = None
        self._unknown.clear()

    def desire(self, desired: Desired | None) -> None:
        """Take what the server wants; None where nothing of this session is known yet."""
        self._desired = desired
        if desired is not None:
            self._unknown -= {instance.id for instance in desired.instances}

    def disown(self, unknown: list[str]) -> None:
        """Take the server's word that it does not know these ids."""
        wanted = set() if self._desired is None else {instance.id for instance in self._desired.instances}
        self._unknown |= set(unknown) - wanted

    @property
    def desired(self) -> Desired | None:
        """What the server wants, as far as this session knows."""
        return self._desired

    async def round(self) -> Observed | None:
        """Look, tell, and start what is to be done. None where a listing failed."""
        if self._desired is not None:
            self._disks.erase(self._desired.erased_disks)
        self.last_seen = await self._list()
        view = self._view()
        told = reconcile.observe(view, self._phases, self._disks.all())
        for action in reconcile.decide(view):
            self._start(action)
        if self._desired is not None:
            self._disks.erase_expired(self.now())
        return told

    async def settle(self) -> None:
        """Wait until no action is under way."""
        while self._tasks:
            done, _ = await asyncio.wait(list(self._tasks.values()))
            for task in done:
                task.result()

    async def close(self) -> None:
        """Stop acting. Machines keep running; what was cut off is finished by the next process."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def mark_ready(self, id: str, via: Via) -> None:
        """Remember that it showed to be ready."""
        record = self.records.get(id)
        if record is not None and record.stage == "Created" and record.ready_via is None:
            self.records.put(msgspec.structs.replace(record, ready_via=via))
            self._changed()

    def mark_ended(self, id: str, ending: Ending | None) -> None:
        """Remember how it ended without being asked to; None takes it back."""
        record = self.records.get(id)
        if record is not None and record.ended != ending:
            self.records.put(msgspec.structs.replace(record, ended=ending))

    def mark_told(self, id: str) -> None:
        """Remember that the server knows that it is ready."""
        record = self.records.get(id)
        if record is not None:
            self.records.put(msgspec.structs.replace(record, ready_told=True))

    def driver(self, record: Record) -> Driver | None:
        """What made the machine."""
        if record.spec is None:
            return next((self._drivers[one.kind] for one in self.last_seen or () if one.id == record.id), None)
        return self._drivers.get("VirtualMachine" if isinstance(record.spec, VmSpec) else "Container")

    async def _list(self) -> list[Seen] | None:
        """Everything with our label, as it was while no action ended; None where a driver could not tell."""
        for _ in range(_LISTINGS):
            finished = self._finished
            try:
                lists = [await driver.listing() for driver in self._drivers.values()]
            except ListingFailedError as error:
                _log.warning("machines cannot be listed, nothing is concluded: %s", error)
                return None
            if finished == self._finished:
                return [one for seen in lists for one in seen]
        return None

    def _view(self) -> View:
        return View(
            desired=self._desired,
            seen=self.last_seen,
            records=self.records.all(),
            unknown=frozenset(self._unknown),
            busy=frozenset(self._tasks) | self._resting(),
            leased=self.leased,
            slots=self.slots,
            connected=self.connected,
            settings=self.settings,
            now=self.now(),
        )

    def _start(self, action: Action) -> None:
        """Do at once what only changes a record; anything else becomes a task."""
        records = self.records
        match action:
            case reconcile.Adopt(seen, reset_seq):
                now = self.now()
                records.put(Record(id=seen.id, spec=None, stage="Created", created_at=now, reset_applied=reset_seq))
            case reconcile.Count(id, rounds):
                self._change(id, stray_rounds=rounds)
            case reconcile.Applied(id, gen, want):
                self._change(id, gen_applied=gen, want=want)
                self._changed()
            case reconcile.End(id, gen):
                self._change(id, stage="Ended", gen_applied=gen)
                self._changed()
            case reconcile.Forget(id):
                records.forget(id)
                self._changed()
            case reconcile.Create(instance):
                self._begin(instance)
                self._run(instance.id, self._create(instance))
            case reconcile.Power(id, verb):
                self._run(id, self._power(id, verb))
            case reconcile.Reset(id, seq):
                self._run(id, self._reset(id, seq))
            case reconcile.Inquire(id):
                self._run(id, self._inquire(id))
            case reconcile.Publish(id, ports):
                self._run(id, self._driver(id).publish(id, ports))
            case reconcile.CleanUp(id):
                self._run(id, self._clean_up(id))
            case reconcile.Destroy(id, grace_s, gen):
                self._run(id, self._destroy(id, grace_s, gen))

    def _run(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        async def supervised() -> None:
            try:
                await work
                self._failed.pop(id, None)
            except DriverError as error:
                self._rest(id)
                _log.warning("%s: %s %s", id, error.message, error.tail)
            except Exception:  # the fault of one machine must not end the care for the others
                self._rest(id)
                _log.exception("%s: unexpected", id)
            finally:
                self._tasks.pop(id, None)
                self._phases.pop(id, None)
                self._finished += 1
                self._changed()

        self._tasks[id] = asyncio.get_running_loop().create_task(supervised(), name=f"machine {id}")

    def _rest(self, id: str) -> None:
        """What failed is tried again after 1, 2, 4 … seconds, at most a minute."""
        failures = self._failed.get(id, (0, 0))[0] + 1
        pause = min(_REST_S, 2 ** min(failures - 1, 6))
        self._failed[id] = (failures, self.now() + pause * SECOND)

    def _resting(self) -> frozenset[str]:
        now = self.now()
        return frozenset(id for id, (_, until) in self._failed.items() if until > now)

    def _begin(self, instance: DesiredInstance) -> None:
        """The record of what is about to be made, before a trace of it exists."""
        if instance.id not in self.records:
            self.records.put(
                Record(
                    id=instance.id,
                    spec=instance.spec,
                    stage="Creating",
                    created_at=self.now(),
                    reset_applied=instance.reset_seq,
                )
            )

    async def _create(self, instance: DesiredInstance) -> None:
        id, driver = instance.id, self._drivers.get(instance.kind)
        try:
            if driver is None:
                raise DriverError("PlatformError", f"This node does not run machines of the kind {instance.kind}.")
            if isinstance(instance.spec, VmSpec) and instance.spec.reuse_environment_id is not None:
                self._disks.claim(instance.spec.reuse_environment_id, self.records.folder(id))
            await driver.create(id, instance.spec, self.records.folder(id), lambda phase: self._progress(id, phase))
        except (DriverError, GoneError, OSError) as error:
            failure = _failure(error)
            self._change(id, stage="Failing", error=failure)
            await self._clean_up(id)
            return
        # The wish is Running from here; another wish is one more step of power, taken in a later round.
        gen = instance.gen if instance.want == "Running" else 0
        self._change(id, stage="Created", gen_applied=gen, started_at=self.now())

    def _progress(self, id: str, phase: Literal["Pulling", "Creating"]) -> None:
        self._phases[id] = phase
        self._changed()

    async def _power(self, id: str, verb: reconcile.Verb) -> None:
        driver = self._driver(id)
        steps = {"start": driver.start, "stop": driver.stop, "pause": driver.pause, "resume": driver.resume}
        await steps[verb](id)
        if verb == "start":
            self.mark_ended(id, None)

    async def _inquire(self, id: str) -> None:
        self.mark_ended(id, await self._driver(id).ending(id, self.now()))

    async def _reset(self, id: str, seq: int) -> None:
        self._change(id, reset_applied=seq)
        await self._driver(id).reset(id)

    async def _clean_up(self, id: str) -> None:
        record = self.records.get(id)
        driver = None if record is None else self.driver(record)
        if driver is not None:
            await driver.destroy(id)
        self._disks.give_back(self.records.folder(id))
        self.records.clear(id)
        self._change(id, stage="Failed")

    async def _destroy(self, id: str, grace_s: int, gen: int) -> None:
        record = self.records.get(id)
        if record is None:
            record = Record(id=id, spec=None, stage="Created", created_at=self.now())
            self.records.put(record)
        await self._driver(id).destroy(id)
        if grace_s > 0 and isinstance(record.spec, VmSpec):
            self._disks.retire(
                id,
                self.records.folder(id),
                expires_at=self.now() + grace_s * SECOND,
                disk_bytes=record.spec.disk_bytes,
                os_label=record.spec.image_url or "",
            )
        self.records.clear(id)
        self._change(id, stage="Ended", gen_applied=gen or record.gen_applied)

    def _driver(self, id: str) -> Driver:
        record = self.records.get(id)
        driver = None if record is None else self.driver(record)
        if driver is None:
            raise DriverError("PlatformError", "The node no longer runs machines of this kind.")
        return driver

    def _change(self, id: str, **fields: object) -> None:
        record = self.records.get(id)
        assert record is not None, "only machines with a record are changed"
        self.records.put(msgspec.structs.replace(record, **fields))


def _failure(error: DriverError | GoneError | OSError) -> Failure:
    if isinstance(error, DriverError):
        return Failure(cause=error.cause, message=error.message, tail=error.tail)
    if isinstance(error, GoneError):
        return Failure(cause="PlatformError", message="The saved environment is no longer on the node.")
    return Failure(cause="PlatformError", message="The node could not make the machine.", tail=str(error))
