"""Each check of compute is seen to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from marketplace.placement.audit import CHECKS
from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller

DAMAGE = {
    "two owners": (
        "C1",
        [
            "DROP INDEX ix_gpu_slice_claim_live",
            "UPDATE gpu_slice_claim SET released_at = NULL, "
            "gpu_id = (SELECT min(gpu_id) FROM gpu_slice_claim WHERE released_at IS NULL)",
        ],
    ),
    "a part of a GPU": ("C1", ["UPDATE gpu_slice_claim SET released_at = 5 WHERE slice = 3"]),
    "more than there is": ("C2", ["UPDATE claim SET dram = dram * 100"]),
    "a meter of nothing": ("C3", ["UPDATE rental_meter SET resource_id = id WHERE stopped_at IS NOT NULL"]),
    "a running meter of nothing": ("C3", ["UPDATE rental_meter SET resource_id = id WHERE stopped_at IS NULL"]),
    "a running meter of what is over": ("C4", ["UPDATE rental_meter SET stopped_at = NULL"]),
    "a meter of what never was ready": ("C4", ["UPDATE rental_meter SET started_at = 5"]),
    "a port of what is over": ("C5", ["UPDATE port_lease SET released_at = NULL"]),
    "no claim": ("C6", ["UPDATE claim SET released_at = 5", "DELETE FROM gpu_slice_claim", "DELETE FROM cpu_claim"]),
    "late": ("C8", ["UPDATE instance SET created_at = 9000000000000000 WHERE ended_at IS NULL"]),
    "a status without an event": ("C11", ["UPDATE node SET status = 'Offline'"]),
    "an event that cannot be": ("C11", ["UPDATE event SET action = 'instances.ready' WHERE action = 'instances.gone'"]),
}


def test_every_check_has_its_damage() -> None:
    assert {found for found, _ in DAMAGE.values()} == set(CHECKS)


@pytest.mark.parametrize("name", DAMAGE)
def test_the_audit_sees(name: str, rack: Rack, ada: Caller) -> None:
    database = rack.office.database
    if database.dialect != "sqlite" and "DROP" in DAMAGE[name][1][0]:
        pytest.skip("its schema is shared")
    found, damage = DAMAGE[name]
    node = rack.node()
    people = rack.operator()
    first, second = rack.rented(ada), rack.rented(ada)
    node.bring_up(first)
    node.bring_up(second)
    rack.terminate(ada, second)
    node.clean()
    rack.office.ask("nodes.drain", {"selector": {"ById": [node.node_id]}}, people)
    assert rack.audit().clean, rack.audit().lines()
    with database._writer.begin() as connection:
        if database.dialect == "sqlite":
            connection.execute(text("DROP TRIGGER IF EXISTS event_refuse_update"))
        else:
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in damage:
            connection.execute(text(statement))
    assert found in rack.audit().failed
