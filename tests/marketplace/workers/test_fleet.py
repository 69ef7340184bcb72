"""Nodes that fall silent, machines that do not get ready, drains, and meters that tick."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select, update

from marketplace.accounts import service as accounts
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.rentals import HOUR_US
from marketplace.nodes.tables import node
from marketplace.placement.tables import claim
from marketplace.workers.fleet import Fleet
from marketplace.workers.metering import Metering
from tests.marketplace.rack import Agent, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office, Post


@pytest.fixture
def rack(office: Office) -> Rack:
    return Rack(office)


@pytest.fixture
def ada(office: Office) -> Caller:
    return office.person(balance=1000 * NANO)


def fleet(rack: Rack) -> int:
    return Fleet(rack.office.database, clock=rack.office.clock, random=rack.office.random).run()


def meter(rack: Rack) -> int:
    return Metering(rack.office.database, clock=rack.office.clock, random=rack.office.random).run()


def status(rack: Rack, node_id: str) -> str:
    with rack.office.database.read() as unit:
        return str(unit.select(select(node.c.status).where(node.c.id == node_id)).scalar_one())


def spent(rack: Rack, who: Caller) -> int:
    with rack.office.database.read() as unit:
        return 1000 * NANO - accounts.get(unit, who.account_id).posted


def live(rack: Rack) -> list[bool]:
    """Whether each live claim is a zombie's."""
    with rack.office.database.read() as unit:
        return list(unit.select(select(claim.c.zombie).where(claim.c.released_at.is_(None))).scalars())


def test_a_silent_node_does_not_respond_then_is_offline_and_comes_back(rack: Rack) -> None:
    machine = rack.node()
    assert (fleet(rack), status(rack, machine.node_id)) == (0, "Ready")
    rack.office.wait(61)
    assert (fleet(rack), status(rack, machine.node_id)) == (1, "NotResponding")
    assert fleet(rack) == 0
    rack.office.wait(600)
    assert (fleet(rack), status(rack, machine.node_id)) == (1, "Offline")
    machine.poll()
    assert status(rack, machine.node_id) == "Ready"
    machine.leave()
    assert status(rack, machine.node_id) == "Offline"
    assert rack.audit().clean


def test_a_machine_that_does_not_signal_in_time_fails_once_it_is_taken_down(rack: Rack, ada: Caller) -> None:
    machine = rack.node()
    first = rack.rented(ada)
    machine.run(first)
    for _ in range(11):
        rack.office.wait(55)
        machine.poll()
        fleet(rack)
    shown = rack.show(ada, first)
    assert shown["status"] == "Deactivating" and live(rack) == [False]
    machine.clean()
    shown = rack.show(ada, first)
    assert (shown["status"], shown["failure"]["cause"]) == ("Failed", "VmBootFailed")
    assert "600 s" in shown["failure"]["user_message"]
    assert (spent(rack, ada), live(rack)) == (0, []) and rack.audit().clean


def test_what_starts_on_a_node_that_is_lost_fails_and_its_claim_waits_for_the_node(rack: Rack, ada: Caller) -> None:
    machine = rack.node(gpus=1)
    first = rack.rented(ada)
    machine.run(first)
    for _ in range(12):
        rack.office.wait(60)
        fleet(rack)
    assert rack.show(ada, first)["status"] == "Failed" and live(rack) == [True]
    assert rack.rent(ada).code == "InsufficientCapacity"
    machine.register()
    assert [(one.id, one.want) for one in machine.desired.instances] == [(first, "Absent")]
    assert live(rack) == [True], "it is still there"
    machine.clean()
    assert live(rack) == [] and rack.rent(ada).status == 201
    assert spent(rack, ada) == 0 and rack.audit().clean


