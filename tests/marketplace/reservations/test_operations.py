"""Reservations of what runs: paid once, at once, and over in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select, update

from marketplace.accounts import service as accounts
from marketplace.instances.tables import instance
from marketplace.ledger.audit import audit
from marketplace.ledger.ledger import payable_account
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.rentals import HOUR_US
from marketplace.ledger.tables import account
from marketplace.reservations.rules import PPM, price
from marketplace.reservations.wire import FactorIn
from marketplace.workers import expiry
from tests.marketplace.yard import COST

if TYPE_CHECKING:
    from tests.marketplace.office import Answer, Caller, Office
    from tests.marketplace.yard import Yard

DAY = 86_400
SECOND = 1_000_000


def offered(office: Office, duration: int = DAY, factor: Any = 1) -> str:
    body = {"duration_secs": duration, "price_factor": factor}
    answer = office.ask("reservations.types_add", body, office.person("admin"))
    assert answer.status == 200, answer.body
    return str(answer.body["id"])


def reserve(office: Office, who: Caller, instance_id: str, type_id: str, **more: Any) -> Answer:
    body = {"executor_id": instance_id, "reservation_type_id": type_id, **more}
    return office.ask("reservations.create", body, who)


def extend(office: Office, who: Caller, instance_id: str, type_id: str, **more: Any) -> Answer:
    return office.ask("reservations.update", {"executor_id": instance_id, "reservation_type_id": type_id, **more}, who)


def listed(office: Office, who: Caller, selector: Any = "All") -> list[dict[str, Any]]:
    answer = office.ask("reservations.list", {"selector": selector}, who)
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.body["reservations"]
    return found


def balance(office: Office, who: Caller) -> int:
    with office.database.read() as unit:
        return accounts.get(unit, who.account_id).posted


def expire(office: Office) -> int:
    return expiry.of_reservations(office.database, clock=office.clock, random=office.random).run()


def clean(office: Office) -> bool:
    with office.database.read() as unit:
        return audit(unit, now=office.now).clean


@settings(max_examples=50)
@given(st.integers(0, 10**13), st.integers(1, 10**8), st.integers(0, 10 * PPM))
def test_its_price_is_that_of_its_time_times_the_factor_rounded_once(cost: int, duration: int, factor: int) -> None:
    exact = cost * duration * factor
    assert abs(2 * price(cost, duration, factor) * 3600 * PPM - 2 * exact) <= 3600 * PPM
    assert price(cost, 3600, PPM) == cost


@pytest.mark.parametrize("value", [-1, 11, Decimal("0.0000001"), Decimal("1e-99999"), True, "1", Decimal("1.1234567")])
def test_impossible_factors(value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(FactorIn).validate_python(value)
    assert TypeAdapter(FactorIn).validate_python(Decimal("0.85")) == 850_000


def test_types_are_offered_and_taken_back(office: Office) -> None:
    long = office.ask(
        "reservations.types_add",
        None,
        office.person("admin"),
        raw=b'{"duration_secs": 2592000, "price_factor": 0.85}',
    ).body["id"]
    short = offered(office)
    body = office.ask("reservations.types_list", {}, office.person()).body
    assert body == [
        {"id": short, "duration": {"secs": DAY, "nanos": 0}, "price_factor": 1},
        {"id": long, "duration": {"secs": 30 * DAY, "nanos": 0}, "price_factor": Decimal("0.85")},
    ]
    assert (
        office.ask("reservations.types_add", {"duration_secs": DAY, "price_factor": 1}, office.person()).status == 403
    )
    admin = office.person("admin")
    assert office.ask("reservations.types_remove", {"id": short}, admin).status == 200
    gone = office.ask("reservations.types_remove", {"id": short}, admin)
    assert (gone.status, gone.code) == (404, "ReservationNotFound")
    assert [row["id"] for row in office.ask("reservations.types_list", {}, admin).body] == [long]


def test_a_reservation_of_what_runs_is_charged_once_and_its_time_costs_nothing(office: Office, yard: Yard) -> None:
    ada = office.person(balance=100_000 * NANO)
    node_id, type_id = yard.node(), offered(office)
    instance_id = yard.instance(ada, node_id, variant=yard.variant())
    office.wait(30)
    made = reserve(office, ada, instance_id, type_id)
    assert made.status == 200, made.body
    (row,) = listed(office, ada)
    assert row["id"] == made.body["reservation_id"] and row["state"] == "Bound"
    assert row["bound_resource"] == instance_id and row["instance_variant"] == {"name": "h200.1", "gpu_count": 1}
    assert row["instance_type"] == {"name": "h200", "gpuvendor_kernel_module_support": "OpenOrProprietary"}
    assert (row["node_id"], row["resources"], row["billing_exempt"]) == (None, None, False)
    before = yard.meter(instance_id)
    demand, prepaid = before.charged, price(COST, DAY, PPM)
    assert demand == COST * (before.metered_to - before.started_at) // HOUR_US > 0, "the time up to now is charged"
    assert balance(office, ada) == 100_000 * NANO - demand - prepaid
    office.wait(DAY - 1)
    assert yard.tick(instance_id) == 0
    office.wait(100)
    assert expire(office) == 1 and expire(office) == 0
    assert listed(office, ada)[0]["state"] == "Expired" and listed(office, ada)[0]["bound_resource"] is None
    yard.end(instance_id)
    after = yard.meter(instance_id)
    assert before.free_until is not None and after.stopped_at is not None
    due = before.rate * (before.metered_to - before.started_at + after.stopped_at - before.free_until)
    assert after.charged == round_half_up(due, HOUR_US), "on demand again from the very end of it"
    assert balance(office, ada) == 100_000 * NANO - after.charged - prepaid and clean(office)
    with office.database.read() as unit:
        owed = unit.select(
            select(account.c.posted).where(account.c.id == payable_account(yard.provider.id))
        ).scalar_one()
    assert abs(owed - (after.charged + prepaid) * 8 // 10) <= 3


def test_a_reservation_is_made_longer_and_charged_for_it(office: Office, yard: Yard) -> None:
    ada = office.person(balance=100_000 * NANO)
    day, hour, node_id = offered(office), offered(office, 3600), yard.node()
    instance_id = yard.instance(ada, node_id)
    assert extend(office, ada, instance_id, hour).code == "ReservationNotFound", "it has none"
    reserve(office, ada, instance_id, day)
    ends, before = yard.meter(instance_id).free_until, balance(office, ada)
    again = [
        office.ask(
            "reservations.update",
            {"instance_id": instance_id, "reservation_type_id": hour},
            ada,
            Idempotency_Key="once",
        )
        for _ in range(2)
    ]
    assert again[0].status == 200 and again[0].body == again[1].body
    assert ends is not None and yard.meter(instance_id).free_until == ends + 3600 * SECOND
    assert before - balance(office, ada) == price(COST, 3600, PPM), "charged once for one period"
    assert reserve(office, ada, instance_id, day).code == "ReservationBound"
    office.wait(DAY + 3700)
    assert extend(office, ada, instance_id, hour).code == "ReservationNotFound", "it is over, seen by a worker or not"
    yard.hear(node_id)
    assert reserve(office, ada, instance_id, hour).status == 200
    assert [row["state"] for row in listed(office, ada)] == ["Bound", "Expired"] and clean(office)


def test_what_an_exempt_reservation_covers_costs_nothing_at_all(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person(balance=NANO)
    type_id = offered(office)
    instance_id = yard.instance(admin, yard.node())
    made = reserve(office, admin, instance_id, type_id, billing_exempt=True)
    assert made.status == 200, made.body
    assert listed(office, admin)[0]["billing_exempt"] is True and balance(office, admin) == 0
    assert extend(office, admin, instance_id, type_id).code == "InsufficientFunds"
    assert extend(office, admin, instance_id, type_id, billing_exempt=True).status == 200
    for ask in (reserve, extend):
        refused = ask(office, ada, instance_id, type_id, billing_exempt=True)
        assert (refused.status, refused.code, refused.param) == (403, "PermissionDenied", "billing_exempt")
    office.wait(2 * DAY - 10)
    assert yard.tick(instance_id) == 0 and clean(office)


def test_who_may_not_and_what_cannot(office: Office, yard: Yard) -> None:
    ada, eve = office.person(balance=100 * NANO), office.person(balance=100_000 * NANO)
    team = office.team(ada)
    node_id, type_id = yard.node(), offered(office)
    mine, starting = yard.instance(ada, node_id), yard.instance(ada, node_id, status="Initializing")
    for answer, status, code, param in (
        (reserve(office, eve, mine, type_id), 404, "InstanceNotFound", "executor_id"),
        (extend(office, eve, mine, type_id), 404, "InstanceNotFound", "executor_id"),
        (reserve(office, ada, mine, type_id, team_id=team.id), 404, "InstanceNotFound", "executor_id"),
        (reserve(office, eve, mine, type_id, team_id=team.id), 403, "NotTeamMember", "team_id"),
        (reserve(office, ada, starting, type_id), 400, "InvalidTransition", "executor_id"),
        (reserve(office, ada, mine, "none"), 404, "ReservationNotFound", "reservation_type_id"),
        (reserve(office, ada, mine, type_id), 402, "InsufficientFunds", "reservation_type_id"),
    ):
        assert (answer.status, answer.code, answer.param) == (status, code, param), answer.body
    office.wait(61)
    silent = reserve(office, ada, mine, type_id)
    assert (silent.status, silent.code) == (503, "NodeNotResponding") and silent.headers["Retry-After"] == "30"
    assert listed(office, ada) == [] and clean(office)


def test_a_price_beyond_all_money_is_not_had(office: Office, yard: Yard) -> None:
    ada = office.person()
    type_id = offered(office, 3650 * DAY, 10)
    instance_id = yard.instance(ada, yard.node())
    with office.database.write() as unit:
        accounts.set_unlimited(unit, ada.account_id, True)
        unit.execute(update(instance).where(instance.c.id == instance_id).values(cost_per_hour=10**15))
    assert reserve(office, ada, instance_id, type_id).code == "InsufficientFunds"


def test_a_team_s_reservations_are_its_members(office: Office, yard: Yard) -> None:
    ada, eve = office.person(), office.person()
    team = office.team(ada)
    with office.database.write() as unit:
        accounts.top_up(unit, team.account_id, 10**14, key="t", now=office.clock(), random=office.random)
    type_id = offered(office)
    instance_id = yard.instance(team, yard.node(), team=True)
    assert reserve(office, ada, instance_id, type_id).code == "InstanceNotFound", "it is the team's"
    made = reserve(office, ada, instance_id, type_id, team_id=team.id)
    assert made.status == 200, made.body
    for who, selector in ((ada, "All"), (ada, {"ByTeamId": team.id}), (team, "All"), (office.person("admin"), "All")):
        assert [row["id"] for row in listed(office, who, selector)] == [made.body["reservation_id"]]
    (custom,) = listed(office, team)
    assert custom["node_id"] is not None and custom["instance_variant"] is None
    assert custom["resources"] == {"cpu_count": 2, "gpu_count": 1, "dram": 16 << 30, "disk": 100 << 30}
    assert listed(office, eve) == []
    assert office.ask("reservations.list", {"selector": {"ByTeamId": team.id}}, eve).code == "NotTeamMember"
    unknown = office.ask("reservations.list", {"selector": {"ByTeamId": "t"}}, office.person("admin"))
    assert (unknown.status, unknown.code) == (404, "TeamNotFound")


def test_the_same_money_buys_one_reservation(office: Office, yard: Yard) -> None:
    """Looking at the balance and charging it were two transactions once, and two requests spent it twice."""
    node_id, type_id = yard.node(), offered(office)
    cost = price(COST, DAY, PPM)
    ada = office.person(balance=cost + cost // 2)
    instances = [yard.instance(ada, node_id) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: reserve(office, ada, one, type_id), instances))
    assert sorted(answer.status for answer in answers) == [200, 402, 402, 402]
    assert len(listed(office, ada)) == 1 and clean(office)


def test_of_those_who_reserve_one_instance_at_once_one_pays(office: Office, yard: Yard) -> None:
    type_id, ada = offered(office), office.person(balance=100_000 * NANO)
    instance_id = yard.instance(ada, yard.node())
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: reserve(office, ada, instance_id, type_id), range(4)))
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    assert 100_000 * NANO - balance(office, ada) - yard.meter(instance_id).charged == price(COST, DAY, PPM)


def test_credit_counts_as_money(office: Office, yard: Yard) -> None:
    ada, type_id = office.person(), offered(office)
    with office.database.write() as unit:
        accounts.set_credit_limit(unit, ada.account_id, 100_000 * NANO)
    assert reserve(office, ada, yard.instance(ada, yard.node()), type_id).status == 200
    assert balance(office, ada) < 0 and clean(office)
