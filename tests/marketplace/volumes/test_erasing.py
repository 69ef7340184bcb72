"""A volume is gone when its node has removed the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marketplace.agent.wire import Poll
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.instances import specs
from marketplace.ledger.money import NANO
from marketplace.nodes import service as nodes
from marketplace.nodes import talk
from marketplace.volumes import service as volumes

if TYPE_CHECKING:
    from tests.marketplace.office import Office
    from tests.marketplace.yard import Yard


def test_the_node_is_told_until_it_has_done_it(office: Office, yard: Yard) -> None:
    ada, admin, node_id = office.person(balance=NANO), office.person("admin"), yard.node()
    kind = {"datacenter": "acme-1", "name": "standard", "cost_per_gb_per_month": 10}
    assert office.ask("volumes.types_add", kind, admin).status == 200
    body = {"name": "data", "size_gb": 1, "datacenter": "acme-1", "volume_type_name": "standard"}
    volume_id = office.ask("volumes.create", body, ada).body["volume"]["id"]
    instance_id = yard.instance(ada, node_id)

    def scene() -> Scene:
        return Scene(SYSTEM, office.clock(), office.random)

    def told(applied: int) -> list[str]:
        """What the node is told to erase after a poll."""
        with office.database.write() as unit:
            row = nodes.find(unit, node_id)
            talk.poll(
                unit, yard.provider.id, Poll(session_id=row.session_id, epoch=row.epoch, applied_rev=applied), scene()
            )
        with office.database.read() as unit:
            return specs.desired(unit, office.context.vault, node_id).erased_volumes

    with office.database.write() as unit:
        volumes.attach(unit, instance_id, node_id, ada.account_id, [(volume_id, "/d")], scene(), owner_id=ada.id)
        volumes.on_over(unit, instance_id, scene(), owner_id=ada.id)
        before = nodes.find(unit, node_id).desired_rev
    assert told(before) == []
    assert office.ask("volumes.delete", {"volume_id": volume_id}, ada).status == 200
    with office.database.read() as unit:
        after = nodes.find(unit, node_id).desired_rev
    assert after > before, "its agent is woken"
    assert told(before) == told(before) == [volume_id]
    assert office.ask("volumes.get", {"volume_id": volume_id}, ada).body["volume"]["status"] == "Deleting"
    assert told(after) == []
    assert office.ask("volumes.get", {"volume_id": volume_id}, ada).code == "VolumeNotFound"