def test_ticks_charge_up_to_the_last_sign_of_life_and_once(rack: Rack, ada: Caller) -> None:
    machine = rack.node()
    first = rack.rented(ada)
    machine.bring_up(first)
    with rack.office.database.read() as unit:
        begun = unit.select(select(instance.c.ready_at)).scalar_one()
    for _ in range(4):
        rack.office.wait(59)
        machine.poll()
    assert (meter(rack), meter(rack)) == (1, 0)
    charged = spent(rack, ada)
    with rack.office.database.read() as unit:
        seen = unit.select(select(node.c.last_seen)).scalar_one()
    assert charged == rack.COST * (seen - begun) // HOUR_US > 0
    rack.office.wait(3600)
    assert meter(rack) == 0 and spent(rack, ada) == charged, "its node was not heard since"
    machine.poll()
    meter(rack)
    rack.office.wait(5)
    machine.poll()
    rack.terminate(ada, first)
    machine.clean()
    with rack.office.database.read() as unit:
        ended = unit.select(select(instance.c.stop_at)).scalar_one()
    assert spent(rack, ada) == round_half_up(rack.COST * (ended - begun), HOUR_US)
    bill = rack.office.ask("account.transactions_list", {}, ada).body["transactions"]
    usage = [one["info"]["Usage"] for one in bill if "Usage" in one["info"]]
    assert len(usage) == 3 and all(one["resource_id"] == first for one in usage)
    assert {one["resource_type"] for one in bill} == {"Compute", None} and rack.audit().clean


def test_exempt_rentals_count_their_time_and_cost_nothing(rack: Rack, office: Office) -> None:
    admin = office.person("admin")
    machine = rack.node()
    first = rack.rented(admin, billing_exempt=True)
    machine.run(first)
    assert rack.show(admin, first)["status"] == "Active", "it need not signal"
    rack.office.wait(50)
    machine.poll()
    rack.terminate(admin, first)
    machine.clean()
    assert rack.show(admin, first)["usage_info"]["usage"]["secs"] >= 50
    with rack.office.database.read() as unit:
        assert accounts.get(unit, admin.account_id).posted == 0
    assert rack.audit().clean


def test_what_is_not_paid_for_longer_than_it_may_ends(rack: Rack, office: Office) -> None:
    poor = office.person(balance=rack.COST + 1)
    machine = rack.node()
    first = rack.rented(poor)
    machine.bring_up(first)
    hours = 0
    while rack.show(poor, first)["status"] == "Active" and hours < 5:
        rack.office.wait(3600)
        machine.poll()
        meter(rack)
        hours += 1
    assert (rack.show(poor, first)["status"], hours) == ("Deactivating", 2)
    machine.clean()
    with rack.office.database.read() as unit:
        assert accounts.get(unit, poor.account_id).posted == 0
    assert rack.audit().clean


def unpaid(rack: Rack) -> tuple[Caller, Agent, str]:
    """Somebody whose money ran out, and what they have running: its grace has begun, and its last charge was made."""
    poor = rack.office.person(balance=rack.COST + 1)
    machine = rack.node()
    rented = rack.rented(poor)
    machine.bring_up(rented)
    for seconds in (3660, 3590):
        rack.office.wait(seconds)
        machine.poll()
        assert meter(rack) == 1
    assert rack.show(poor, rented)["status"] == "Active"
    return poor, machine, rented


def pay(rack: Rack, who: Caller, amount: int) -> None:
    with rack.office.database.write() as unit:
        now = rack.office.clock()
        accounts.top_up(unit, who.account_id, amount, key=f"pay:{now}", now=now, random=rack.office.random)


def test_what_is_paid_for_before_its_grace_is_over_goes_on(rack: Rack) -> None:
    poor, machine, rented = unpaid(rack)
    pay(rack, poor, rack.COST)
    rack.office.wait(15)  # its grace ends before it is charged again
    machine.poll()
    assert (meter(rack), rack.show(poor, rented)["status"]) == (0, "Active")
    rack.office.wait(60)
    machine.poll()
    assert (meter(rack), rack.show(poor, rented)["status"]) == (1, "Active")
    assert rack.audit().clean


