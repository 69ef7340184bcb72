"""What games of the whole machine found, one example each."""

from __future__ import annotations

import os

import pytest

from marketplace.agent.leases import LeaseBook, Wanted
from marketplace.agent.wire import LeaseGrant
from marketplace.ledger import rentals
from marketplace.ledger.money import NANO
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Rack
from tests.marketplace.shop import Shop


@pytest.fixture
def rack(office: Office) -> Rack:
    return Rack(office)


@pytest.fixture
def ada(office: Office) -> Caller:
    return office.person(balance=1000 * NANO)


def test_a_report_that_is_delivered_twice_confirms_nothing(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.bring_up(machine)
    node.poll()
    node.sees(machine, "Missing", power=None)
    node.poll()
    rack.office.wait(-1)  # what `poll` waits: the message comes again at once
    node.poll()
    assert rack.show(ada, machine)["status"] == "Active", "its node looked once"
    node.poll()
    assert rack.show(ada, machine)["status"] == "Deactivating", "it looked again"


def test_a_lease_that_the_server_grants_no_more_is_over() -> None:
    killed: list[int] = []
    book = LeaseBook(kill=killed.append)
    lease = book.request(Wanted(holder="engine", pid=os.getpid(), count=1), 0)
    book.hear([LeaseGrant(id=lease.id, fence=1, gpus=["0000:65:00.0"])], 0)
    book.hear([LeaseGrant(id=lease.id, fence=2, refused="some of these GPUs are not free")], 1)
    assert book.look(lease.id).revoke_at == 1
    assert book.enforce(1) == [lease.id] and os.getpid() in killed, "its GPUs are somebody else's by now"


def test_a_meter_that_ends_where_it_was_ticked_charges_what_is_left_of_a_nano_unit(shop: Shop) -> None:
    now, account = shop.tick(), shop.customer(NANO)
    with shop.database.write() as unit:
        rentals.start(
            unit,
            resource_type="Compute",
            resource_id="i",
            resource_name="trainer",
            account_id=account,
            provider_id=None,
            share=8000,
            rate=NANO,
            now=now,
            random=shop.random,
        )
    with shop.database.write() as unit:
        meter = rentals.running(unit, "i")
        assert meter is not None
        assert rentals.tick(unit, meter, now + 10, random=shop.random) == 2, "10 µs cost 2.78 nano-units"
    with shop.database.write() as unit:
        assert rentals.stop(unit, "i", now + 10, random=shop.random) == 1
    assert shop.posted(account) == NANO - 3 and shop.audit().failed == ("C3",), "it is of nothing, and right"
