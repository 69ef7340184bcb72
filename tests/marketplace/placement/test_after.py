"""What a process knows of a node after its own rentals is what it would read."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import update

from marketplace.agent.inventory_wire import MigProfile
from marketplace.agent.wire import LeaseReport
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.ledger.money import NANO
from marketplace.nodes.tables import node as node_table
from marketplace.placement import load
from marketplace.placement.view import NodeView
from tests.marketplace.rack import GIB, Agent, Rack, inventory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from marketplace.store.db import ReadUnit
    from tests.marketplace.conftest import Caller, Office


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that were read."""
    names: list[str] = []
    views = load.views

    def noted(unit: ReadUnit, now: int, node_ids: Collection[str] | None = None) -> list[NodeView]:
        names.extend(["all"] if node_ids is None else node_ids)
        return views(unit, now, node_ids)

    monkeypatch.setattr(load, "views", noted)
    return names


def known_and_there(office: Office) -> tuple[NodeView, NodeView]:
    with office.database.read() as unit:
        (known,) = office.context.fleet.taking(unit, "h200", office.now)
        (there,) = load.views(unit, office.now, [known.id])
    return known, there


def test_whole_gpus_pages_and_allocations(rack: Rack, ada: Caller, office: Office, read: list[str]) -> None:
    agent = rack.node(gpus=6, threads=48, hugepages=64)
    bob = office.person(balance=1000 * NANO)

    def rents(who: Caller, variant: str, **more: Any) -> NodeView:
        read.clear()
        rack.rented(who, variant, **more)
        known, there = known_and_there(office)
        assert known == there and read == [agent.node_id], "read by this test alone"
        return known

    rack.rented(ada, "h200.1", container=True)
    rents(ada, rack.variant("h200.0.packed", cpu_policy="Packed"))
    known = rents(ada, "h200.2")
    assert known.used.gpu == 3 and sum(known.pages_used.values()) == 2 * 8, "containers have none"
    body = {
        "name": "q",
        "node_id": agent.node_id,
        "recipient": {"UserId": bob.id},
        "resources": {"gpu_count": 2, "cpu_count": 8, "dram": 16 * GIB, "disk": 20 * GIB},
    }
    assert office.ask("quotas.create", body, office.person("admin")).status == 200
    office.wait(1)
    rack.rented(bob)
    assert rents(bob, "h200.1", container=True).standings[0].consumed.gpu == 2
    rack.terminate(ada, *(one["id"] for one in office.ask("instances.list", {}, ada).body["instances"]))
    agent.clean()
    known, there = known_and_there(office)
    assert known == there and known.used.gpu == 2, "bob's"
    assert rack.audit().clean


def test_parts_of_a_gpu_that_vcpus_share(rack: Rack, ada: Caller, office: Office, read: list[str]) -> None:
    whole = inventory("g01", gpus=1)
    profile = MigProfile(profile="3g.71gb", size=4, placements=[0, 4])
    gpu = msgspec.structs.replace(whole.gpus[0], mig_enabled=True, mig_profiles=[profile])
    agent = Agent(rack, "g01", msgspec.structs.replace(whole, gpus=[gpu]))
    agent.register()
    part = Variant(
        name="h200.part",
        type_name="h200",
        gpu_count=1,
        mig_profile=profile.profile,
        vcpu=1,
        dram=GIB,
        disk=GIB,
        services=("container",),
        cpu_policy="Shared",
        cost_per_hour=NANO,
    )
    with office.database.write() as unit:
        unit.execute(update(node_table).values(instance_type="h200"))
        catalog.add_variant(unit, part, office.clock())
    rack.rented(ada, "h200.part", container=True)
    read.clear()
    rack.rented(ada, "h200.part", container=True)
    known, there = known_and_there(office)
    assert known == there and read == [agent.node_id]
    assert known.gpus[0].rented == frozenset(range(8)) and not known.threads_claimed


def test_a_node_whose_leases_end_is_read(rack: Rack, ada: Caller, office: Office, read: list[str]) -> None:
    agent = rack.node(gpus=2)
    agent.leases = [LeaseReport(id="l1", holder="engine", state="Requested", count=2)]
    agent.poll()
    rack.rented(ada)
    read.clear()
    known, there = known_and_there(office)
    assert known == there and read == [agent.node_id] * 2
    assert [bool(gpu.leased) for gpu in known.gpus] == [False, False], "the other GPU of the lease too"


def test_nodes_come_in_their_order_whatever_became_of_them(rack: Rack, ada: Caller, office: Office) -> None:
    agents = [rack.node(f"g0{number}", gpus=2 + number % 2) for number in range(4)]
    rented: list[str] = []

    def rent(variant: str) -> None:
        rented.append(rack.rented(ada, variant))

    def drain(step: str) -> None:
        answer = office.ask(f"nodes.{step}", {"selector": {"ById": [agents[1].node_id]}}, admin)
        assert answer.status == 200, answer.body

    admin = office.person("admin")
    steps: list[Callable[[], object]] = [
        *(partial(rent, variant) for variant in ("h200.1", "h200.2", "h200.0", "h200.1")),
        partial(drain, "drain"),
        lambda: rack.terminate(ada, rented[1]),
        *(agent.clean for agent in agents),
        partial(drain, "resume"),
        *(partial(rent, variant) for variant in ("h200.2", "h200.1", "h200.1")),
        agents[2].leave,
    ]
    for step in steps:
        office.wait(1)
        step()
        with office.database.read() as unit:
            known = office.context.fleet.taking(unit, "h200", office.now)
            everything = load.views(unit, office.now)
        there = [view for view in everything if (view.status, view.drain_state) == ("Ready", "None")]
        assert list(known) == sorted(there, key=lambda view: view.score)
        assert [(one.capacity, one.per_core, one.taken) for one in known] == [
            (one.capacity, one.per_core, one.taken) for one in sorted(there, key=lambda view: view.score)
        ]
    assert len(known) == 3, "one has said that it goes"
    assert rack.audit().clean


def test_what_is_taken_back_was_never_so(
    rack: Rack, ada: Caller, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = rack.node()
    before, _ = known_and_there(office)

    def breaks(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr("marketplace.instances.rent._reserve", breaks)
        assert rack.rent(ada).status == 500
    known, there = known_and_there(office)
    assert known is before and known == there and known.id == agent.node_id