def test_what_is_reserved_with_the_last_money_goes_on(rack: Rack) -> None:
    poor, machine, rented = unpaid(rack)
    body = {"duration_secs": 86_400, "price_factor": 1}
    kind = rack.office.ask("reservations.types_add", body, rack.office.person("admin")).body["id"]
    pay(rack, poor, 24 * rack.COST + rack.COST // 60)  # and what it costs until then
    reserved = rack.office.ask("reservations.create", {"executor_id": rented, "reservation_type_id": kind}, poor)
    assert reserved.status == 200, reserved.body
    rack.office.wait(15)
    machine.poll()
    assert (meter(rack), rack.show(poor, rented)["status"]) == (0, "Active")
    for seconds in (3600, 86_400):  # while it lasts, and when it is over: a new grace begins
        rack.office.wait(seconds)
        machine.poll()
        assert (meter(rack), rack.show(poor, rented)["status"]) == (1, "Active")
    assert rack.audit().clean


def test_a_drain_tells_everybody_once_ends_at_its_deadline_and_lets_nothing_in(
    rack: Rack, ada: Caller, post: Post
) -> None:
    machine = rack.node()
    people = rack.operator()
    first, second = rack.rented(ada, name="one"), rack.rented(ada, name="two")
    machine.bring_up(first)
    selector = {"selector": {"ById": [machine.node_id]}}
    drained = rack.office.ask("nodes.drain", {**selector, "grace_period_secs": 100}, people)
    assert drained.status == 200, drained.body
    (result,) = drained.body["results"]
    assert (result["active_instance_count"], result["users_notified"]) == (2, 1)
    (letter,) = post.deliver()
    assert "one, two" in letter.text and letter.to == ada.email
    assert rack.rent(ada).code == "InsufficientCapacity"
    assert rack.office.ask("nodes.drain", selector, people).code == "NodeDraining"
    hidden = rack.office.ask("nodes.set_marketplace_listing", {**selector, "list_on_marketplace": True}, people)
    assert (hidden.status, hidden.code) == (400, "NodeDraining")
    assert rack.office.ask("nodes.resume", selector, people).code == "NodeNotDrained"
    rack.office.wait(101)
    fleet(rack)
    assert {rack.show(ada, one)["status"] for one in (first, second)} == {"Deactivating"}
    machine.clean()
    fleet(rack)
    (shown,) = rack.office.ask("nodes.list", {}, people).body["nodes"]
    assert shown["drain_info"]["state"] == "Drained" and not shown["list_on_marketplace"]
    assert rack.office.ask("nodes.cancel_drain", selector, people).code == "NodeNotDraining"
    assert rack.office.ask("nodes.resume", selector, people).status == 200
    assert rack.rent(ada).status == 201 and rack.audit().clean


def test_force_drain_ends_all_and_cancel_restores(rack: Rack, ada: Caller) -> None:
    machine = rack.node()
    people = rack.operator()
    selector = {"selector": {"ById": [machine.node_id]}}
    assert rack.office.ask("nodes.force_drain", selector, people).code == "NodeNotDraining"
    first = rack.rented(ada)
    rack.office.ask("nodes.drain", {**selector, "notify_users": False}, people)
    assert rack.office.ask("nodes.cancel_drain", selector, people).body == {"node_ids": [machine.node_id]}
    rack.office.wait(10)
    rack.office.ask("nodes.drain", {**selector, "notify_users": False}, people)
    answer = rack.office.ask("nodes.force_drain", selector, people)
    assert answer.body == {"results": [{"node_id": machine.node_id, "instances_terminated": 1}]}
    machine.clean()
    fleet(rack)
    assert rack.show(ada, first)["status"] == "Inactive"
    with rack.office.database.read() as unit:
        assert unit.select(select(func.count()).select_from(node).where(node.c.drain_state == "Drained")).scalar_one()
    admin = rack.office.person("admin")
    assert rack.office.ask("nodes.delete", selector, people).status == 403
    assert rack.office.ask("nodes.delete", selector, admin).body == {"node_ids": [machine.node_id]}
    assert rack.office.ask("nodes.list", {}, admin).body == {"nodes": []} and rack.audit().clean


def test_a_mixed_node_is_503_for_a_while(rack: Rack, ada: Caller) -> None:
    machine = rack.node()
    with rack.office.database.write() as unit:
        unit.execute(update(node).values(cpu_mode="Mixed"))
    answer = rack.rent(ada, selector={"ByNodeId": {"node_id": machine.node_id, "instance_type": "h200.1"}})
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "NodeAllocationModeMixed", "30")
    auto = rack.rent(ada)
    assert (auto.status, auto.code) == (409, "InsufficientCapacity")
    assert auto.body["error"]["details"]["reasons"] == {"nodes": 1, "after_mode": 0}
