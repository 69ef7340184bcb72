"""What quotas cover costs nothing, exactly as long as they cover it; what they hold is nobody else's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from marketplace.ledger.audit import audit
from marketplace.ledger.money import round_half_up
from marketplace.ledger.rentals import HOUR_US
from marketplace.placement.choose import NoPlace, Placement
from marketplace.quotas import coverage
from marketplace.quotas import service as quotas
from marketplace.quotas.service import FOREVER
from marketplace.quotas.tables import quota
from tests.marketplace.yard import COST

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office
    from tests.marketplace.yard import Yard

ONE = {"gpu_count": 1, "cpu_count": 8, "dram": 1 << 40, "disk": 1 << 40}
SECOND = 1_000_000


def give(office: Office, node_id: str, who: Caller, gpus: int, **more: Any) -> str:
    resources = {"gpu_count": gpus, "cpu_count": 2 * 2 * gpus, "dram": gpus << 34, "disk": gpus * 100 << 30}
    body = {"name": "q", "node_id": node_id, "recipient": {"UserId": who.id}, "resources": resources, **more}
    answer = office.ask("quotas.create", body, office.person("admin"))
    assert answer.status == 200, answer.body
    return str(answer.body["quota"]["id"])


def covered(office: Office, yard: Yard, who: Caller, node_id: str) -> str:
    """Something that runs under a quota, from the moment it is ready."""
    instance_id = yard.instance(who, node_id, status="Initializing")
    with office.database.read() as unit:
        until = coverage.free_until(unit, instance_id)
    yard.activate(instance_id, until)
    return instance_id


def revoke(office: Office, quota_id: str) -> int:
    assert office.ask("quotas.revoke", {"quota_id": quota_id}, office.person("admin")).status == 200
    with office.database.read() as unit:
        at = unit.select(select(quota.c.revoked_at).where(quota.c.id == quota_id)).scalar_one()
    assert at is not None
    return int(at)


def test_covered_time_costs_nothing_and_is_counted(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=10**12), yard.node()
    give(office, node_id, ada, 2)
    instance_id = covered(office, yard, ada, node_id)
    assert yard.meter(instance_id).free_until == FOREVER
    office.wait(3600)
    assert yard.tick(instance_id) == 0
    meter = yard.meter(instance_id)
    assert meter.metered_to - meter.started_at > 3600 * SECOND and meter.charged == 0


def test_what_ran_under_a_quota_costs_from_its_end(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=10**12), yard.node()
    till = office.now + 100 * SECOND
    give(office, node_id, ada, 2, valid_till="2027-01-15T08:01:40Z")
    instance_id = covered(office, yard, ada, node_id)
    meter = yard.meter(instance_id)
    assert meter.free_until is not None and abs(meter.free_until - till) < 100 * SECOND
    office.wait(1000)
    yard.end(instance_id)
    ended = yard.meter(instance_id)
    assert ended.stopped_at is not None and ended.charged > 0
    assert ended.charged == round_half_up(COST * (ended.stopped_at - meter.free_until), HOUR_US)


def test_a_quota_that_is_revoked_covers_up_to_then(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=10**12), yard.node()
    quota_id = give(office, node_id, ada, 2)
    instance_id = covered(office, yard, ada, node_id)
    office.wait(500)
    at = revoke(office, quota_id)
    office.wait(100)
    yard.end(instance_id)
    ended = yard.meter(instance_id)
    assert ended.stopped_at is not None
    assert ended.charged == round_half_up(COST * (ended.stopped_at - at), HOUR_US) > 0
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean


def test_a_quota_that_is_extended_covers_longer(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=10**12), yard.node()
    quota_id = give(office, node_id, ada, 2, valid_till="2027-01-15T09:00:00Z")
    instance_id = covered(office, yard, ada, node_id)
    body = {"quota_id": quota_id, "valid_till": "2027-03-01T00:00:00Z"}
    assert office.ask("quotas.update", body, office.person("admin")).status == 200
    office.wait(7 * 86_400)
    assert yard.tick(instance_id) == 0


def test_others_get_what_no_quota_holds(office: Office, yard: Yard) -> None:
    ada, eve, node_id = office.person(), office.person(), yard.node()
    quota_id = give(office, node_id, ada, 6)

    def fits(who: Caller, gpus: int) -> bool:
        with office.database.write() as unit:
            found = yard.place(unit, who, node_id, gpus)
            if isinstance(found, NoPlace):
                (rejected,) = found.rejected
                assert rejected.code == ("uncovered" if who is ada else "reserved"), rejected
            return isinstance(found, Placement)

    assert fits(eve, 2) and not fits(eve, 3)
    assert fits(ada, 6) and not fits(ada, 7), "all or nothing: never partly under a quota"
    yard.instance(ada, node_id, gpus=4)
    assert fits(ada, 2) and not fits(ada, 3) and fits(eve, 2) and not fits(eve, 3)
    revoke(office, quota_id)
    assert fits(eve, 4)


def test_a_quota_counts_only_while_it_is_in_force(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(), yard.node()
    give(office, node_id, ada, 8, valid_from="2027-02-01T00:00:00Z", valid_till="2027-02-02T00:00:00Z")
    begin, end = 1_801_440_000 * SECOND, 1_801_526_400 * SECOND
    with office.database.read() as unit:
        times = (office.now, begin - 1, begin, end - 1, end)
        assert [bool(quotas.standings(unit, [node_id], at)) for at in times] == [False, False, True, True, False]
        assert [bool(quotas.held_nodes(unit, [ada.account_id], at)) for at in times] == [
            False,
            False,
            True,
            True,
            False,
        ]


def test_of_two_who_give_the_same_capacity_at_once_one_is_refused(office: Office, yard: Yard) -> None:
    admin, ada, node_id = office.person("admin"), office.person(), yard.node()
    body = {"name": "q", "node_id": node_id, "recipient": {"UserId": ada.id}, "resources": {"gpu_count": 5}}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: office.ask("quotas.create", body, admin), range(4)))
    assert sorted(answer.status for answer in answers) == [200, 400, 400, 400]
    assert {answer.code for answer in answers if answer.status == 400} == {"QuotaExceedsNode"}
