"""A rental is planned on a snapshot and written later: whatever changes in between is seen where it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import delete, insert, select, update

from marketplace.accounts import service as accounts
from marketplace.catalog import service as catalog
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO
from marketplace.networks.tables import port_lease
from marketplace.nodes.tables import node
from marketplace.placement import claims
from marketplace.quotas.tables import quota
from marketplace.settings import service as settings
from marketplace.teams.tables import team_member
from tests.marketplace.instances.test_terms import give
from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

Meanwhile = Callable[[Callable[[], Any]], None]


@pytest.fixture
def meanwhile(office: Office, monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Lets something happen between the next reading and its writing."""
    transact = office.database.transact
    waiting: list[Callable[[], Any]] = []

    def interrupted(work: Any) -> Any:
        if waiting:
            waiting.pop()()
        return transact(work)

    monkeypatch.setattr(office.database, "transact", interrupted)
    return waiting.append


def change(office: Office, *statements: Any) -> None:
    with office.database.write() as unit:
        for statement in statements:
            unit.execute(statement)


def row(office: Office, instance_id: str) -> Any:
    with office.database.read() as unit:
        return unit.select(select(instance).where(instance.c.id == instance_id)).one()


def left(office: Office) -> int:
    with office.database.read() as unit:
        return len(unit.select(select(instance.c.id)).all())


def test_somebody_else_claims_on_the_node(rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile) -> None:
    bob = office.person(balance=1000 * NANO)
    first, second = rack.node("g01"), rack.node("g02", gpus=4)
    taken: list[str] = []
    meanwhile(lambda: taken.append(rack.rented(bob)))
    mine = rack.rented(ada)
    assert row(office, mine).node_id == row(office, taken[0]).node_id == first.node_id, "beside each other"
    assert rack.audit().clean
    rack.terminate(bob, *taken)
    first.clean()
    # The last GPU of the node: there is another node, and then there is none.
    meanwhile(lambda: taken.append(rack.rented(bob)))
    assert row(office, rack.rented(ada)).node_id == second.node_id
    assert row(office, taken[1]).node_id == first.node_id
    meanwhile(lambda: rack.rented(bob, "h200.2"))
    before = left(office)
    refused = rack.rent(ada, "h200.2")
    assert (refused.status, refused.code) == (409, "InsufficientCapacity") and left(office) == before + 1
    assert rack.audit().clean


@pytest.mark.parametrize(
    "values", [{"status": "NotResponding"}, {"hibernated": True}, {"drain_state": "Draining"}, {"deleted_at": 1}]
)
def test_the_node_takes_nothing_new(
    values: dict[str, Any], rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile
) -> None:
    """None of it raises the node's generation here."""
    gone = rack.node("g01", gpus=1)
    rack.rented(ada, "h200.0")  # the process has seen the node
    there = rack.node("g02")
    meanwhile(lambda: change(office, update(node).where(node.c.id == gone.node_id).values(**values)))
    assert row(office, rack.rented(ada)).node_id == there.node_id
    meanwhile(lambda: change(office, update(node).values(**values)))
    assert rack.rent(ada).code == "InsufficientCapacity"


def test_the_catalog_changes(rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile) -> None:
    rack.node(gpus=4)
    with office.database.read() as unit:
        variant = catalog.variant(unit, "h200.1")
    assert variant is not None

    def dearer() -> None:
        with office.database.write() as unit:
            catalog.change_variant(unit, msgspec.structs.replace(variant, cost_per_hour=2 * rack.COST))
            settings.change(unit, {"provider_share": 7_000}, office.now)

    def removed() -> None:
        with office.database.write() as unit:
            catalog.remove_variant(unit, variant.name, office.now)

    assert row(office, rack.rented(ada)).cost_per_hour == rack.COST
    meanwhile(dearer)
    made = row(office, rack.rented(ada))
    assert (made.cost_per_hour, made.provider_share) == (2 * rack.COST, 7_000)
    poor = office.person(balance=2 * rack.COST)
    assert rack.rent(poor).status == 201
    meanwhile(removed)
    assert rack.rent(ada).code == "InstanceTypeNotFound"


