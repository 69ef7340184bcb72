"""A whole platform in one process: the management API, the door for nodes, every worker, people, and hosts with real
agents. Time is a number, and the server can be killed at any statement."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from sqlalchemy import event, select

from marketplace.accounts import service as accounts
from marketplace.agent import processes
from marketplace.agent.client import RefusedError, StaleSessionError, UnreachableError
from marketplace.agent.inventory_wire import Inventory, MigProfile
from marketplace.agent.wire import Accepted, Poll, Ready, Register, Shutdown
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.events.transitions import Actor, Scene
from marketplace.http.dispatch import Desk
from marketplace.http.limits import Buckets
from marketplace.http.operation import Context
from marketplace.ledger.money import NANO
from marketplace.ledger.rental_tables import deposit, rental_meter
from marketplace.ledger.tables import account, ledger_tx
from marketplace.nodes import service as nodes
from marketplace.nodes import talk
from marketplace.nodes.tables import node
from marketplace.store.base import metadata
from marketplace.store.db import Database, WriteUnit
from marketplace.workers import expiry
from marketplace.workers.fleet import Fleet
from marketplace.workers.funds import FundsWatch
from marketplace.workers.metering import Metering
from marketplace.workers.volumes import VolumeKeeper
from tests.marketplace.life.host import Engines, Host, run
from tests.marketplace.life.invariants import INVARIANTS, Facts, broken
from tests.marketplace.office import Answer, Caller, Office
from tests.marketplace.rack import GIB, Rack, inventory

CANARY = "canary"
"""In everything that is secret, and nowhere else."""
VM = {"VirtualMachine": {"image_url": "https://images.example/ubuntu.qcow2", "cloudinit_commands": f"echo {CANARY}"}}
DOCKER = {"Docker": {"image": "busybox", "env": [["SECRET", CANARY]]}}
_MOVING = {
    "node": ("last_seen", "observed_digest"),
    "inference_lease": ("expires_at",),
    "event": ("at", "id"),
    "idempotency": None,
}
"""Columns that a message may move each time it comes, and a table that is no state of anything."""


class ServerKilledError(BaseException):
    """The server's process ends here: its transaction is rolled back, and nobody is answered."""


