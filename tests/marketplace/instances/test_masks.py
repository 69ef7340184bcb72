"""What of an instance is told depends on what is asked for; and who may do what to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from marketplace.http.openapi import document
from marketplace.ledger.money import NANO
from marketplace.operations import TABLE

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office
    from tests.marketplace.rack import Rack


def test_a_mask_says_what_of_an_instance_is_told(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.bring_up(machine)
    shown = rack.show(ada, machine)
    ((inside, outside),) = shown["port_mappings"]
    assert (inside, shown["host_address"]) == (22, "203.0.113.7"), "it is reached though no credentials were asked for"
    assert shown["instructions"] is None and "HiddenPassword" in shown["virtual_machines"][0]["login_info"]

    open_to = rack.show(ada, machine, with_credentials=True)
    password = open_to["virtual_machines"][0]["login_info"]["UsernameAndPassword"]["password"]
    assert open_to["instructions"] == f"ssh -p {outside} ubuntu@203.0.113.7\nPassword: {password}"

    bare = rack.show(ada, machine, with_connection_info=False, with_credentials=True)
    assert (bare["host_address"], bare["internal_host_address"], bare["port_mappings"]) == (None, None, [])
    assert bare["instructions"] is None, "without an address there is no way in to tell of"
    soft = rack.show(ada, machine, with_hardware_info=False, with_usage_info=False)
    assert (soft["cpu"], soft["cpu_mask"], soft["gpu_mask"], soft["gpus"]) == (None, None, None, [])
    assert soft["usage_info"] is None and shown["usage_info"]["user_email"] == ada.email
    assert len(shown["gpus"]) == 1 and shown["cpu"]["brand"] == "EPYC"


@pytest.mark.parametrize("action", ["reset", "terminate"])
def test_renters_operators_and_admins_act_on_a_machine_and_nobody_else(
    rack: Rack, ada: Caller, office: Office, action: str
) -> None:
    node = rack.node()
    stranger, team = office.person(balance=NANO), office.team()
    for who in (ada, rack.operator(), office.person("admin")):
        machine = rack.rented(ada)
        node.bring_up(machine)
        body = {"selector": {"ById": [machine]}}
        for other in (stranger, team, office.service(provider=f"p{office.now}")):
            office.wait(10)
            refused = office.ask(f"instances.{action}", body, other)
            done = [] if refused.status == 403 else next(iter(refused.body.values()))
            assert (refused.status, done) in ((403, []), (200, [])), refused.body
        assert rack.show(ada, machine)["status"] == "Active"
        office.wait(10)
        assert len(next(iter(office.ask(f"instances.{action}", body, who).body.values()))) == 1
        rack.terminate(ada, machine)
        node.clean()


def test_reservations_tell_nothing_of_modes_of_nodes() -> None:
    schemas = document(TABLE)["components"]["schemas"]
    (shown,) = [schema for name, schema in schemas.items() if name.endswith("ReservationAnswer")]
    assert "billing_exempt" in shown["properties"] and "node_mode" not in shown["properties"]
