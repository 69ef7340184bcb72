"""Volumes cost exactly their time; those that nobody pays for are kept for a while and then deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.ledger import deposits
from marketplace.ledger.audit import audit
from marketplace.ledger.ledger import payable_account
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.tables import account
from marketplace.store.db import WriteUnit
from marketplace.volumes import service as volumes
from marketplace.volumes.rules import MONTH_US, Step, rate, step
from marketplace.volumes.tables import volume
from marketplace.workers import volumes as worker
from marketplace.workers.volumes import VolumeKeeper

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office
    from tests.marketplace.yard import Yard

DAY = 86_400
CENT = NANO // 100


def make(office: Office, yard: Yard, who: Caller, *, cents: int = 1000, exempt: bool = False) -> str:
    """A volume of 7 GB."""
    yard.node()
    admin = office.person("admin")
    kind = {"datacenter": "acme-1", "name": f"t{office.now}", "cost_per_gb_per_month": cents}
    office.ask("volumes.types_add", kind, admin)
    body = {"name": kind["name"], "size_gb": 7, "datacenter": "acme-1", "volume_type_name": kind["name"]}
    answer = office.ask("volumes.create", {**body, "billing_exempt": exempt}, admin if exempt else who)
    assert answer.status == 201, answer.body
    return str(answer.body["volume"]["id"])


def keeper(office: Office) -> VolumeKeeper:
    return VolumeKeeper(office.database, clock=office.clock, random=office.random)


def row(office: Office, volume_id: str) -> tuple[str, int | None]:
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean
        found = unit.select(select(volume.c.status, volume.c.delete_after).where(volume.c.id == volume_id)).one()
    return found.status, found.delete_after


@pytest.mark.parametrize(
    ("poor", "delete_after", "attached", "due"),
    [
        (False, None, False, None),
        (False, 5, False, "spare"),
        (False, 50, True, "spare"),
        (True, None, False, "warn"),
        (True, None, True, "warn"),
        (True, 11, False, None),
        (True, 10, False, "delete"),
        (True, 10, True, None),
    ],
)
def test_what_is_due(poor: bool, delete_after: int | None, attached: bool, due: Step | None) -> None:
    assert step(poor=poor, delete_after=delete_after, attached=attached, now=10) == due


def test_a_volume_costs_exactly_its_time_however_often_it_is_charged(office: Office, yard: Yard) -> None:
    ada = office.person(balance=1000 * NANO)
    volume_id = make(office, yard, ada)
    assert keeper(office).run() == 0, "not within the first hour"
    for _ in range(5):
        office.wait(3671)
        assert [keeper(office).run(), keeper(office).run()] == [1, 0]
    office.wait(100)
    office.ask("volumes.delete", {"volume_id": volume_id}, ada)
    meter = yard.meter(volume_id)
    assert meter.stopped_at is not None
    assert meter.charged == round_half_up(rate(7, 1000 * CENT) * (meter.stopped_at - meter.started_at), MONTH_US) > 0
    with office.database.read() as unit:
        assert 1000 * NANO - accounts.get(unit, ada.account_id).posted == meter.charged
        owed = unit.select(
            select(account.c.posted).where(account.c.id == payable_account(yard.provider.id))
        ).scalar_one()
    assert abs(owed - meter.charged * 8 // 10) <= 6
    office.wait(DAY)
    assert keeper(office).run() == 0 and row(office, volume_id)[0] == "Deleted"


def test_a_volume_that_nobody_pays_for_is_kept_for_a_while(office: Office, yard: Yard) -> None:
    ada = office.person(balance=CENT)
    volume_id = make(office, yard, ada)
    office.wait(DAY)
    assert keeper(office).run() == 2, "charged what there was, and warned"
    status, until = row(office, volume_id)
    assert status == "Available" and until is not None and until > office.now + 6 * DAY * 1_000_000
    office.wait(6 * DAY)
    keeper(office).run()
    assert row(office, volume_id) == ("Available", until)
    with office.database.write() as unit:
        accounts.top_up(unit, ada.account_id, 100 * NANO, key="k", now=office.clock(), random=office.random)
    keeper(office).run()
    assert row(office, volume_id) == ("Available", None), "whoever pays keeps it"
    office.wait(3 * DAY)
    keeper(office).run()
    assert row(office, volume_id) == ("Available", None)


def test_then_it_is_deleted_unless_an_instance_has_it(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=CENT), yard.node()
    loose, held = make(office, yard, ada), make(office, yard, ada)
    instance_id = yard.instance(ada, node_id)
    scene = Scene(SYSTEM, office.clock(), office.random)
    with office.database.write() as unit:
        volumes.attach(unit, instance_id, node_id, ada.account_id, [(held, "/d")], scene, owner_id=ada.id)
    office.wait(DAY)
    keeper(office).run()
    office.wait(7 * DAY)
    keeper(office).run()
    assert (row(office, loose)[0], row(office, held)[0]) == ("Deleted", "Attached")
    with office.database.write() as unit:
        volumes.on_over(unit, instance_id, Scene(SYSTEM, office.clock(), office.random), owner_id=ada.id)
    keeper(office).run()
    assert row(office, held)[0] == "Deleting", "its node removes the file"
    assert yard.meter(held).stopped_at is not None
    assert keeper(office).run() == 0


def test_exempt_and_free_volumes_are_never_deleted(office: Office, yard: Yard) -> None:
    """Exempt volumes were deleted once when the balance was zero."""
    admin, ada = office.person("admin"), office.person()
    exempt, free = make(office, yard, admin, exempt=True), make(office, yard, ada, cents=0)
    for _ in range(3):
        office.wait(10 * DAY)
        keeper(office).run()
    for volume_id in (exempt, free):
        assert row(office, volume_id) == ("Available", None)
        meter = yard.meter(volume_id)
        assert meter.charged == 0 and meter.metered_to > meter.started_at, "its time is counted, and costs nothing"


def test_credit_and_what_is_held_count(office: Office, yard: Yard) -> None:
    ada = office.person(balance=1000 * NANO)
    volume_id = make(office, yard, ada)
    with office.database.write() as unit:
        state = accounts.get(unit, ada.account_id)
        deposits.hold(unit, ada.account_id, "r", state.available, now=office.clock(), random=office.random)
    keeper(office).run()
    assert row(office, volume_id)[1] is not None
    with office.database.write() as unit:
        accounts.set_credit_limit(unit, ada.account_id, NANO)
    keeper(office).run()
    assert row(office, volume_id)[1] is None


def test_a_keeper_that_is_killed_at_any_step_is_made_up_for(
    office: Office, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = office.person(balance=CENT)
    first, second = make(office, yard, ada), make(office, yard, ada)
    office.wait(DAY)
    real, calls = worker.rentals.tick, 0

    def dying(unit: WriteUnit, *rest: object, **more: object) -> int:
        nonlocal calls
        calls += 1
        charged = real(unit, *rest, **more)  # type: ignore[arg-type]  # what the worker passes
        if calls == 2:
            raise KeyboardInterrupt
        return charged

    monkeypatch.setattr(worker.rentals, "tick", dying)
    with pytest.raises(KeyboardInterrupt):
        keeper(office).run()
    done = [one for one in (first, second) if yard.meter(one).charged]
    assert len(done) == 1, "what was begun is undone, what was done stays"
    assert keeper(office).run(lambda: True) == 0
    keeper(office).run()
    assert all(yard.meter(one).metered_to > yard.meter(one).started_at for one in (first, second))
    assert keeper(office).run() == 0 and row(office, first)[1] is not None
