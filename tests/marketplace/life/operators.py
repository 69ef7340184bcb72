"""Games of nodes, their engines, and those who operate them: agents act and fail, lines break, drains, quotas."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import select

from marketplace.agent.leases import LeaseError
from marketplace.agent.leases import Wanted as WantedLease
from marketplace.http.wire import write_instant
from marketplace.quotas.tables import quota
from tests.marketplace.life.game import Game, kill, one
from tests.marketplace.life.host import FAULTS, Host, run
from tests.marketplace.life.invariants import overcommitted
from tests.marketplace.office import Answer
from tests.marketplace.rack import GIB

METHODS = ("create", "start", "stop", "pause", "resume", "reset", "destroy")
DRAINS = ("drain", "drain_soon", "force_drain", "cancel_drain", "resume")


class Nodes(Game):
    """What nodes, their machines and their engines do."""

    @rule(number=one, times=st.integers(1, 4), kill=kill)
    def turn(self, number: int, times: int, kill: int | None) -> None:
        """An agent looks, acts and reports; the server may die of a report."""
        self.world.statements_left = kill
        run(self.world.loop, self.host(number), times)
        self.world.statements_left = None

    @rule(number=one, which=one)
    def becomes_ready(self, number: int, which: int) -> None:
        machines = list(self.host(number).machines.values())
        if machines:
            machines[which % len(machines)].ready = True

    @rule(number=one, which=one, how=st.sampled_from(["Shutoff", "gone"]))
    def guest_goes(self, number: int, which: int, how: str) -> None:
        """A guest shuts itself down, a command ends, or somebody removes its machine by hand."""
        host = self.host(number)
        ids = sorted(host.machines)
        if ids:
            for kind, hypervisor in host.hypervisors.items():
                machine = hypervisor.machines.get(ids[which % len(ids)])
                if machine is not None and how == "gone":
                    del hypervisor.machines[machine.id]
                elif machine is not None:
                    machine.power = "Shutoff" if kind == "VirtualMachine" else "Exited"
                    machine.status = which % 2

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


class Operators(Game):
    """What operators do, and what they give."""

    @rule(number=one, action=st.sampled_from(DRAINS), kill=kill)
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


def _budget(gpus: int) -> dict[str, int]:
    return {"gpu_count": gpus, "cpu_count": 4 + 4 * gpus, "dram": (8 + 8 * gpus) * GIB, "disk": 20 * GIB * (gpus + 1)}
