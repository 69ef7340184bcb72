"""Mistakes that platforms like this one have shipped, each with the tests that would show it here.

What no other room tests is tested below.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from marketplace.accounts import service as accounts
from marketplace.ledger.money import NANO
from marketplace.networks.tables import port_lease
from marketplace.placement import load
from marketplace.placement.tables import claim
from marketplace.reservations.rules import PPM, price
from tests.marketplace.life.invariants import Facts, broken
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Rack

ROOMS = Path(__file__).parents[1]

TESTED: dict[str, tuple[str, ...]] = {
    "the balance was looked at in one transaction and charged in another: one sum bought two reservations": (
        "reservations/test_operations.py::test_the_same_money_buys_one_reservation",
        "reservations/test_operations.py::test_of_those_who_reserve_one_instance_at_once_one_pays",
    ),
    "more memory was offered than the pool of pages has": (
        "placement/test_choose.py::test_memory_comes_in_pages_of_the_numa_nodes_that_the_threads_are_on",
        "placement/test_capacity.py::test_memory_is_rounded_up_to_pages",
    ),
    "free cores were physical cores less logical threads": (
        "placement/test_capacity.py::test_vcpus_are_counted_in_threads",
        "placement/test_choose.py::test_dedicated_cores_are_whole_and_near_the_gpu",
    ),
    "quotas were granted disks that hold no machines": (
        "quotas/test_operations.py::test_a_node_without_a_usable_disk_grants_none",
    ),
    "quotas promised what was in use": (
        "quotas/test_operations.py::test_a_quota_is_never_larger_than_what_its_node_has_for_it",
        "placement/test_capacity.py::test_a_quota_of_the_largest_size_never_promises_what_is_used",
    ),
    "settings could be read again by anybody": ("test_operations.py::test_without_a_credential_it_is_401",),
    "a hypervisor that was restarted had no machines for a moment, and all of them were called deleted": (
        "agent/test_reconcile.py::test_a_failed_listing_decides_and_tells_nothing",
        "agent/test_keeper.py::test_a_listing_that_fails_hides_nothing_and_loses_nothing",
        "agent/test_node.py::test_a_failed_listing_is_reported_as_not_known",
    ),
    "saved disks were offered that were gone": (
        "environments/test_environments.py::test_a_disk_that_vanished_is_not_offered",
        "agent/test_keeper.py::test_a_rental_of_a_disk_that_is_gone_fails_with_a_reason",
    ),
    "a cached image was removed by somebody, and still counted as there": (
        "agent/test_images.py::test_an_image_that_was_removed_or_changed_is_fetched_again",
    ),
    "the sweep for strays ended a machine that was being made": (
        "agent/test_reconcile.py::test_a_stray_needs_age_two_rounds_and_the_servers_word",
        "agent/test_reconcile.py::test_a_wanted_machine_is_never_destroyed",
    ),
    "what cost nothing counted against the balance, and ended what was paid for": (
        "workers/test_fleet.py::test_exempt_rentals_count_their_time_and_cost_nothing",
        "life/test_shipped_bugs.py::test_free_machines_do_not_end_those_that_are_paid_for",
    ),
    "threads of those who share were counted twice": (
        "placement/test_choose.py::test_sharing_beyond_the_threads_needs_both_sides",
        "life/test_shipped_bugs.py::test_threads_are_counted_once_however_they_are_shared",
    ),
    "downloads at once each reserved the room of all": (
        "agent/test_images.py::test_downloads_at_once_do_not_count_on_the_same_room",
        "agent/test_images.py::test_those_who_ask_meanwhile_get_the_same_one",
    ),
    "a file of credentials with a key alone was ignored and written over": (
        "agent/test_client.py::test_every_kind_of_credentials_file_loads_and_is_left_as_it_is",
    ),
    "a reservation of a custom shape could not be used again, because its node was not kept": (
        "reservations/test_service.py::test_a_reservation_of_a_shape_is_used_again_where_it_was_made",
    ),
    "published ports were gone after the machine below had been restarted": (
        "agent/test_reconcile.py::test_ports_of_a_running_machine_are_published_again",
    ),
    "credit did not count when a reservation was paid": (
        "reservations/test_operations.py::test_credit_counts_as_money",
    ),
    "a reservation was charged twice for one time": (
        "reservations/test_operations.py::test_a_reservation_of_what_runs_is_charged_once_and_its_time_costs_nothing",
        "reservations/test_operations.py::test_a_reservation_is_made_longer_and_charged_for_it",
    ),
    "a reservation was not charged when its machine was ended before the first tick": (
        "life/test_shipped_bugs.py::test_a_reservation_is_charged_though_no_tick_ever_saw_it",
    ),
    "volumes that cost nothing were deleted when the balance was empty": (
        "volumes/test_keeper.py::test_exempt_and_free_volumes_are_never_deleted",
    ),
    "a GPU stayed bound to the driver for guests after its guest was gone": (
        "agent/test_vfio.py::test_no_override_is_left_behind",
        "agent/test_vfio.py::test_a_binding_that_fails_leaves_no_override",
    ),
    "pages came from the mount of another size": (
        "agent/test_qemu_command.py::test_memory_comes_from_the_pages_of_the_nodes_that_it_was_given",
    ),
    "who was active from the beginning got no bonus and no invitations": (
        "auth/test_onboarding.py::test_from_a_stranger_to_a_session_with_a_bonus",
        "auth/test_onboarding.py::test_whoever_was_invited_is_in_the_team_once_the_address_is_verified",
        "auth/test_oauth.py::test_the_first_time_opens_an_account_with_the_bonus_and_later_times_do_not",
    ),
    "a GPU that people had switched off came back when its node registered": (
        "instances/test_rent.py::test_a_disabled_gpu_stays_so_when_its_node_registers_again",
    ),
    "strays kept their disks for ever": (
        "agent/test_reconcile.py::test_absent_destroys_with_the_graces_it_is_given",
        "agent/test_keeper.py::test_a_disk_is_erased_when_its_grace_is_over",
    ),
    "machines of a team were not found by their id": (
        "instances/test_rent.py::test_selectors_scopes_and_whose_instances_are_whose",
    ),
    "two machines that were rented at once were reached at one port": (
        "life/test_shipped_bugs.py::test_a_port_of_an_address_has_one_owner_at_a_time",
        "instances/test_rent.py::test_names_are_made_up_and_ports_are_published_once",
    ),
    "some functions of a GPU stayed behind when it was passed on": (
        "agent/test_vfio.py::test_all_functions_of_a_slot_go_and_come_back_together",
    ),
    "two containers that asked for one port of an address both got it": (
        "life/test_shipped_bugs.py::test_two_containers_that_ask_for_one_port_get_two",
    ),
}


@pytest.mark.parametrize("mistake", TESTED)
def test_the_tests_of_a_mistake_exist(mistake: str) -> None:
    assert TESTED[mistake], mistake
    for name in TESTED[mistake]:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOMS / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in found, f"{name} is gone"


@pytest.fixture
def rack(office: Office) -> Rack:
    return Rack(office)


@pytest.fixture
def ada(office: Office) -> Caller:
    return office.person(balance=1000 * NANO)


def check(office: Office) -> None:
    with office.database.read() as unit:
        assert broken(Facts(unit, now=office.now)) == []


def test_free_machines_do_not_end_those_that_are_paid_for(rack: Rack, office: Office) -> None:
    admin = office.person("admin", balance=100 * NANO)
    node = rack.node()
    free = [rack.rented(admin, "h200.0", billing_exempt=True) for _ in range(2)]
    paid = rack.rented(admin, "h200.0")
    for machine in free:
        node.run(machine)
    node.bring_up(paid)
    with office.database.read() as unit:
        before = accounts.get(unit, admin.account_id)
    office.wait(50)
    node.poll()
    assert rack.terminate(admin, *free).status == 200
    node.clean()
    with office.database.read() as unit:
        after = accounts.get(unit, admin.account_id)
    assert (after.posted, after.available) == (before.posted, before.available), "free time moves nothing"
    assert rack.show(admin, paid)["status"] == "Active"
    check(office)


def test_threads_are_counted_once_however_they_are_shared(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node(threads=16)
    packed = rack.variant("h200.0.packed", cpu_policy="Packed")
    machines = [rack.rented(ada, variant) for variant in ("h200.0", packed, packed)]
    with office.database.read() as unit:
        (view,) = load.views(unit, office.now, [node.node_id])
        taken = {row.instance_id: row.threads for row in unit.select(select(claim))}
    # Two vCPUs are two whole cores of two threads each, or both threads of one core.
    assert [taken[machine] for machine in machines] == [4, 2, 2]
    assert view.used.threads == len(view.threads_claimed) == 8
    rack.terminate(ada, *machines)
    node.clean()
    with office.database.read() as unit:
        (view,) = load.views(unit, office.now, [node.node_id])
    assert view.used.threads == len(view.threads_claimed) == 0
    check(office)


def test_a_reservation_is_charged_though_no_tick_ever_saw_it(rack: Rack, ada: Caller, office: Office) -> None:
    kind = {"duration_secs": 86_400, "price_factor": 0.5}
    type_id = office.ask("reservations.types_add", kind, office.person("admin")).body["id"]
    node = rack.node()
    machine = rack.rented(ada, reservation={"New": {"type_id": type_id}})
    node.bring_up(machine)
    rack.terminate(ada, machine)
    node.clean()
    with office.database.read() as unit:
        state = accounts.get(unit, ada.account_id)
    assert 1000 * NANO - state.posted == price(rack.COST, 86_400, PPM // 2)
    assert state.available == state.posted, "nothing is held any more"
    check(office)


def test_a_port_of_an_address_has_one_owner_at_a_time(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node()
    first, second = rack.rented(ada), rack.rented(ada)
    with office.database.read() as unit:
        leased = {row.instance_id: row for row in unit.select(select(port_lease))}
    taken = leased[first].host_port
    same = update(port_lease).where(port_lease.c.instance_id == second).values(host_port=taken)
    with pytest.raises(IntegrityError), office.database.write() as unit:
        unit.execute(same)
    rack.terminate(ada, first)
    node.clean()
    with office.database.write() as unit:
        unit.execute(same)
    assert rack.show(ada, second)["port_mappings"] == [[22, taken]], "who is gone has left its port"


def test_two_containers_that_ask_for_one_port_get_two(rack: Rack, ada: Caller, office: Office) -> None:
    rack.node()
    plain = rack.rented(ada, "h200.0", container=True, ports=["80"])
    (_, number) = rack.show(ada, plain)["port_mappings"][0]
    free = number + 1
    asked = [rack.rented(ada, "h200.0", container=True, ports=[f"{free}:80"]) for _ in range(2)]
    got = [rack.show(ada, machine)["port_mappings"][0][1] for machine in asked]
    assert got[0] == free and len({number, *got}) == 3
    check(office)