def test_who_rents_changes(rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile) -> None:
    here, there = rack.node("g01"), rack.node("g02")
    admin, bob = office.person("admin"), office.person(balance=rack.COST)

    def spend() -> None:
        with office.database.write() as unit:
            accounts.adjust(unit, bob.account_id, -1, key="spent", now=office.now, random=office.random)

    meanwhile(spend)
    assert rack.rent(bob).code == "InsufficientFunds"

    def grant() -> None:
        give(office, ada, there.node_id, 2)
        change(office, update(quota).values(valid_from=1))  # in force when the request came

    meanwhile(grant)
    mine = row(office, rack.rented(ada))
    assert (mine.node_id, mine.quota_id is None) == (there.node_id, False), "from now on it rents on its quota"
    meanwhile(lambda: office.ask("quotas.revoke", {"quota_id": mine.quota_id}, admin))
    bare = row(office, rack.rented(ada))
    assert bare.quota_id is None and bare.node_id in (here.node_id, there.node_id)
    team = office.team(owner=admin)
    joined = {"team_id": team.id, "user_id": ada.id, "role": "Member", "joined_at": 1}
    change(office, insert(team_member).values(joined))
    assert rack.rent(ada, "h200.0", team_id=team.id).code == "InsufficientFunds", "the team's"
    with office.database.write() as unit:
        accounts.top_up(unit, team.account_id, NANO * 1000, key="t", now=office.now, random=office.random)
    meanwhile(lambda: change(office, delete(team_member).where(team_member.c.user_id == ada.id)))
    assert rack.rent(ada, "h200.0", team_id=team.id).code == "NotTeamMember"
    assert rack.audit().clean


def test_a_port_is_published_by_another_node_of_the_address(
    rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile
) -> None:
    nodes = [rack.node("g01", gpus=1), rack.node("g02", gpus=1)]
    box = {"Docker": {"image": "busybox", "ports": ["30000:80"]}}
    where = [{"selector": {"ByNodeId": {"node_id": one.node_id, "instance_type": "h200.1"}}} for one in nodes]
    meanwhile(lambda: rack.rented(ada, config=box, **where[0]))
    mine = rack.rented(ada, config=box, **where[1])
    with office.database.read() as unit:
        rows = unit.select(select(port_lease.c.instance_id, port_lease.c.host_port))
        ports = {row.instance_id: row.host_port for row in rows}
    assert ports.pop(mine) != 30000 and list(ports.values()) == [30000]


def test_a_repeated_request_is_answered_although_it_would_be_refused_now(
    rack: Rack, ada: Caller, office: Office, meanwhile: Meanwhile
) -> None:
    rack.node(gpus=1)
    body = {
        "selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200.1"}},
        "config": {"Docker": {"image": "busybox"}},
    }
    answers: list[Any] = []
    meanwhile(lambda: answers.append(office.ask("instances.rent", body, ada, Idempotency_Key="k")))
    for _ in range(2):
        answers.append(office.ask("instances.rent", body, ada, Idempotency_Key="k"))
    assert [one.status for one in answers] == [201] * 3 and len({str(one.body) for one in answers}) == 1
    assert answers[2].headers["Idempotency-Replayed"] == "true" and left(office) == 1
    assert office.ask("instances.rent", body, ada, Idempotency_Key="another").code == "InsufficientCapacity"


def test_who_is_always_overtaken_is_told_to_come_back(
    rack: Rack, ada: Caller, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    rack.node()
    tried: list[str] = []

    def never(unit: Any, node_id: str, generation: int) -> bool:
        tried.append(node_id)
        return False

    monkeypatch.setattr(claims, "seize", never)
    refused = rack.rent(ada)
    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "ServiceUnavailable", "2")
    assert len(tried) == 40 and left(office) == 0
