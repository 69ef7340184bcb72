"""What a process remembers of nodes is what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import insert, select

from marketplace.placement import claims
from marketplace.placement.choose import Placement, Wanted
from marketplace.placement.fleet import Fleet
from marketplace.placement.place import CrowdedError, look, place
from marketplace.placement.view import NodeView
from marketplace.quotas.tables import quota
from tests.marketplace.rack import GIB, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

ONE = Wanted(kind="VirtualMachine", gpus=1, vcpu=2, dram=8 * GIB, disk=GIB, instance_type="h200")


class TakenBackError(Exception):
    """Takes a unit back."""


def test_a_node_is_read_again_when_its_generation_rose(
    rack: Rack, ada: Caller, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    node_id = rack.node("g01").node_id
    rack.node("g02")

    def views(now: int | None = None) -> dict[str, NodeView]:
        with office.database.read() as unit:
            return {view.id: view for view in fleet.taking(unit, "h200", now or office.now)}

    before = views()
    assert all(view is before[name] for name, view in views().items())
    assert views(office.now - 1)[node_id] is not before[node_id], "a clock that was put back tells nothing"
    before = views()
    rented = rack.show(ada, rack.rented(ada))["node_id"]
    after = views()
    assert [after[name] is not view for name, view in before.items()] == [name == rented for name in before]
    assert after[rented].free_gpus == before[rented].free_gpus - 1
    # What is taken back was never so: nothing is remembered of a unit that writes.
    with pytest.raises(TakenBackError), office.database.write() as unit:
        claims.changed(unit, node_id)
        assert {view.id: view for view in fleet.taking(unit, "h200", office.now)}[node_id].generation == (
            after[node_id].generation + 1
        )
        raise TakenBackError
    assert views()[node_id] is after[node_id]


def test_quotas_begin_and_end_by_themselves(rack: Rack, ada: Caller, office: Office) -> None:
    fleet, node_id, now = Fleet(), rack.node().node_id, office.now
    row = {
        "id": "q",
        "node_id": node_id,
        "account_id": ada.account_id,
        "holder_kind": "user",
        "holder_id": ada.id,
        "name": "q",
        "gpu": 1,
        "vcpu": 2,
        "dram": GIB,
        "disk": GIB,
        "active": True,
        "exclusive": False,
        "valid_from": now + 10,
        "valid_till": now + 20,
        "created_at": now,
    }
    with office.database.write() as unit:
        missing = {column.name: None for column in quota.columns if column.name not in row}
        unit.execute(insert(quota).values(**row, **{**missing, "created_by": ada.id}))
        claims.changed(unit, node_id)

    def standing(at: int) -> list[str]:
        with office.database.read() as unit:
            (view,) = fleet.taking(unit, "h200", at)
            return [one.id for one in view.standings]

    assert [standing(now + after) for after in (0, 9, 10, 19, 20, 30)] == [[], [], ["q"], ["q"], [], []]


def test_looking_claims_nothing_and_placing_meets_those_who_are_faster(
    rack: Rack, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = rack.node().node_id
    generation = select(claims.node.c.generation).where(claims.node.c.id == node_id)
    with office.database.read() as unit:
        before = unit.select(generation).scalar_one()
        found = look(unit, Fleet(), ONE, office.now)
        assert isinstance(found, Placement) and found.node.id == node_id
    with office.database.write() as unit:
        placed = place(unit, ONE, office.now)
        assert isinstance(placed, Placement) and unit.select(generation).scalar_one() == before + 1
        assert not claims.seize(unit, node_id, before), "it was looked at before"
    monkeypatch.setattr(claims, "seize", lambda *_: False)
    with pytest.raises(CrowdedError), office.database.write() as unit:
        place(unit, ONE, office.now)
