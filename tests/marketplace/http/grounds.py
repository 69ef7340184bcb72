"""What requests about machines are about: a datacenter with a node, a catalog, and things of a person's in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from marketplace.nodes.tables import node
from marketplace.operations import TABLE
from marketplace.presets import service as presets
from marketplace.presets.tables import instance_preset
from tests.marketplace.yard import Yard

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office

EXAMPLES = {operation.name: operation.example for operation in TABLE}
SHAPE = presets.Shape(instance_type=None, gpu_count=1, vcpu=2, dram=1 << 34, disk=1 << 36)


class Grounds:
    """Makes things again and again, under names that are not taken, for a person and the admin."""

    def __init__(self, office: Office, user: Caller, admin: Caller) -> None:
        self.office, self.user, self.admin = office, user, admin
        self.yard = Yard(office)
        self._numbers = itertools.count()
        self.team = str(office.ask("teams.create", {"name": "research"}, user).body["id"])
        self.make("datacenters.add", provider=self.yard.provider.name)
        self._offer()
        self.make("recipes.add", **{"global": True})
        self.variant = self.yard.variant()

    def make(self, name: str, who: Caller | None = None, /, **changed: Any) -> Any:
        """Ask what an example asks, with some values of its own."""
        answer = self.office.ask(name, {**EXAMPLES[name], **changed}, who or self.admin)
        assert answer.status in (200, 201), (name, answer.body)
        return answer.body

    def _offer(self) -> None:
        """Have the type and the variant of the examples on offer: requests that were made up may have ended them."""
        for name in ("instance_types.add", "instance_types.add_variant"):
            assert self.office.ask(name, EXAMPLES[name], self.admin).status in (200, 201, 409), name

    def wake(self) -> None:
        """Let every node have given a sign of life now."""
        with self.office.database.write() as unit:
            unit.execute(update(node).values(last_seen=self.office.clock()))

    def known(self, name: str) -> dict[str, Any]:
        """Things that exist, made for a request of this operation, by the names that fields have for them."""
        for whose in ({"ByTeamIds": [self.team]}, {"ByUserIds": [self.user.id]}):
            self.make("account.transactions_create_external", account=whose, amount=100_000)
        self._offer()
        noun, _, _ = name.partition(".")
        make = getattr(self, f"_{noun}", None)
        return make(name, self.office.clock()) if make is not None else {}

    def _instance_types(self, name: str, now: int) -> dict[str, Any]:
        if name in ("instance_types.add", "instance_types.add_variant"):
            return {"name": f"h200-{now}"}
        kind = self.make("instance_types.add", name=f"h200-{now}") and f"h200-{now}"
        shape = self.make("instance_types.add_variant", name=f"{kind}.1", instance_type=kind) and f"{kind}.1"
        return {"name": shape if "variant" in name else kind, "instance_type": kind}

    def _datacenters(self, name: str, now: int) -> dict[str, Any]:
        return {"name": f"eu-{now}"} if name == "datacenters.add" else {}

    def _node(self, now: int) -> str:
        node_id = self.yard.node(f"g{now}")
        self.make("nodes.update", node_id=node_id, datacenter="eu-1", disabled_gpus=[])
        return node_id

    def _nodes(self, name: str, now: int) -> dict[str, Any]:
        node_id = self._node(now)
        selected = {"selector": {"ById": [node_id]}}
        if name in ("nodes.force_drain", "nodes.cancel_drain"):
            self.yard.instance(self.user, node_id)
        if name in ("nodes.force_drain", "nodes.cancel_drain", "nodes.resume", "nodes.delete"):
            self.make("nodes.drain", **selected)
        slot = "0000:01:00.0"
        return {"ById": node_id, "node_id": node_id, "disabled_gpus": slot, "pci_slot": slot, "datacenter": "eu-1"}

    def _instances(self, name: str, now: int) -> dict[str, Any]:
        node_id = self._node(now)
        if name == "instances.rent":
            selected = {"selector": {"ById": [node_id]}}
            self.make("nodes.update_instance_type", **selected)
            self.make("nodes.set_marketplace_listing", **selected, list_on_marketplace=True)
            return {}
        return {"ById": self.yard.instance(self.user, node_id)}

    def _quotas(self, name: str, now: int) -> dict[str, Any]:
        node_id = self._node(now)
        part = {"gpu_count": 1, "cpu_count": 8, "dram": 1 << 36, "disk": 1 << 38}
        team = self._team_of_one_name(now)
        known = {"node_id": node_id, "name": f"quota {now}", "TeamName": team, "valid_till": None, **part}
        if name in ("quotas.update", "quotas.revoke"):
            asked = {"node_id": node_id, "name": f"q {now}", "resources": part, "valid_till": None}
            asked["recipient"] = {"TeamName": team}
            known["quota_id"] = self.make("quotas.create", **asked)["quota"]["id"]
        return known

    def _reservations(self, name: str, now: int) -> dict[str, Any]:
        kind = self.make("reservations.types_add", duration_secs=10 * 86_400, price_factor=0.001)["id"]
        instance_id = self.yard.instance(self.user, self._node(now), variant=self.variant)
        known = {"id": kind, "reservation_type_id": kind, "executor_id": instance_id, "team_id": None}
        if name == "reservations.update":
            self.make("reservations.create", self.user, executor_id=instance_id, reservation_type_id=kind)
        return known

    def _volumes(self, name: str, now: int) -> dict[str, Any]:
        self.make("volumes.types_add", name=f"type-{now}")
        mine = self.make("volumes.create", self.user, name=f"v-{now}", volume_type_name=f"type-{now}")
        known = {"volume_id": mine["volume"]["id"], "name": f"volume-{now}", "volume_type_name": f"type-{now}"}
        unused = self.make("volumes.types_add", name=f"unused-{now}")["id"]
        return {**known, "id": unused, "datacenter": "eu-1"}

    _public_volumes = _volumes

    def _team_volumes(self, name: str, now: int) -> dict[str, Any]:
        known = self._volumes(name, now)
        kind = known["volume_type_name"]
        made = self.make("team_volumes.create", self.user, name=f"t-{now}", volume_type_name=kind, team_id=self.team)
        return {**known, "volume_id": made["volume"]["id"], "team_id": self.team}

    def _team_of_one_name(self, now: int) -> str:
        """Requests that were made up may have added teams of any name: this one has a name of its own."""
        return str(self.make("teams.create", self.user, name=f"team {now}")["name"])

    def _networks(self, name: str, now: int) -> dict[str, Any]:
        team = self._team_of_one_name(now)
        spread = next(self._numbers)
        free = [f"10.{spread // 250}.{spread % 250}.{part}" for part in (1, 100, 101, 200)]
        if name != "networks.add":
            ranges = [{"from": free[2], "to": free[3]}]
            self.make("networks.add", name=f"net-{now}", team_name=team, ip_ranges=ranges)
        named = {"network": f"net-{now}", "ByName": team, "team_name": team, "name": f"private-{now}", "team_id": None}
        return {**named, "from": free[0], "to": free[1]}

    def _instance_presets(self, name: str, now: int) -> dict[str, Any]:
        with self.office.database.write() as unit:
            presets.capture(unit, self.user.id, SHAPE, now=now, random=self.office.random)
        with self.office.database.read() as unit:
            mine = select(instance_preset.c.id).where(instance_preset.c.user_id == self.user.id)
            return {"id": unit.select(mine).scalar()}

    def _recipe_groups(self, name: str, now: int) -> dict[str, Any]:
        return self._named("recipe_groups", name, now)

    def _recipe_tags(self, name: str, now: int) -> dict[str, Any]:
        return self._named("recipe_tags", name, now)

    def _named(self, noun: str, name: str, now: int) -> dict[str, Any]:
        if name != f"{noun}.add":
            self.make(f"{noun}.add", name=f"this {now}")
        return {"name": f"this {now}"}

    def _recipes(self, name: str, now: int) -> dict[str, Any]:
        if name == "recipes.add":
            return {"name": f"recipe {now}"}
        return {"Name": "Ubuntu 24.04 Server"}
