"""Any order of what people, nodes, engines, operators and time do to the compute side; after each step, everything that
must hold does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import func, select

from marketplace.accounts import service as accounts
from marketplace.agent.leases import LeaseError
from marketplace.agent.leases import Wanted as WantedLease
from marketplace.environments.tables import saved_environment
from marketplace.http.wire import write_instant
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO
from marketplace.nodes.tables import gpu
from marketplace.placement.tables import claim
from marketplace.quotas.tables import quota
from marketplace.reservations.tables import reservation
from marketplace.store.db import Database
from tests.marketplace.life.host import FAULTS, Host, run
from tests.marketplace.life.invariants import beyond_budget, overcommitted, whole_audit
from tests.marketplace.life.world import CANARY, DOCKER, VM, World
from tests.marketplace.office import Answer, Caller
from tests.marketplace.rack import GIB

VARIANTS = ("h200.0", "h200.1", "h200.2", "h200.part")
ACTIONS = ("pause", "resume", "stop", "start", "reset", "terminate")
DRAINS = ("drain", "drain_soon", "force_drain", "cancel_drain", "resume")
METHODS = ("create", "start", "stop", "pause", "resume", "reset", "destroy")
one = st.integers(0, 5)
"""Which of what there is."""
kill = st.none() | st.none() | st.none() | st.integers(0, 60)
"""The statement at which the server dies; mostly it does not."""


class LifeMachine(RuleBasedStateMachine):
    """The compute side. `make` gives an empty database."""

    make: ClassVar[Callable[[], Database]]
    steps: ClassVar[int] = 0
    reached: ClassVar[Counter[str]] = Counter()
    """Statuses that instances had, and how requests to rent were answered: what games have seen."""

    @initialize(running=st.lists(st.tuples(one, st.sampled_from(VARIANTS), st.booleans()), min_size=1, max_size=3))
    def begin(self, running: list[tuple[int, str, bool]]) -> None:
        self.world = World(type(self).make())
        self.off: set[tuple[str, str]] = set()
        self.keys = 0
        for who, variant, container in running:
            self.rent_well(who, variant, container)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.end_well()
        finally:
            self.world.close()

    def host(self, number: int) -> Host:
        return self.world.hosts[number % 2]

    def renter(self, number: int) -> Caller:
        return self.world.renters[number % 3]

    def live(self, who: Caller | None = None) -> list[Any]:
        wanted = select(instance).where(instance.c.ended_at.is_(None)).order_by(instance.c.created_at)
        if who is not None:
            wanted = wanted.where(instance.c.account_id == who.account_id)
        with self.world.database.read() as unit:
            return list(unit.select(wanted).all())

    def owner(self, row: Any) -> Caller:
        (who,) = [who for who in self.world.renters if who.account_id == row.account_id]
        return who

    # Renters.

    @rule(
        who=one,
        variant=st.sampled_from(VARIANTS),
        container=st.booleans(),
        named=st.none() | one,
        terms=st.sampled_from(["none", "none", "new", "existing", "environment", "covered", "disk", "network"]),
        kill=kill,
        again=st.booleans(),
    )
    def rent(
        self, who: int, variant: str, container: bool, named: int | None, terms: str, kill: int | None, again: bool
    ) -> None:
        """Somebody rents; the server may die of it; the client may ask again with the same key."""
        caller = self.renter(who)
        body: dict[str, Any] = {
            "selector": {"ByInstanceTypeAndLocation": {"instance_type": variant}},
            "config": DOCKER if container or variant == "h200.part" else VM,
            **self.terms(caller, terms),
        }
        if terms == "disk":
            mount = {"volume": {"ById": [self.world.volumes[caller.account_id]]}, "mount_path": "/data"}
            body["config"] = {
                kind: {**config, "volumes": {"Mounts": [mount]}} for kind, config in body["config"].items()
            }
        if named is not None:
            body["selector"] = {"ByNodeId": {"node_id": self.host(named).node_id, "instance_type": variant}}
        self.keys += 1
        with self.world.database.read() as unit:
            before = self.world.facts(unit)
        crowded = {host.node_id for host in self.world.hosts if overcommitted(before, host.node_id)}
        answers: list[Answer] = []
        with self.world.killed_after(kill):
            self.ask_rent(body, caller, answers)
        if again:
            self.ask_rent(body, caller, answers)
        assert len({json.dumps(answer.body["instance_ids"]) for answer in answers if answer.status == 201}) <= 1, "I13"
        for answer in answers:
            self.reached[f"rent {answer.status}"] += 1
            if answer.status == 201:
                self.check_admission(answer.body["instance_ids"][0], crowded)
        with self.world.database.read() as unit:
            made = unit.select(select(func.count()).select_from(instance)).scalar_one() - len(before.instances)
        assert made <= 1, "I13: one request rented twice"

    @rule(who=one, variant=st.sampled_from(VARIANTS), container=st.booleans())
    def rent_well(self, who: int, variant: str, container: bool) -> None:
        """Somebody rents, and all goes well."""
        self.rent(who, variant, container, named=None, terms="none", kill=None, again=False)
        self.all_is_well(0, 2)
        self.all_is_well(1, 2)

    def ask_rent(self, body: dict[str, Any], caller: Caller, answers: list[Answer]) -> None:
        self.world.office.wait(10)
        answers.append(self.world.ask("instances.rent", body, caller, Idempotency_Key=f"rent-{self.keys}"))

    def terms(self, caller: Caller, terms: str) -> dict[str, Any]:
        if terms == "network":
            return {"network": "lab"}
        with self.world.database.read() as unit:
            if terms == "new":
                return {"reservation": {"New": {"type_id": self.world.type_ids[0]}}}
            if terms == "existing":
                mine = (reservation.c.account_id == caller.account_id, reservation.c.state == "Unbound")
                found = unit.select(select(reservation.c.id).where(*mine)).scalars().first()
                return {} if found is None else {"reservation": {"Existing": found}}
            if terms == "environment":
                kept = saved_environment
                mine = (kept.c.account_id == caller.account_id, kept.c.state == "Retained")
                found = unit.select(select(kept.c.id).where(*mine)).scalars().first()
                return {} if found is None else {"reuse_environment_id": found}
        return {"require_quota_coverage": True} if terms == "covered" else {}

    def check_admission(self, instance_id: str, crowded: set[str]) -> None:
        """I3: what was admitted is within its quota, or within what no quota holds."""
        with self.world.database.read() as unit:
            facts = self.world.facts(unit)
        row = facts.instances[instance_id]
        if row.quota_id is not None:
            assert not beyond_budget(facts, row.quota_id), f"I3: {instance_id} is beyond its quota"
        elif row.node_id not in crowded:
            assert not overcommitted(facts, row.node_id), f"I3: {instance_id} took what quotas hold"

    @rule(number=one, action=st.sampled_from(ACTIONS), kill=kill)
    def act(self, number: int, action: str, kill: int | None) -> None:
        """Somebody asks something of a machine of theirs."""
        live = self.live()
        if live:
            row = live[number % len(live)]
            with self.world.killed_after(kill):
                self.world.ask(f"instances.{action}", {"selector": {"ById": [row.id]}}, self.owner(row))

    @rule(number=one, new=st.booleans(), long=st.booleans(), kill=kill)
    def reserve(self, number: int, new: bool, long: bool, kill: int | None) -> None:
        """Somebody reserves what runs, or makes a reservation longer."""
        live = self.live()
        if live:
            row = live[number % len(live)]
            body = {"executor_id": row.id, "reservation_type_id": self.world.type_ids[long]}
            if row.team_id is not None:
                body["team_id"] = row.team_id
            with self.world.killed_after(kill):
                self.world.ask(f"reservations.{'create' if new else 'update'}", body, self.owner(row))

    @rule(who=one, kill=kill)
    def delete_disk(self, who: int, kill: int | None) -> None:
        """Somebody deletes their disk, and has another from then on, if it was free."""
        caller, world = self.renter(who), self.world
        mine = {"team_id": caller.id} if caller is world.team else {}
        with world.killed_after(kill):
            answer = world.ask("volumes.delete", {"volume_id": world.volumes[caller.account_id], **mine}, caller)
            assert answer.status in (200, 404, 409), answer.body
        made = {"name": f"data-{world.now}", "size_gb": 1, "datacenter": "acme-1", "volume_type_name": "disk", **mine}
        answer = world.ask("volumes.create", made, caller)
        if answer.status == 201:
            world.volumes[caller.account_id] = str(answer.body["volume"]["id"])

    @rule(who=one, amount=st.sampled_from([1, 100]))
    def top_up(self, who: int, amount: int) -> None:
        office = self.world.office
        with self.world.database.write() as unit:
            key = f"top-{office.now}"
            account_id = self.renter(who).account_id
            accounts.top_up(unit, account_id, amount * NANO, key=key, now=office.clock(), random=office.random)

    # What nodes and their machines do.

    @rule(number=one, times=st.integers(1, 4), kill=kill)
    def turn(self, number: int, times: int, kill: int | None) -> None:
        """An agent looks, acts and reports; the server may die of a report."""
        self.world.statements_left = kill
        run(self.world.loop, self.host(number), times)
        self.world.statements_left = None

    @rule(who=one, terms=st.sampled_from(["new", "existing", "environment"]), variant=st.sampled_from(VARIANTS[:2]))
    def rent_on_terms(self, who: int, terms: str, variant: str) -> None:
        """Somebody rents on a reservation or on a saved disk, and all goes well for a while."""
        self.rent(who, variant, container=False, named=None, terms=terms, kill=None, again=False)
        self.all_is_well(0, 1)
        self.all_is_well(1, 2)

    @rule(number=one, times=st.integers(1, 4))
    def all_is_well(self, number: int, times: int) -> None:
        """A node works for a while, and what runs on it becomes ready."""
        host = self.host(number)
        for _ in range(times):
            for machine in host.machines.values():
                machine.ready = True
            run(self.world.loop, host)

    @rule(number=one, which=one)
    def becomes_ready(self, number: int, which: int) -> None:
        machines = list(self.host(number).machines.values())
        if machines:
            machines[which % len(machines)].ready = True

    @rule(number=one, which=one, how=st.sampled_from(["Shutoff", "gone"]))
    def guest_goes(self, number: int, which: int, how: str) -> None:
        """A guest shuts itself down, or somebody removes its machine by hand."""
        host = self.host(number)
        ids = sorted(host.machines)
        if ids:
            for hypervisor in host.hypervisors.values():
                machine = hypervisor.machines.get(ids[which % len(ids)])
                if machine is not None and how == "gone":
                    del hypervisor.machines[machine.id]
                elif machine is not None:
                    machine.power = "Shutoff"

    @rule(
        number=one,
        method=st.sampled_from(METHODS),
        fault=st.sampled_from(["error", "killed-before", "killed-after"]),
        container=st.booleans(),
    )
    def hypervisor_fault(self, number: int, method: str, fault: Any, container: bool) -> None:
        hypervisor = self.host(number).hypervisors["Container" if container else "VirtualMachine"]
        hypervisor.faults.clear()
        hypervisor.script([(method, fault)])

    @rule(number=one, failing=st.booleans())
    def listing(self, number: int, failing: bool) -> None:
        self.host(number).hypervisors["VirtualMachine"].listing_fails = failing

    @rule(number=one, faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3))
    def line_fault(self, number: int, faults: list[Any]) -> None:
        self.host(number).line.faults.extend(faults)

    @rule(number=one, cut=st.booleans())
    def line_cut(self, number: int, cut: bool) -> None:
        self.host(number).line.cut = cut

    @precondition(lambda self: any(host.line.late for host in self.world.hosts))
    @rule(number=one, which=one)
    def late_message(self, number: int, which: int) -> None:
        """A message arrives after those that were sent later, perhaps those of another session."""
        line = self.host(number).line
        if line.late:
            line.deliver(which)

    @rule(number=one, how=st.sampled_from(["agent", "agent", "host"]))
    def restart(self, number: int, how: str) -> None:
        host = self.host(number)
        self.world.loop.run_until_complete(host.keeper.close())
        if how == "host":
            host.reboot()
        else:
            host.begin()

    # Operators.

    @rule(
        number=one, action=st.sampled_from(["drain", "drain_soon", "force_drain", "cancel_drain", "resume"]), kill=kill
    )
    def drain(self, number: int, action: str, kill: int | None) -> None:
        body: dict[str, Any] = {"selector": {"ById": [self.host(number).node_id]}}
        if action.startswith("drain"):
            body["grace_period_secs"] = 600 if action == "drain_soon" else 0
        with self.world.killed_after(kill):
            self.world.ask(f"nodes.{action.removesuffix('_soon')}", body, self.world.operator)

    @rule(number=one, which=one, off=st.booleans())
    def switch_gpu(self, number: int, which: int, off: bool) -> None:
        """People switch a GPU off, or all of them on."""
        host = self.host(number)
        slot = host.inventory.gpus[which % len(host.inventory.gpus)].pci_slot
        body = {"node_id": host.node_id, "disabled_gpus": [slot] if off else []}
        if self.world.ask("nodes.update", body, self.world.operator).status == 200:
            self.off = {pair for pair in self.off if pair[0] != host.node_id} | (
                {(host.node_id, slot)} if off else set()
            )

    @rule(
        number=one,
        who=one,
        gpus=st.integers(0, 2),
        till=st.none() | st.sampled_from([1800, 90_000]),
        exclusive=st.booleans(),
        kill=kill,
    )
    def give_quota(self, number: int, who: int, gpus: int, till: int | None, exclusive: bool, kill: int | None) -> None:
        host, holder = self.host(number), self.renter(who)
        recipient = {"TeamId": holder.id} if holder is self.world.team else {"UserId": holder.id}
        body: dict[str, Any] = {
            "name": "q",
            "node_id": host.node_id,
            "recipient": recipient,
            "resources": _budget(gpus),
        }
        body["exclusive"] = exclusive and gpus == 2
        if till is not None:
            body["valid_till"] = write_instant(self.world.now + till * 1_000_000)
        with self.world.killed_after(kill):
            self.check_quota(host, self.world.ask("quotas.create", body, self.world.admin))

    @rule(which=one, action=st.sampled_from(["update", "revoke"]), gpus=st.integers(0, 2), kill=kill)
    def change_quota(self, which: int, action: str, gpus: int, kill: int | None) -> None:
        with self.world.database.read() as unit:
            rows = unit.select(select(quota.c.id, quota.c.node_id).where(quota.c.active).order_by(quota.c.id)).all()
        if rows:
            row = rows[which % len(rows)]
            body: dict[str, Any] = {"quota_id": row.id}
            if action == "update":
                body["resources"] = _budget(gpus)
            (host,) = [host for host in self.world.hosts if host.node_id == row.node_id]
            with self.world.killed_after(kill):
                answer = self.world.ask(f"quotas.{action}", body, self.world.admin)
                if action == "update":
                    self.check_quota(host, answer)

    def check_quota(self, host: Host, answer: Answer) -> None:
        """I3: when a quota is written, its node has what all of them hold and all machines use."""
        if answer.status == 200:
            with self.world.database.read() as unit:
                assert not overcommitted(self.world.facts(unit), host.node_id), "I3: quotas promise more than there is"

    @rule(name=st.sampled_from(["erase_grace_period", "balance_grace_period", "vm_readiness_timeout"]), value=one)
    def change_setting(self, name: str, value: int) -> None:
        body = {"settings": {name: (0, 60, 600, 3600, 7200, 86_400)[value]}}
        assert self.world.ask("app_settings.update", body, self.world.admin).status == 200

    # Engines.

    @rule(number=one, count=st.integers(1, 2), preemptible=st.booleans())
    def engine_asks(self, number: int, count: int, preemptible: bool) -> None:
        host = self.host(number)
        pid = self.world.engines.start()
        wanted = WantedLease(holder="engine", pid=pid, count=count, preemptible=preemptible)
        host.leases.request(wanted, self.world.clock())

    @rule(number=one, which=one, action=st.sampled_from(["renew", "renew", "release", "die"]))
    def engine_acts(self, number: int, which: int, action: str) -> None:
        host = self.host(number)
        entries = list(host.leases._entries.values())
        if not entries:
            return
        entry = entries[which % len(entries)]
        if action == "renew":
            try:
                host.leases.renew(entry.lease.id, entry.lease.fence, self.world.clock())
            except LeaseError:
                return
        elif action == "release":
            host.leases.release(entry.lease.id)
        else:
            self.world.engines.living.discard(entry.wanted.pid)

    # Time, and the platform.

    @rule(seconds=st.sampled_from([1, 15, 31, 61, 700, 3700, 90_000]))
    def time_passes(self, seconds: int) -> None:
        self.world.office.wait(seconds)

    @rule(twice=st.booleans(), kill=kill)
    def workers(self, twice: bool, kill: int | None) -> None:
        """Workers tick; killed at any statement, they tick again."""
        with self.world.killed_after(kill):
            self.world.work()
        if twice:
            self.world.work()

    # What must hold.

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "world"):
            return
        type(self).steps += 1
        self.reached.update({row.status for row in self.live()})
        assert self.world.wrong() == []

    @invariant()
    def switched_off_stays_off(self) -> None:
        """I14: GPUs are on or off as people set them, whatever nodes register."""
        if not hasattr(self, "world"):
            return
        with self.world.database.read() as unit:
            off = unit.select(select(gpu.c.node_id, gpu.c.pci_slot).where(gpu.c.enabled.is_(False))).all()
        assert {(node_id, slot) for node_id, slot in off} == self.off, "I14"

    @rule(who=one)
    def look(self, who: int) -> None:
        """I9 and I10: people see what is theirs, and nothing secret of it."""
        caller = self.renter(who)
        answer = self.world.ask("instances.list", {"selector": {"ByStatus": list(_STATUSES)}}, caller)
        assert answer.status == 200, answer.body
        mine = {caller.account_id} | ({self.world.team.account_id} if caller is self.world.people[1] else set())
        with self.world.database.read() as unit:
            whose = {row.id: row.account_id for row in unit.select(select(instance.c.id, instance.c.account_id))}
        assert {whose[shown["id"]] for shown in answer.body["instances"]} <= mine, "I9"
        assert CANARY not in json.dumps(answer.body, default=str), "I10"
        refused = self.world.ask("nodes.list", {}, caller)
        assert refused.status == 403 or refused.body["nodes"] == [], "I9"

    def end_well(self) -> None:
        """I15: once every fault is over, what is to end has ended, and nothing of it is left."""
        world = self.world
        for host in world.hosts:
            host.heal()
        self.settle(3)
        for row in self.live():
            world.ask("instances.terminate", {"selector": {"ById": [row.id]}}, self.owner(row))
        self.settle(8)
        assert [(row.id, row.status, row.phase, row.want) for row in self.live()] == [], "I15"
        with world.database.read() as unit:
            facts = world.facts(unit)
            assert whole_audit(facts) == []
        self.reached.update(row.status for row in facts.instances.values())
        self.reached.update(f"reservation {row.state}" for row in facts.reservations.values())
        self.reached.update(f"environment {row.state}" for row in facts.environments.values())
        self.reached["leases"] += len(facts.leases)
        self.reached["covered"] += sum(row.quota_id is not None for row in facts.instances.values())
        assert [row.instance_id for row in facts.claims] == [], "I15: claims of what is over"
        assert list(facts.things) == [], "I12: machines of nobody"
        assert world.wrong() == []

    def settle(self, times: int) -> None:
        """Let time pass without faults, until nothing is left or so often."""
        for _ in range(times):
            if not self.left():
                return
            self.world.office.wait(61)
            for host in self.world.hosts:
                run(self.world.loop, host, 2)
            self.world.work()

    def left(self) -> bool:
        """Whether anything is claimed, or runs where it should not."""
        with self.world.database.read() as unit:
            claimed = select(func.count()).select_from(claim).where(claim.c.released_at.is_(None))
            found = int(unit.select(claimed).scalar_one())
        return found > 0 or any(host.machines for host in self.world.hosts)


_STATUSES = ("Initializing", "Active", "Deactivating", "Inactive", "Failed")


def _budget(gpus: int) -> dict[str, int]:
    return {"gpu_count": gpus, "cpu_count": 4 + 4 * gpus, "dram": (8 + 8 * gpus) * GIB, "disk": 20 * GIB * (gpus + 1)}
