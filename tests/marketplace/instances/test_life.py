"""From the rent to the bill, over the protocol that nodes speak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from marketplace.accounts import service as accounts
from marketplace.agent.wire import Ending
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.rental_tables import rental_meter
from marketplace.ledger.rentals import HOUR_US
from marketplace.networks.tables import port_lease
from marketplace.placement.tables import claim, cpu_claim, gpu_slice_claim
from tests.marketplace.rack import HttpError, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller


def balance(rack: Rack, who: Caller) -> int:
    with rack.office.database.read() as unit:
        return accounts.get(unit, who.account_id).posted


def live_claims(rack: Rack) -> int:
    with rack.office.database.read() as unit:
        return sum(
            int(unit.select(select(func.count()).select_from(table).where(table.c.released_at.is_(None))).scalar_one())
            for table in (claim, cpu_claim, gpu_slice_claim, port_lease)
        )


def column(rack: Rack, instance_id: str, name: str) -> Any:
    with rack.office.database.read() as unit:
        return unit.select(select(instance.c[name]).where(instance.c.id == instance_id)).scalar_one()


def test_a_machine_costs_exactly_the_time_from_ready_to_terminate(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada, name="trainer", tags=["night", "a100"])
    assert rack.show(ada, machine)["status"] == "Initializing"
    node.run(machine)
    assert rack.show(ada, machine)["status"] == "Initializing", "it runs, and is not ready"
    with pytest.raises(HttpError, match="404"):
        node.ready(machine, "guessed")
    node.ready(machine)
    begun = column(rack, machine, "ready_at")
    node.ready(machine)
    shown = rack.show(ada, machine)
    assert (shown["status"], shown["virtual_machines"][0]["state"], shown["tags"]) == (
        "Active",
        "Running",
        ["a100", "night"],
    )
    for _ in range(3):
        rack.office.wait(55)
        node.poll()
    assert rack.terminate(ada, machine).body["terminated"][0]["status"] == "Deactivating"
    ended = column(rack, machine, "stop_at")
    assert live_claims(rack) > 0, "its node has not said that it is gone"
    node.clean()
    assert rack.show(ada, machine)["status"] == "Inactive"
    assert live_claims(rack) == 0
    assert 1000 * NANO - balance(rack, ada) == round_half_up(rack.COST * (ended - begun), HOUR_US)
    assert rack.terminate(ada, machine).body == {"terminated": []}
    assert rack.audit().clean, rack.audit().lines()


def test_what_fails_costs_nothing_and_says_why(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada, container=True)
    node.fails(machine, "BadImage", "The registry knows no image busybox.")
    assert rack.show(ada, machine)["status"] == "Deactivating" and live_claims(rack) > 0
    node.clean()
    shown = rack.show(ada, machine)
    assert shown["status"] == "Failed" and shown["failure"]["cause"] == "DockerImagePullFailed"
    assert shown["failure"]["user_message"] == "The registry knows no image busybox."
    assert shown["failure"]["id"].startswith("f-") and shown["failure"]["occurred_at"].endswith("Z")
    assert balance(rack, ada) == 1000 * NANO and live_claims(rack) == 0
    with rack.office.database.read() as unit:
        assert unit.select(select(rental_meter.c.id)).all() == []
    rack.terminate(ada, machine)
    assert rack.show(ada, machine)["status"] == "Inactive"
    assert rack.audit().clean


def test_a_virtual_machine_without_its_image_was_no_container(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.fails(machine, "BadImage", "The host of the image's address is not known.")
    node.clean()
    failure = rack.show(ada, machine)["failure"]
    assert (failure["cause"], failure["user_message"]) == (
        "VmBootFailed",
        "The host of the image's address is not known.",
    )


def test_a_container_is_active_as_soon_as_it_runs(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada, "h200.0", container=True)
    node.run(machine)
    shown = rack.show(ada, machine)
    assert (shown["status"], shown["containers"][0]["state"]) == ("Active", "Running")
    rack.terminate(ada, machine)
    node.clean()
    assert rack.audit().clean


def test_stop_start_pause_resume_and_reset_change_what_its_node_should_do(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.bring_up(machine)

    def ask(action: str) -> Any:
        rack.office.wait(1)
        return rack.office.ask(f"instances.{action}", {"selector": {"ById": [machine]}}, ada)

    def state() -> str:
        return str(rack.show(ada, machine)["virtual_machines"][0]["state"])

    for action, told, power in (
        ("pause", "paused_ids", "Paused"),
        ("resume", "resumed_ids", "Running"),
        ("stop", "stopped_ids", "Shutoff"),
        ("start", "started_ids", "Running"),
    ):
        answer = ask(action)
        assert answer.body == {told: [machine]}, answer.body
        assert state() == power, "where it is on its way to"
        node.poll()
        (wanted,) = node.desired.instances
        assert wanted.want == {"Paused": "Paused", "Shutoff": "Stopped"}.get(power, "Running")
        node.sees(machine, "Running", power=power)
        node.poll()
        assert (state(), rack.show(ada, machine)["status"]) == (power, "Active")
    before = node.desired.instances[0].reset_seq
    assert ask("reset").status == 200
    node.poll()
    assert node.desired.instances[0].reset_seq == before + 1
    refused = ask("start")
    assert (refused.status, refused.code) == (400, "InvalidTransition")
    live = live_claims(rack)
    assert live > 0 and rack.audit().clean


def test_a_guest_that_shuts_itself_down_stays_rented_and_can_be_started(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.bring_up(machine)
    node.sees(machine, "Running", power="Shutoff")
    node.poll()
    shown = rack.show(ada, machine)
    assert (shown["status"], shown["virtual_machines"][0]["state"]) == ("Active", "Shutoff")
    assert rack.office.ask("instances.start", {"selector": {"ById": [machine]}}, ada).status == 200


def test_a_machine_that_vanished_twice_in_a_row_is_over_and_costs_until_it_was_last_seen(
    rack: Rack, ada: Caller
) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.bring_up(machine)
    begun = column(rack, machine, "ready_at")
    rack.office.wait(30)
    node.poll()
    node.sees(machine, "Missing", power=None)
    node.poll()
    assert rack.show(ada, machine)["status"] == "Active"
    node.poll(full=False)
    assert rack.show(ada, machine)["status"] == "Deactivating"
    node.clean()
    assert rack.show(ada, machine)["status"] == "Inactive"
    spent = 1000 * NANO - balance(rack, ada)
    assert round_half_up(rack.COST * 30_000_000, HOUR_US) <= spent < round_half_up(rack.COST * 40_000_000, HOUR_US)
    assert column(rack, machine, "stop_at") > begun and rack.audit().clean


def ended(rack: Rack, cause: Any, message: str) -> dict[str, Any]:
    """What a node says of a container that ended by itself, a moment ago."""
    return {"power": "Exited", "ended": Ending(at=rack.office.now, cause=cause, message=message)}


def test_a_container_that_ended_before_it_was_seen_to_run_has_failed_and_costs_nothing(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada, container=True)
    node.poll()
    node.sees(machine, "Running", power="Exited")
    node.poll()
    assert rack.show(ada, machine)["status"] == "Initializing", "it does not run"
    node.sees(machine, "Running", **ended(rack, None, "It ended with status 0."))
    node.poll()
    node.clean()
    shown = rack.show(ada, machine)
    assert (shown["status"], shown["failure"]["cause"]) == ("Failed", "DockerCommandFailed")
    assert shown["failure"]["user_message"] == "It ended with status 0."
    assert (balance(rack, ada), live_claims(rack)) == (1000 * NANO, 0) and rack.audit().clean


@pytest.mark.parametrize("cause", [None, "BadCommand"])
def test_a_container_that_ended_by_itself_is_over_at_the_next_report_and_costs_until_then(
    rack: Rack, ada: Caller, cause: str | None
) -> None:
    node = rack.node()
    machine = rack.rented(ada, container=True)
    node.run(machine)
    begun = column(rack, machine, "ready_at")
    rack.office.wait(30)
    how = ended(rack, cause, "It ended.")
    until = rack.office.now
    rack.office.wait(20)  # the report was under way for so long
    node.sees(machine, "Running", **how)
    node.poll()
    shown = rack.show(ada, machine)
    assert (shown["status"], shown["containers"][0]["state"]) == ("Deactivating", "Exited")
    failed = shown["failure"] and (shown["failure"]["cause"], shown["failure"]["user_message"])
    assert failed == (None if cause is None else ("DockerCommandFailed", "It ended."))
    cost = round_half_up(rack.COST * (until - begun), HOUR_US)
    assert 1000 * NANO - balance(rack, ada) == cost
    node.poll()
    rack.office.wait(3600)
    node.clean()
    assert rack.show(ada, machine)["status"] == "Inactive" and live_claims(rack) == 0
    assert 1000 * NANO - balance(rack, ada) == cost and rack.audit().clean
    told = rack.office.ask("events.list", {}, ada).body["events"]
    (one,) = [event for event in told if event["action"] == "instances.ended"]
    assert (one["subject_id"], one["detail"]["message"]) == (machine, "It ended.")


def test_terminated_before_it_was_ready_it_costs_nothing(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.poll()
    rack.terminate(ada, machine)
    node.clean()
    assert rack.show(ada, machine)["status"] == "Inactive" and balance(rack, ada) == 1000 * NANO
    never = rack.rented(ada)
    rack.terminate(ada, never)
    node.poll()
    node.poll()
    assert rack.show(ada, never)["status"] == "Inactive" and live_claims(rack) == 0
    assert rack.audit().clean
