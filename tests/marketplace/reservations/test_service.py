"""Reservations that are made while renting: held, charged when it runs, given back when it never does, used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from marketplace.accounts import service as accounts
from marketplace.ledger import deposits
from marketplace.ledger.audit import audit
from marketplace.ledger.book import InsufficientFundsError
from marketplace.ledger.money import NANO
from marketplace.reservations import listing, service, types
from marketplace.reservations.rules import PPM, price
from marketplace.reservations.service import OtherShapeError, Resources, UnknownReservationError
from marketplace.workers import expiry
from tests.marketplace.yard import COST, SHARE

if TYPE_CHECKING:
    from typing import Any

    from tests.marketplace.office import Caller, Office
    from tests.marketplace.yard import Yard

DAY = 86_400
SECOND = 1_000_000
PAID = price(COST, DAY, PPM)


def hold(office: Office, yard: Yard, who: Caller, instance_id: str, *, custom: str | None = None) -> str:
    """What renting does: the reservation of something that is only being made."""
    scene = yard.scene()
    shape = Resources(vcpu=2, gpu=1, dram=16 << 30, disk=100 << 30)
    with office.database.write() as unit:
        type_id = types.add(unit, duration_s=DAY, price_factor=PPM, now=scene.now, random=scene.random)
        return service.hold_new(
            unit,
            type_id=type_id,
            account_id=who.account_id,
            user_id=who.id,
            team_id=None,
            instance_id=instance_id,
            variant=None if custom else "h200.1",
            node_id=custom,
            resources=service.encode(shape) if custom else None,
            cost_per_hour=COST,
            billing_exempt=False,
            scene=scene,
        )


def active(office: Office, yard: Yard, instance_id: str) -> int | None:
    scene = yard.scene()
    with office.database.write() as unit:
        until = service.on_active(unit, instance_id, yard.provider.id, SHARE, scene)
    yard.activate(instance_id, until)
    return until


def over(office: Office, yard: Yard, instance_id: str) -> None:
    with office.database.write() as unit:
        service.on_over(unit, instance_id, yard.scene())


def bind(office: Office, yard: Yard, who: Caller, reservation_id: str, instance_id: str) -> None:
    with office.database.write() as unit:
        service.bind(unit, reservation_id, who.account_id, instance_id, yard.scene())


def rows(office: Office, who: Caller) -> list[Any]:
    with office.database.read() as unit:
        return listing.page(unit, [who.account_id], cursor=None, limit=10)


def state(office: Office, who: Caller) -> tuple[int, int]:
    """What is posted and held; the books are sound."""
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean
        found = accounts.get(unit, who.account_id)
    return found.posted, found.held


def test_money_is_held_until_it_runs_and_charged_then(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=PAID), yard.node()
    yard.variant()
    instance_id = yard.instance(ada, node_id, status="Initializing", variant="h200.1")
    hold(office, yard, ada, instance_id)
    assert state(office, ada) == (PAID, PAID)
    assert rows(office, ada)[0].valid_till is None
    until = active(office, yard, instance_id)
    assert state(office, ada) == (0, 0), "charged when it runs, not at a first tick that may never come"
    yard.end(instance_id)
    over(office, yard, instance_id)
    (row,) = rows(office, ada)
    assert (row.state, row.instance_id, row.valid_till, row.prepaid) == ("Unbound", None, until, PAID)
    assert state(office, ada) == (0, 0) and yard.meter(instance_id).charged == 0


def test_what_never_runs_costs_nothing(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=PAID), yard.node()
    yard.variant()
    instance_id = yard.instance(ada, node_id, status="Initializing", variant="h200.1")
    reservation_id = hold(office, yard, ada, instance_id)
    yard.end(instance_id)
    for _ in range(2):
        over(office, yard, instance_id)
    assert state(office, ada) == (PAID, 0) and rows(office, ada)[0].state == "Cancelled"
    with office.database.write() as unit:
        assert deposits.release(unit, reservation_id, office.clock()) == 0, "given back once"
        assert service.on_active(unit, instance_id, yard.provider.id, SHARE, yard.scene()) is None
    assert state(office, ada) == (PAID, 0)


def test_what_was_paid_is_used_again_while_it_lasts(office: Office, yard: Yard) -> None:
    ada, eve, node_id = office.person(balance=PAID), office.person(), yard.node()
    yard.variant()
    first = yard.instance(ada, node_id, status="Initializing", variant="h200.1")
    reservation_id = hold(office, yard, ada, first)
    until = active(office, yard, first)
    second = yard.instance(ada, node_id, status="Initializing", variant="h200.1")
    with pytest.raises(UnknownReservationError):
        bind(office, yard, ada, reservation_id, second)
    yard.end(first)
    over(office, yard, first)
    other = yard.instance(ada, node_id, status="Initializing", variant=None)
    foreign = yard.instance(eve, node_id, status="Initializing", variant="h200.1")
    with pytest.raises(OtherShapeError):
        bind(office, yard, ada, reservation_id, other)
    with pytest.raises(UnknownReservationError):
        bind(office, yard, eve, reservation_id, foreign)
    bind(office, yard, ada, reservation_id, second)
    assert active(office, yard, second) == until, "its clock kept running"
    assert state(office, ada) == (0, 0), "and it is not charged again"
    yard.end(second)
    over(office, yard, second)
    office.wait(DAY)
    third = yard.instance(ada, node_id, status="Initializing", variant="h200.1")
    with pytest.raises(UnknownReservationError):
        bind(office, yard, ada, reservation_id, third)


def test_a_reservation_of_a_shape_is_used_again_where_it_was_made(office: Office, yard: Yard) -> None:
    """A custom reservation could not be used again once, because its node was not kept."""
    ada, node_id, elsewhere = office.person(balance=PAID), yard.node(), yard.node("g08")
    first = yard.instance(ada, node_id, status="Initializing")
    reservation_id = hold(office, yard, ada, first, custom=node_id)
    active(office, yard, first)
    yard.end(first)
    over(office, yard, first)
    for other in (
        yard.instance(ada, elsewhere, status="Initializing"),
        yard.instance(ada, node_id, gpus=2, status="Initializing"),
    ):
        with pytest.raises(OtherShapeError):
            bind(office, yard, ada, reservation_id, other)
    bind(office, yard, ada, reservation_id, yard.instance(ada, node_id, status="Initializing"))
    (row,) = rows(office, ada)
    assert (row.state, row.node_id) == ("Bound", node_id)
    assert msgspec.json.decode(row.resources) == {"vcpu": 2, "gpu": 1, "dram": 16 << 30, "disk": 100 << 30}


def test_what_cannot_be_paid_is_not_held(office: Office, yard: Yard) -> None:
    ada = office.person(balance=PAID - 1)
    instance_id = yard.instance(ada, yard.node(), status="Initializing")
    yard.variant()
    with pytest.raises(InsufficientFundsError):
        hold(office, yard, ada, instance_id)
    assert state(office, ada) == (PAID - 1, 0) and rows(office, ada) == []


def test_the_end_comes_whether_it_is_used_or_not_and_once(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=2 * PAID + NANO), yard.node()
    yard.variant()
    used, unused = (yard.instance(ada, node_id, status="Initializing", variant="h200.1") for _ in range(2))
    for instance_id in (used, unused):
        hold(office, yard, ada, instance_id)
        active(office, yard, instance_id)
    yard.end(unused)
    over(office, yard, unused)
    worker = expiry.of_reservations(office.database, clock=office.clock, random=office.random)
    assert worker.run() == 0
    office.wait(DAY)
    assert worker.run(lambda: True) == 0
    assert [worker.run(), worker.run()] == [2, 0]
    assert {row.state for row in rows(office, ada)} == {"Expired"}
    over(office, yard, used)
    assert {row.state for row in rows(office, ada)} == {"Expired"}
    events = office.ask("events.list", {"limit": 100}, ada).body["events"]
    assert [event["action"] for event in events].count("reservations.expire") == 2