class World:
    """Everything."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.office = Office(database)
        self.temporary = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.loop = asyncio.new_event_loop()
        self.engines = Engines()
        self._patches = [
            mock.patch.object(processes, "started", self.engines.started),
            mock.patch.object(processes, "descendants", self.engines.descendants),
        ]
        for patch in self._patches:
            patch.start()
        self.statements_left: int | None = None
        self.money: list[Any] = []
        """what the ledger said when it was looked at last: the same again needs no other audit"""
        event.listen(database._writer, "before_cursor_execute", self._statement)
        event.listen(database._writer, "commit", self._statement)
        self.rack = Rack(self.office)
        self.admin = self.office.person("admin")
        self.operator = self.rack.operator()
        self._offer()
        self.people = [self.office.person(balance=60 * NANO), self.office.person(balance=100_000 * NANO)]
        self.team = self.office.team(self.people[1])
        self.renters = [*self.people, self.team]
        with database.write() as unit:
            key = self.team.id
            accounts.top_up(
                unit,
                self.team.account_id,
                500 * NANO,
                key=key,
                now=self.office.clock(),
                random=self.office.random,
            )
        self.type_ids = [self._reservation_type(seconds) for seconds in (1800, 86_400)]
        self.hosts = [
            Host(self, self.temporary / name, machine, self.engines, self.clock)
            for name, machine in (("g01", _split("g01")), ("g02", inventory("g02", gpus=2, hugepages=24)))
        ]
        for host in self.hosts:
            run(self.loop, host)
            self.change(node.update().where(node.c.id == host.node_id).values(instance_type="h200"))
        self.volumes = self._house()

    @property
    def now(self) -> int:
        """The time, without a look at the clock."""
        return self.office.now

    def clock(self) -> int:
        """The time, as agents and workers see it."""
        return self.office.clock()

    def close(self) -> None:
        """Give everything back."""
        event.remove(self.database._writer, "before_cursor_execute", self._statement)
        event.remove(self.database._writer, "commit", self._statement)
        for patch in self._patches:
            patch.stop()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.temporary)

    def _offer(self) -> None:
        with self.database.write() as unit:
            part = Variant(
                name="h200.part",
                type_name="h200",
                gpu_count=1,
                mig_profile="3g.71gb",
                vcpu=1,
                dram=4 * GIB,
                disk=GIB,
                services=("container",),
                cost_per_hour=NANO,
            )
            catalog.add_variant(unit, part, self.office.clock())

    def _reservation_type(self, seconds: int) -> str:
        answer = self.ask("reservations.types_add", {"duration_secs": seconds, "price_factor": 0.5}, self.admin)
        assert answer.status == 200, answer.body
        return str(answer.body["id"])

    def _house(self) -> dict[str, str]:
        """A network of two addresses for everybody, and a disk for each renter; returns the disks by account."""
        place = {"datacenter": "acme-1"}
        inside = {
            "name": "lab",
            "netmask": 24,
            "iface": "br-lab",
            "ip_ranges": [{"from": "10.9.0.5", "to": "10.9.0.6"}],
        }
        assert self.ask("networks.add", {**place, **inside}, self.admin).status == 201
        kind = {"name": "disk", "cost_per_gb_per_month": 1000}
        assert self.ask("volumes.types_add", {**place, **kind}, self.admin).status == 200
        made = {}
        for who in self.renters:
            body = {**place, "name": "data", "size_gb": 1, "volume_type_name": "disk"}
            body |= {"team_id": who.id} if who is self.team else {}
            answer = self.ask("volumes.create", body, who)
            assert answer.status == 201, answer.body
            made[who.account_id] = str(answer.body["volume"]["id"])
        return made

    def change(self, statement: Any) -> None:
        """Write something by hand."""
        with self.database.write() as unit:
            unit.execute(statement)

    def ask(self, name: str, body: Any, who: Caller, **headers: str) -> Answer:
        """Ask the API; no answer is an error of the server."""
        self.office.wait(2)
        answer = self.office.ask(name, body, who, **headers)
        assert answer.status != 500, answer.body
        return answer

    # The server, and its end.

    def _statement(self, *_: object) -> None:
        if self.statements_left is not None:
            self.statements_left -= 1
            if self.statements_left < 0:
                raise ServerKilledError

    @contextlib.contextmanager
    def killed_after(self, statements: int | None) -> Iterator[None]:
        """Kill the server at its statement of that number, and start it again, if it gets so far."""
        self.statements_left = statements
        try:
            yield
        except ServerKilledError:
            self.restart()
        finally:
            self.statements_left = None

    def restart(self) -> None:
        """The server's process begins anew: nothing but the database is left of it."""
        self.statements_left = None
        before = self.office.context
        self.office.context = Context(
            database=self.database,
            pepper=before.pepper,
            vault=before.vault,
            clock=self.office.clock,
            random=self.office.random,
            limits=Buckets(),
        )
        self.office.desk = Desk(self.office.context)

    def serve(self, name: str, body: bytes) -> bytes:
        """Answer a node. StaleSessionError, RefusedError; UnreachableError when the server dies of it."""
        try:
            return msgspec.json.encode(self._serve(name, body))
        except nodes.StaleSessionError as error:
            raise StaleSessionError(name) from error
        except talk.UnknownInstanceError as error:
            raise RefusedError(404, "there is no such instance") from error
        except ServerKilledError as error:
            self.restart()
            raise UnreachableError("the server died") from error

    def _serve(self, name: str, body: bytes) -> Any:
        scene = Scene(Actor("node", self.rack.provider_id), self.clock(), self.office.random)
        vault, provider = self.office.context.vault, self.rack.provider_id
        write: Callable[[Callable[[WriteUnit], Any]], Any] = self.database.transact
        if name == "register":
            asked = msgspec.json.decode(body, type=Register)
            return write(lambda unit: talk.register(unit, vault, provider, asked, scene))
        if name == "ready":
            ready = msgspec.json.decode(body, type=Ready)
            write(lambda unit: talk.ready(unit, provider, ready, scene))
            return Accepted()
        if name == "shutdown":
            going = msgspec.json.decode(body, type=Shutdown)
            write(lambda unit: talk.leave(unit, provider, going.session_id, scene))
            return Accepted()
        told = msgspec.json.decode(body, type=Poll)
        taken = write(lambda unit: talk.poll(unit, provider, told, scene))
        with self.database.read() as unit:
            return talk.answer(unit, vault, provider, told, taken, scene.now)

    def repeat(self, name: str, body: bytes) -> None:
        """A message comes again: nothing changes. Registering again begins another session, and changes no more."""
        before = self.state()
        with contextlib.suppress(StaleSessionError, RefusedError):
            self.serve(name, body)
        if name != "register":
            assert self.state() == before, f"I13: {name} came again and changed something"

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row, but for what every message moves."""
        found = {}
        with self.database.read() as unit:
            for table in metadata.sorted_tables:
                moving = _MOVING.get(table.name, ())
                if moving is not None:
                    kept = [column for column in table.columns if column.name not in moving]
                    found[table.name] = sorted((tuple(row) for row in unit.select(select(*kept))), key=repr)
        return found

    def work(self) -> None:
        """Every worker once."""
        known: dict[str, Any] = {"clock": self.clock, "random": self.office.random}
        for worker in (Fleet, Metering, expiry.of_reservations, expiry.of_environments, FundsWatch, VolumeKeeper):
            worker(self.database, **known).run()

    def facts(self, unit: Any) -> Facts:
        """What there is now."""
        return Facts(unit, now=self.now, things=[thing for host in self.hosts for thing in host.things()])

    def wrong(self) -> list[str]:
        """Every invariant that one moment shows."""
        with self.database.read() as unit:
            facts = self.facts(unit)
            money = [facts.rows(table) for table in (account, ledger_tx, rental_meter, deposit)]
            names = [name for name in INVARIANTS if name != "I6" or money != self.money]
            found = broken(facts, names)
        self.money = money
        return found + [line for host in self.hosts for line in host.wrong()]


def _split(name: str) -> Inventory:
    """A machine with two whole GPUs and one that is split."""
    whole = inventory(name, gpus=3)
    part = msgspec.structs.replace(
        whole.gpus[2], mig_enabled=True, mig_profiles=[MigProfile(profile="3g.71gb", size=4, placements=[0, 4])]
    )
    return msgspec.structs.replace(whole, gpus=[*whole.gpus[:2], part])
