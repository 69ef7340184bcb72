"""The door for nodes: who may come in, what waits, and what a repeated message changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from marketplace.agent.wire import LeaseReport, Poll, Polled, Register, Registered, digest
from marketplace.keys import service as keys
from marketplace.nodes import service as nodes
from marketplace.providers import service as providers
from marketplace.workers.fleet import Fleet
from tests.marketplace.rack import HttpError, Rack, inventory

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office


def test_only_the_keys_of_nodes_come_in(rack: Rack, ada: Caller, office: Office) -> None:
    machine = rack.node()
    asked = Register(
        machine_id="machine-g01",
        boot_id="b",
        agent_version="1",
        inventory=inventory(),
        capabilities=machine.capabilities,
    )
    for key, error in (
        ("", "401 NotAuthenticated"),
        ("hr_n_wrong", "401 InvalidApiKey"),
        (ada.key, "403 PermissionDenied"),
    ):
        with pytest.raises(HttpError, match=error):
            rack.send("register", asked, Registered, key=key)
    with office.database.write() as unit:
        rival = providers.create(unit, name="rival", now=office.clock(), random=office.random)
        _, secret = keys.create(
            unit,
            kind="node",
            owner_id=rival.id,
            account_id=None,
            name="n",
            pepper=office.context.pepper,
            now=office.clock(),
            random=office.random,
            provider=rival.id,
        )
    with pytest.raises(HttpError, match="403 CredentialsNotPermitted"):
        rack.send("register", asked, Registered, key=secret.text)
    status, body = asyncio.run(rack.call("poll", b"{", rack.key))
    assert status == 400 and b"ValidationFailed" in body


def test_a_poll_waits_until_something_is_wanted(rack: Rack, ada: Caller) -> None:
    machine = rack.node()
    machine.poll()

    async def waits() -> Polled:
        told = Poll(
            session_id=machine.session.session_id,
            epoch=machine.session.epoch,
            applied_rev=machine.rev,
            wait_s=20,
            observed_digest=digest(machine.observed),
        )
        waiting = asyncio.create_task(rack.call("poll", msgspec.json.encode(told), rack.key))
        await asyncio.sleep(0)
        await asyncio.to_thread(rack.rented, ada)
        status, body = await waiting
        assert status == 200
        return msgspec.json.decode(body, type=Polled)

    answer = asyncio.run(waits())
    assert answer.desired is not None and len(answer.desired.instances) == 1


def test_messages_that_are_repeated_change_nothing(rack: Rack, ada: Caller, office: Office) -> None:
    machine = rack.node()
    rented = rack.rented(ada)
    machine.bring_up(rented)
    machine.sees("stray", "Running")
    machine.poll()
    assert machine.unknown == ["stray"]
    del machine.seen["stray"]
    machine.poll()
    before = rack.show(ada, rented)
    for _ in range(2):
        machine.poll()
        machine.ready(rented)
    assert {**rack.show(ada, rented), "usage_info": 0} == {**before, "usage_info": 0}
    rack.terminate(ada, rented)
    machine.clean()
    machine.clean()
    with pytest.raises(HttpError, match="404"):
        machine.ready("no", "token")
    assert rack.show(ada, rented)["status"] == "Inactive" and rack.audit().clean


def test_engines_and_rentals_exclude_each_other_and_a_rental_may_take_what_is_lent(
    rack: Rack, ada: Caller, office: Office
) -> None:
    machine = rack.node()
    kept = LeaseReport(id="l1", holder="engine", state="Requested", count=1, preemptible=False)
    lent = LeaseReport(id="l2", holder="engine", state="Requested", count=1)
    machine.leases = [kept, lent, LeaseReport(id="l3", holder="engine", state="Requested", count=1)]
    machine.poll()
    first, second, third = machine.desired.leases
    assert len(first.gpus) == len(second.gpus) == 1 and first.gpus != second.gpus
    assert first.fence < second.fence and third.refused is not None
    rented = rack.rented(ada)
    assert rack.rent(ada).code == "InsufficientCapacity", "the other lease must stay"
    machine.poll()
    revoked = next(one for one in machine.desired.leases if one.id == "l2")
    assert revoked.revoke_at is not None and machine.desired.instances == [], "its engine is still there"
    machine.leases = [kept, msgspec.structs.replace(lent, state="Released")]
    machine.poll()
    assert [one.id for one in machine.desired.instances] == [rented]
    machine.bring_up(rented)
    assert rack.show(ada, rented)["gpus"][0]["pci_slot"] == revoked.gpus[0] == second.gpus[0]
    machine.boot_id = "again"
    machine.register()
    assert machine.desired.leases == [], "its engines are gone with the machine"
    assert rack.audit().clean


def test_a_node_that_was_offline_finds_its_machines_where_they_were(rack: Rack, ada: Caller, office: Office) -> None:
    machine = rack.node()
    rented = rack.rented(ada)
    machine.bring_up(rented)
    watch = Fleet(office.database, clock=office.clock, random=office.random)
    for _ in range(12):
        office.wait(60)
        watch.run()
    assert rack.show(ada, rented)["node_status"] == "Offline"
    with office.database.read() as unit:
        row = nodes.find(unit, machine.node_id)
    assert row.status == "Offline"
    machine.register()
    machine.poll()
    shown = rack.show(ada, rented)
    assert (shown["status"], shown["node_status"]) == ("Active", "Ready")
    assert [one.want for one in machine.desired.instances] == ["Running"] and rack.audit().clean
